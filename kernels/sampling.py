"""Draft sampling: one token id a row from its logits, in one pass over them.

    x[n, i]  = logits[n, i]                                        −inf for suppressed i
    token[n] = argmax_i  x[n, i] / T + gumbel(seed, position, i)   T = temperature of the row's request, T > 0
    token[n] = argmax_i  x[n, i]                                   T = 0

logits: `[N, V]` float, any row stride. Ties and NaN: `_argmax.py`. Noise: `random.py`, stream DRAFT, so that a token
depends on its request's seed, its position and its logits only. The Gumbel-max trick draws exactly from softmax(x / T).

Temperature and seed belong to a request: row n uses slot idx_mapping[n] of `[S]` tensors, and −1 marks a padding row.

Two launches: each program of the first reduces a part of one row to a (score, id) pair, the second one reduces the
pairs of a row. What the noise costs is cut by what it cannot do: a tile whose best logit plus the largest noise lies
below the best score so far draws no numbers; a strip of it whose every word is too large to lift its own logit to that
score takes no logarithms. The bounds are safe: the result is that of doing it all.
"""

# Kernels are Triton, not Python: their integers are tensors and their flags constexprs, which a Python checker denies.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tridraft.kernels._argmax import argmax_reference, eligible_ids, finish_argmax, is_nan
from tridraft.kernels._op import (
    DEBUG,
    FLOATS,
    Arch,
    Impl,
    arch_of,
    cdiv,
    check_tensor,
    register,
    use_triton,
)
from tridraft.kernels._pdl import pdl_options, pdl_wait
from tridraft.kernels.random import (
    DRAFT,
    MAX_GUMBEL,
    STRIP,
    gumbel,
    gumbel_of_word,
    uniform_of_word,
    words_of_counter,
)
from tridraft.kernels.suppress import check_suppress_ids


def scores_reference(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    stream: int = DRAFT,
) -> Tensor:
    """`[N, C]` float32, of which the largest wins. `token_ids` `[C]` holds the ids that key the columns' noise."""
    slots = idx_mapping.long().clamp(min=0)
    scale = temperature[slots]
    scores = logits.float()
    rows = (scale > 0).nonzero()[:, 0]
    if rows.numel():
        noise = gumbel(seeds[slots][rows, None], positions[rows, None], token_ids, stream)
        scores = scores.index_copy(0, rows, scores[rows] * (1 / scale[rows, None]) + noise)
    return scores


def sample_reference(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    eligible: Tensor | None = None,
    stream: int = DRAFT,
) -> tuple[Tensor, Tensor]:
    """The definition of sampling from given columns; `eligible` `[C]` is False where suppressed.

    Returns:
        the winning column of each row `[N]` int64, and whether all its eligible logits are NaN `[N]` bool.
    """
    scores = scores_reference(logits, idx_mapping, temperature, seeds, positions, token_ids, stream)
    return argmax_reference(scores, eligible)


def draft_sample_reference(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    suppress_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition: ids `[N]` int64 and all_nan `[N]` bool; rows of padding hold anything."""
    vocab_size, device = logits.shape[1], logits.device
    eligible = eligible_ids(vocab_size, suppress_ids, device)
    token_ids = torch.arange(vocab_size, device=device)
    return sample_reference(logits, idx_mapping, temperature, seeds, positions, token_ids, eligible)


def store_reference(tokens: Tensor, all_nan: Tensor, idx_mapping: Tensor, nan_flag: Tensor | None, out: Tensor) -> None:
    """Write the rows that are not padding."""
    active = idx_mapping >= 0
    out.copy_(torch.where(active, tokens.to(out.dtype), out))
    if nan_flag is not None:
        nan_flag.copy_(torch.where(active, all_nan.to(nan_flag.dtype), nan_flag))


_GROUP = tl.constexpr(4 * STRIP.value)
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _any(flags):
    return tl.max(flags.to(tl.int32), axis=0) > 0


@triton.jit
def _zero_like(x):
    """Zeros held by the threads that hold x. The compiler lays out what a range starts as it pleases, and random words
    that other threads need would pass through shared memory, with a barrier for each strip.
    """
    bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
    return (bits.to(tl.uint64) >> 32).to(tl.int32)


@triton.jit
def _load_tile(row_ptr, lane, group, last_group, vocab_size):
    """The four strips of a group as they are stored; NaN, which never wins, past the vocabulary and the last group."""
    nan = float("nan")
    offs = lane + group * _GROUP
    limit = tl.where(group < last_group, vocab_size, 0)
    x0 = tl.load(row_ptr + offs, mask=offs < limit, other=nan)
    x1 = tl.load(row_ptr + offs + STRIP, mask=offs + STRIP < limit, other=nan)
    x2 = tl.load(row_ptr + offs + 2 * STRIP, mask=offs + 2 * STRIP < limit, other=nan)
    x3 = tl.load(row_ptr + offs + 3 * STRIP, mask=offs + 3 * STRIP < limit, other=nan)
    return x0, x1, x2, x3


@triton.jit
def _store_strip(out_ptr, offs, x, limit):
    x = tl.where(is_nan(x), float("-inf"), x)
    tl.store(out_ptr + offs, x.to(out_ptr.dtype.element_ty), mask=offs < limit)


@triton.jit
def _drop_suppressed(x0, x1, x2, x3, offs, group, suppress_ptr, num_suppressed):
    """NaN at suppressed ids. Sixteen are held against the group at a time; few groups hold any."""
    if suppress_ptr is not None:
        nan = float("nan")
        for start in range(0, num_suppressed, 16):
            index = start + tl.arange(0, 16)
            ids = tl.load(suppress_ptr + index, mask=index < num_suppressed, other=-1)
            if _any((ids >= group * _GROUP) & (ids < (group + 1) * _GROUP)):
                for i in range(start, tl.minimum(start + 16, num_suppressed)):
                    token_id = tl.load(suppress_ptr + i).to(tl.int32)
                    x0 = tl.where(offs == token_id, nan, x0)
                    x1 = tl.where(offs + STRIP == token_id, nan, x1)
                    x2 = tl.where(offs + 2 * STRIP == token_id, nan, x2)
                    x3 = tl.where(offs + 3 * STRIP == token_id, nan, x3)
    return x0, x1, x2, x3


@triton.jit
def _store_suppressed(out_ptr, first_group, last_group, column, suppress_ptr, num_suppressed, WIDTH: tl.constexpr):
    """−inf at the suppressed ids among a program's, after its strips are stored."""
    tl.debug_barrier()
    for start in range(0, num_suppressed, 16):
        index = start + tl.arange(0, 16)
        ids = tl.load(suppress_ptr + index, mask=index < num_suppressed, other=-1)
        mine = (ids >= first_group * _GROUP) & (ids < last_group * _GROUP) & (ids % STRIP // WIDTH == column)
        minus_inf = tl.full((16,), float("-inf"), tl.float32).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + ids, minus_inf, mask=mine)


@triton.jit
def _take(x, offs, best, best_id):
    """The better of each lane's score and `x`; of equal ones the first, which has the lower id."""
    take = x > best
    return tl.where(take, x, best), tl.where(take, offs, best_id)


@triton.jit
def _lowest_equal(x0, x1, x2, x3, value, offs, otherwise):
    """The lowest id of each lane whose logit is `value`."""
    lowest = tl.where(x3 == value, offs + 3 * STRIP, otherwise)
    lowest = tl.where(x2 == value, offs + 2 * STRIP, lowest)
    lowest = tl.where(x1 == value, offs + STRIP, lowest)
    return tl.where(x0 == value, offs, lowest)


@triton.jit
def _least_score(x, word, inverse):
    """At most the score of x, and nearly that for a small u: −log(1 − u) ≤ u / (1 − u).

    The bits of a float are its binary logarithm, at most 0.0861 too small.
    """
    bits = uniform_of_word(word).to(tl.int32, bitcast=True)
    complement = uniform_of_word(~word).to(tl.int32, bitcast=True)
    return x * inverse + ((complement - bits).to(tl.float32) * 2.0**-23 - 0.0861) * _LN2


@triton.jit
def _slack_below(score):
    """A bar that no score above `score` fails by rounding: of scores, logarithms or exponents. None for NaN."""
    score = tl.minimum(tl.maximum(score, float("-inf")), 1e38)
    return score - 1e-3 - 1e-6 * tl.abs(score)


@triton.jit
def _may_win(x, word, inverse, bar):
    """True wherever the noise of `word` may lift the score of x to the bar.

    gumbel(u) < −log u, so u may not exceed exp(score − bar). The word's upper 23 bits, as the mantissa of a float in
    [1, 2), are 1 + u rounded down.
    """
    rounded = ((word >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
    return rounded <= 1.0 + tl.exp2((x * inverse - bar) * _LOG2E)


@triton.jit
def _pick(strip, a0, a1, a2, a3):
    """One of four strips by its number."""
    return tl.where(strip < 2, tl.where(strip == 0, a0, a1), tl.where(strip == 2, a2, a3))


@triton.jit(debug=DEBUG, do_not_specialize=["num_slots", "num_suppressed", "num_groups", "groups_per_program"])
def _sample_kernel(
    logits_ptr,  # [N, V] float
    idx_mapping_ptr,  # [N] int
    temperature_ptr,  # [S] f32
    seeds_ptr,  # [S] i64
    positions_ptr,  # [N] int
    suppress_ptr,  # [n] i64 or None
    logits_out_ptr,  # [S, K, >=V] float or None
    draft_step_ptr,  # [] int or None
    values_ptr,  # [N, P] f32
    ids_ptr,  # [N, P] i32
    vocab_size,
    num_slots,
    num_suppressed,
    num_groups,
    groups_per_program,
    stride_n,
    stride_os,
    stride_ok,
    STREAM: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (n, c, g): of row n, WIDTH ids of each of the four strips of some consecutive groups of 4,096 ids."""
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1)
    first_group = tl.program_id(2) * groups_per_program
    last_group = tl.minimum(first_group + groups_per_program, num_groups)
    row_ptr = logits_ptr + row * stride_n
    lane = column * WIDTH + tl.arange(0, WIDTH)

    # All that has a latency of its own is on its way before anything is known: at N = 1 it is most of the kernel.
    slot = tl.load(idx_mapping_ptr + row).to(tl.int64)
    r0, r1, r2, r3 = _load_tile(row_ptr, lane, first_group, last_group, vocab_size)
    position = tl.load(positions_ptr + row).to(tl.int64)
    if suppress_ptr is not None:
        index = tl.arange(0, 16)
        suppressed = tl.load(suppress_ptr + index, mask=index < num_suppressed, other=-1)
    if slot < 0:
        return
    tl.device_assert(slot < num_slots, "idx_mapping out of range")
    temperature = tl.load(temperature_ptr + slot)
    seed = tl.load(seeds_ptr + slot)
    inverse = tl.div_rn(tl.full((), 1.0, tl.float32), tl.where(temperature > 0, temperature, 1.0))
    if logits_out_ptr is not None:
        step = tl.load(draft_step_ptr).to(tl.int64)
        out_ptr = logits_out_ptr + slot * stride_os + step * stride_ok

    # Whoever wins without a look at the suppressed ids wins with it, unless it is one of them, or nothing was there.
    # Then a program starts again, and also learns whether all it saw was NaN.
    value = float("nan")
    token = 0
    again = False
    done = False
    while not done:
        # Each lane keeps a best score of its own: one reduction for the program instead of one for each tile.
        best = tl.full((WIDTH,), float("-inf"), tl.float32)
        best_id = tl.zeros((WIDTH,), tl.int32)
        seen = tl.full((WIDTH,), float("nan"), tl.float32)
        bar = float("-inf")
        for group in range(first_group, last_group):
            n0, n1, n2, n3 = _load_tile(row_ptr, lane, group + 1, last_group, vocab_size)

            offs = lane + group * _GROUP
            x0, x1, x2, x3 = r0.to(tl.float32), r1.to(tl.float32), r2.to(tl.float32), r3.to(tl.float32)
            if again:
                x0, x1, x2, x3 = _drop_suppressed(x0, x1, x2, x3, offs, group, suppress_ptr, num_suppressed)
            if logits_out_ptr is not None:
                _store_strip(out_ptr, offs, x0, vocab_size)
                _store_strip(out_ptr, offs + STRIP, x1, vocab_size)
                _store_strip(out_ptr, offs + 2 * STRIP, x2, vocab_size)
                _store_strip(out_ptr, offs + 3 * STRIP, x3, vocab_size)

            top = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
            if again:
                seen = tl.maximum(seen, top)
            if temperature > 0:
                if _any(top * inverse + MAX_GUMBEL >= bar):
                    w0, w1, w2, w3 = words_of_counter(seed, position, lane + group * STRIP + _zero_like(r0), STREAM)
                    word = tl.minimum(tl.minimum(w0, w1), tl.minimum(w2, w3))
                    if group == first_group:
                        # The best of a tile is nearly always the one of its four with the largest noise.
                        x = tl.where(w0 == word, x0, tl.where(w1 == word, x1, tl.where(w2 == word, x2, x3)))
                        bar = _slack_below(tl.max(_least_score(x, word, inverse), axis=0))
                    if _any(_may_win(top, word, inverse, bar)):
                        for strip in range(4):
                            x = _pick(strip, x0, x1, x2, x3)
                            word = _pick(strip, w0, w1, w2, w3)
                            if _any(_may_win(x, word, inverse, bar)):
                                score = x * inverse + gumbel_of_word(word)
                                best, best_id = _take(score, offs + strip * STRIP, best, best_id)
                        bar = tl.maximum(bar, _slack_below(tl.max(best, axis=0)))
            else:
                best, best_id = _take(top, offs, best, best_id)
            r0, r1, r2, r3 = n0, n1, n2, n3

        value = tl.max(best, axis=0)
        token = tl.min(tl.where(best == value, best_id, vocab_size), axis=0)
        if temperature <= 0:
            # The greedy loop knows the group alone; one more look at it, in the cache, tells which of its ids.
            group = token // _GROUP
            offs = lane + group * _GROUP
            r0, r1, r2, r3 = _load_tile(row_ptr, lane, group, last_group, vocab_size)
            x0, x1, x2, x3 = r0.to(tl.float32), r1.to(tl.float32), r2.to(tl.float32), r3.to(tl.float32)
            if again:
                x0, x1, x2, x3 = _drop_suppressed(x0, x1, x2, x3, offs, group, suppress_ptr, num_suppressed)
            token = tl.min(_lowest_equal(x0, x1, x2, x3, value, offs, vocab_size), axis=0)
        done = value > float("-inf")
        if again:
            value = tl.where(done, value, tl.max(seen, axis=0))
            done = True
        elif suppress_ptr is not None:
            done = done & ~_any(suppressed == token)
            for start in range(16, num_suppressed, 16):
                more = tl.load(suppress_ptr + start + index, mask=start + index < num_suppressed, other=-1)
                done = done & ~_any(more == token)
        if not done:
            r0, r1, r2, r3 = _load_tile(row_ptr, lane, first_group, last_group, vocab_size)
            again = True

    part = tl.program_id(2) * tl.num_programs(1) + column
    offset = row * tl.num_programs(1) * tl.num_programs(2) + part
    tl.store(values_ptr + offset, value)
    tl.store(ids_ptr + offset, token)
    if logits_out_ptr is not None and suppress_ptr is not None:
        _store_suppressed(out_ptr, first_group, last_group, column, suppress_ptr, num_suppressed, WIDTH)


@dataclass(frozen=True)
class SampleConfig:
    """Launch settings of the first stage.

    Attributes:
        width: ids a program takes of each strip of 1,024.
        groups_per_program: groups of four strips a program reduces to one pair.
        num_warps: of a program.
    """

    width: int
    groups_per_program: int
    num_warps: int


def sample_config(num_rows: int, vocab_size: int, arch: Arch) -> SampleConfig:
    """The ladder. One warp a program: nothing in its loop waits at a barrier.

    Times in µs on an H200, 2026-11-30, 262,144 logits, greedy / temperature 1.
    """
    groups = cdiv(vocab_size, _GROUP.value)
    if num_rows * vocab_size <= 4096 * arch.num_sms and groups <= 64:
        # One row: 1,024 programs of 256 ids, 3.4 / 4.4. Of 512 ids 3.3 / 4.7; four warps of 1,024 ids 3.2 / 5.1.
        return SampleConfig(width=64, groups_per_program=1, num_warps=1)
    # As many programs as run at once, 16 a multiprocessor by their registers: a second wave waits for all the latencies
    # again, and each program has to find a bar of its own. 8 rows, 1 / 2 / 4 groups a program: 6.8 / 4.8 / 5.3 greedy;
    # 32 rows, 4 / 8 / 16: 10.5 / 8.5 / 11.4; 128 rows, 16 / 32 / 64: 24.9 / 24.0 / 36.3. Strips of 1,024, 8 warps:
    # 7.6, 14.2 and 30.2.
    num_tiles = num_rows * groups * (STRIP.value // 128)
    groups_per_program = min(groups, max(cdiv(num_tiles, 16 * arch.num_sms), cdiv(groups, 128)))
    return SampleConfig(width=128, groups_per_program=groups_per_program, num_warps=1)


def _launch_draft_sample(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    suppress_ids: Tensor | None,
    draft_logits_out: Tensor | None,
    draft_step: Tensor | None,
    nan_flag: Tensor | None,
    out: Tensor,
) -> None:
    num_rows, vocab_size = logits.shape
    arch = arch_of(logits.device)
    config = sample_config(num_rows, vocab_size, arch)
    num_groups = cdiv(vocab_size, _GROUP.value)
    grid = (
        num_rows,
        cdiv(min(vocab_size, STRIP.value), config.width),
        cdiv(num_groups, config.groups_per_program),
    )
    num_parts = grid[1] * grid[2]
    values = torch.empty((num_rows, num_parts), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, num_parts), dtype=torch.int32, device=logits.device)
    _sample_kernel[grid](
        logits,
        idx_mapping,
        temperature,
        seeds,
        positions,
        suppress_ids,
        draft_logits_out,
        None if draft_logits_out is None else draft_step,
        values,
        ids,
        vocab_size,
        temperature.shape[0],
        0 if suppress_ids is None else suppress_ids.shape[0],
        num_groups,
        config.groups_per_program,
        logits.stride(0),
        0 if draft_logits_out is None else draft_logits_out.stride(0),
        0 if draft_logits_out is None else draft_logits_out.stride(1),
        STREAM=DRAFT,
        WIDTH=config.width,
        num_warps=config.num_warps,
        enable_fp_fusion=False,  # scores round as in the definition
        **pdl_options(arch),
    )
    finish_argmax(values, ids, idx_mapping, suppress_ids, None, nan_flag, out, vocab_size)


@register("draft_sample", mutates=("draft_logits_out", "nan_flag", "out"))
def _draft_sample(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    suppress_ids: Tensor | None,
    draft_logits_out: Tensor | None,
    draft_step: Tensor | None,
    nan_flag: Tensor | None,
    out: Tensor,
    triton: bool,
) -> None:
    if triton:
        _launch_draft_sample(
            logits,
            idx_mapping,
            temperature,
            seeds,
            positions,
            suppress_ids,
            draft_logits_out,
            draft_step,
            nan_flag,
            out,
        )
        return
    tokens, all_nan = draft_sample_reference(logits, idx_mapping, temperature, seeds, positions, suppress_ids)
    store_reference(tokens, all_nan, idx_mapping, nan_flag, out)
    if draft_logits_out is not None and draft_step is not None:
        rows = (idx_mapping >= 0).nonzero()[:, 0]
        kept = logits[rows].masked_fill(logits[rows].isnan(), float("-inf"))
        if suppress_ids is not None:
            kept = kept.index_fill(1, suppress_ids, float("-inf"))
        slots = idx_mapping[rows].long()
        draft_logits_out[slots, draft_step.long(), : logits.shape[1]] = kept.to(draft_logits_out.dtype)


def check_sampling(
    num_rows: int,
    device: torch.device,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    nan_flag: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """Refuse per-row and per-request arguments no sampler can take; returns `out`, allocated if it is None."""
    integers = (torch.int64, torch.int32)
    check_tensor("idx_mapping", idx_mapping, shape=(num_rows,), dtype=integers, device=device)
    check_tensor("temperature", temperature, shape=("S",), dtype=torch.float32, device=device)
    check_tensor("seeds", seeds, shape=(temperature.shape[0],), dtype=torch.int64, device=device)
    check_tensor("positions", positions, shape=(num_rows,), dtype=integers, device=device)
    if nan_flag is not None:
        check_tensor(
            "nan_flag",
            nan_flag,
            shape=(num_rows,),
            dtype=(torch.bool, torch.int32),
            device=device,
            contiguous_last=False,
        )
    if out is None:
        return torch.empty(num_rows, dtype=torch.int64, device=device)
    check_tensor("out", out, shape=(num_rows,), dtype=integers, device=device, contiguous_last=False)
    return out


def check_logits_out(
    draft_logits_out: Tensor | None, draft_step: Tensor | None, num_columns: int, device: torch.device
) -> None:
    """Refuse a cache of draft logits that cannot hold `num_columns`, or one without its step."""
    if draft_logits_out is None:
        return
    check_tensor("draft_logits_out", draft_logits_out, shape=("S", "K", "V"), dtype=FLOATS, device=device)
    if draft_logits_out.shape[2] < num_columns:
        raise ValueError(f"draft_logits_out: got {draft_logits_out.shape[2]} columns, needs {num_columns}")
    if draft_step is None:
        raise ValueError("draft_step: got None, needs a 0-d int tensor beside draft_logits_out")
    check_tensor("draft_step", draft_step, shape=(), dtype=(torch.int64, torch.int32), device=device)


def draft_sample(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    suppress_ids: Tensor | None = None,
    draft_logits_out: Tensor | None = None,
    draft_step: Tensor | None = None,
    nan_flag: Tensor | None = None,
    out: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Sample one token a row: suppression, temperature, Gumbel-max or argmax in one pass over the logits.

    Args:
        logits: `[N, V]` float32, bfloat16 or float16, any row stride.
        idx_mapping: `[N]` int64 or int32, the request slot of each row; −1: padding, nothing is read or written.
        temperature: `[S]` float32 of each request slot; 0 is greedy.
        seeds: `[S]` int64 of each request slot.
        positions: `[N]` int64 or int32, the position before the token being sampled.
        suppress_ids: `[n]` int64 ids that never win (see `make_suppress_ids`).
        draft_logits_out: `[S, K, ≥V]` float; receives what was sampled from, for the acceptance test: the logits before
            temperature, −inf where suppressed or NaN, at `[slot, draft_step, :V]`. Further columns are left alone.
        draft_step: 0-d int64 or int32 tensor.
        nan_flag: `[N]` bool or int32; receives whether all eligible logits of the row are NaN.
        out: `[N]` int64 or int32, any stride.
        impl: "auto", "triton" or "eager".

    Returns:
        `out`, or a new `[N]` int64 tensor, in which rows of padding hold anything.

    With vLLM's or SGLang's `[num_tokens, vocab_size]` logits, and per-request sampling tensors indexed by slot:

    >>> logits = torch.tensor([[-8.0, -3, -2, -1, 0, 9, 1, 2], [0, 0, 0, 7, 0, 0, 0, 0]])
    >>> temperature, seeds = torch.zeros(4), torch.arange(4)
    >>> draft_sample(logits, torch.tensor([2, 0]), temperature, seeds, torch.tensor([17, 40]))
    tensor([5, 3])
    """
    check_tensor("logits", logits, shape=("N", "V"), dtype=FLOATS)
    num_rows, vocab_size = logits.shape
    if vocab_size == 0:
        raise ValueError(f"logits: got shape {list(logits.shape)}, needs at least one column")
    device = logits.device
    out = check_sampling(num_rows, device, idx_mapping, temperature, seeds, positions, nan_flag, out)
    suppress_ids = check_suppress_ids(suppress_ids, device)
    check_logits_out(draft_logits_out, draft_step, vocab_size, device)
    triton = use_triton(impl, logits)
    if num_rows:
        _draft_sample(
            logits,
            idx_mapping,
            temperature,
            seeds,
            positions,
            suppress_ids,
            draft_logits_out,
            draft_step,
            nan_flag,
            out,
            triton,
        )
    return out
