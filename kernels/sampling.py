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
from tridraft.kernels.random import DRAFT, MAX_GUMBEL, STRIP, gumbel, gumbel_of_word, words_of_counter
from tridraft.kernels.suppress import check_suppress_ids


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
    """The definition of sampling from given columns.

    `logits` is `[N, C]`, `token_ids` `[C]` holds the ids that key the columns' noise, `eligible` `[C]` is False where
    suppressed.

    Returns:
        the winning column of each row `[N]` int64, and whether all its eligible logits are NaN `[N]` bool.
    """
    slots = idx_mapping.long().clamp(min=0)
    scale = temperature[slots]
    scores = logits.float()
    rows = (scale > 0).nonzero()[:, 0]
    if rows.numel():
        noise = gumbel(seeds[slots][rows, None], positions[rows, None], token_ids, stream)
        scores = scores.index_copy(0, rows, scores[rows] * (1 / scale[rows, None]) + noise)
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


_TILE = tl.constexpr(4 * STRIP.value)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _first_id(tile, WIDTH: tl.constexpr):
    """The lowest token id of a tile: 1,024 / WIDTH tiles share the four strips of a group of 4,096 ids."""
    return tile * WIDTH + tile * WIDTH // STRIP * (3 * STRIP)


@triton.jit
def _load_tile(row_ptr, offs, limit):
    """Four strips of a row as they are stored; NaN, which never wins, past `limit`."""
    nan = float("nan")
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
def _drop_suppressed(x0, x1, x2, x3, offs, first, suppress_ptr, num_suppressed):
    """NaN at suppressed ids. Sixteen ids are held against a tile at a time; few tiles hold any."""
    nan = float("nan")
    for start in range(0, num_suppressed, 16):
        index = start + tl.arange(0, 16)
        ids = tl.load(suppress_ptr + index, mask=index < num_suppressed, other=-1)
        inside = (ids >= first) & (ids < first + _TILE)
        if tl.max(inside.to(tl.int32), axis=0) > 0:
            for i in range(start, tl.minimum(start + 16, num_suppressed)):
                token_id = tl.load(suppress_ptr + i)
                x0 = tl.where(offs == token_id, nan, x0)
                x1 = tl.where(offs + STRIP == token_id, nan, x1)
                x2 = tl.where(offs + 2 * STRIP == token_id, nan, x2)
                x3 = tl.where(offs + 3 * STRIP == token_id, nan, x3)
    return x0, x1, x2, x3


@triton.jit
def _take(x, offs, best, best_id):
    """The better of each lane's score and `x`; of equal ones the first, which has the lower id."""
    take = x > best
    return tl.where(take, x, best), tl.where(take, offs, best_id)


@triton.jit
def _draw(x, word, inverse, offs, best, best_id):
    return _take(x * inverse + gumbel_of_word(word), offs, best, best_id)


@triton.jit
def _reach(x, word, scale, bar):
    """At most 1 wherever the noise of `word` may lift the score of x to the bar; NaN where nothing is there.

    gumbel(u) < −log u, so u may not exceed exp(score − bar). The word's upper 23 bits, as the mantissa of a float in
    [1, 2), are u rounded down; neither they nor the difference can make a word that may look like one that may not.
    """
    rounded = ((word >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
    return rounded - tl.exp2(tl.fma(x, scale, -bar))


@triton.jit(debug=DEBUG, do_not_specialize=["num_tiles", "tiles_per_program"])
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
    num_tiles,
    tiles_per_program,
    stride_n,
    stride_os,
    stride_ok,
    STREAM: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row_ptr = logits_ptr + row * stride_n
    strip = tl.arange(0, WIDTH)

    # The first tile is on its way before anything is known of the row: at N = 1 that latency is most of the kernel.
    first_tile = part * tiles_per_program
    last_tile = tl.minimum(first_tile + tiles_per_program, num_tiles)
    r0, r1, r2, r3 = _load_tile(row_ptr, _first_id(first_tile, WIDTH) + strip, vocab_size)
    slot = tl.load(idx_mapping_ptr + row).to(tl.int64)
    if slot < 0:
        return
    tl.device_assert(slot < num_slots, "idx_mapping out of range")
    temperature = tl.load(temperature_ptr + slot)
    seed = tl.load(seeds_ptr + slot)
    position = tl.load(positions_ptr + row).to(tl.int64)
    inverse = tl.div_rn(tl.full((), 1.0, tl.float32), tl.where(temperature > 0, temperature, 1.0))
    if logits_out_ptr is not None:
        step = tl.load(draft_step_ptr).to(tl.int64)
        out_ptr = logits_out_ptr + slot * stride_os + step * stride_ok

    # Each lane keeps a best score of its own: one reduction for the program instead of several for each tile.
    best = tl.full((WIDTH,), float("-inf"), tl.float32)
    best_id = tl.zeros((WIDTH,), tl.int32)
    seen = tl.full((WIDTH,), float("nan"), tl.float32)
    peak = float("-inf")
    for tile in range(first_tile, last_tile):
        limit = tl.where(tile + 1 < last_tile, vocab_size, 0)
        n0, n1, n2, n3 = _load_tile(row_ptr, _first_id(tile + 1, WIDTH) + strip, limit)

        first = _first_id(tile, WIDTH)
        offs = first + strip
        x0, x1, x2, x3 = r0.to(tl.float32), r1.to(tl.float32), r2.to(tl.float32), r3.to(tl.float32)
        if suppress_ptr is not None:
            x0, x1, x2, x3 = _drop_suppressed(x0, x1, x2, x3, offs, first, suppress_ptr, num_suppressed)
        if logits_out_ptr is not None:
            _store_strip(out_ptr, offs, x0, vocab_size)
            _store_strip(out_ptr, offs + STRIP, x1, vocab_size)
            _store_strip(out_ptr, offs + 2 * STRIP, x2, vocab_size)
            _store_strip(out_ptr, offs + 3 * STRIP, x3, vocab_size)

        top = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
        seen = tl.maximum(seen, top)
        if temperature > 0:
            if tl.max(top, axis=0) * inverse + MAX_GUMBEL >= peak:
                w0, w1, w2, w3 = words_of_counter(seed, position, tile * WIDTH + strip, STREAM)
                if tile == first_tile:
                    # A score to be skipped by, at the price of one strip.
                    best, best_id = _draw(x0, w0, inverse, offs, best, best_id)
                    peak = tl.max(best, axis=0)
                # The slack covers every rounding on the way: of scores, logarithms and exponents.
                scale, bar = inverse * _LOG2E, (peak - 1e-3 - 1e-6 * tl.abs(peak)) * _LOG2E
                m0, m1 = _reach(x0, w0, scale, bar), _reach(x1, w1, scale, bar)
                m2, m3 = _reach(x2, w2, scale, bar), _reach(x3, w3, scale, bar)
                if tl.min(tl.minimum(tl.minimum(m0, m1), tl.minimum(m2, m3)), axis=0) <= 1:
                    if tl.min(m0, axis=0) <= 1:
                        best, best_id = _draw(x0, w0, inverse, offs, best, best_id)
                    if tl.min(m1, axis=0) <= 1:
                        best, best_id = _draw(x1, w1, inverse, offs + STRIP, best, best_id)
                    if tl.min(m2, axis=0) <= 1:
                        best, best_id = _draw(x2, w2, inverse, offs + 2 * STRIP, best, best_id)
                    if tl.min(m3, axis=0) <= 1:
                        best, best_id = _draw(x3, w3, inverse, offs + 3 * STRIP, best, best_id)
                    peak = tl.max(best, axis=0)
        else:
            best, best_id = _take(x0, offs, best, best_id)
            best, best_id = _take(x1, offs + STRIP, best, best_id)
            best, best_id = _take(x2, offs + 2 * STRIP, best, best_id)
            best, best_id = _take(x3, offs + 3 * STRIP, best, best_id)
        r0, r1, r2, r3 = n0, n1, n2, n3

    best = tl.where(is_nan(seen), seen, best)
    value = tl.max(best, axis=0)
    token = tl.min(tl.where(best == value, best_id, vocab_size), axis=0)
    offset = row * tl.num_programs(1) + part
    tl.store(values_ptr + offset, value)
    tl.store(ids_ptr + offset, token)


@dataclass(frozen=True)
class SampleConfig:
    """Launch settings of the first stage.

    Attributes:
        width: elements of each of a tile's four strips.
        tiles_per_program: tiles a program reduces to one pair.
        num_warps: of a program.
    """

    width: int
    tiles_per_program: int
    num_warps: int


def sample_config(num_rows: int, vocab_size: int, arch: Arch) -> SampleConfig:
    """The ladder: by how many elements there are for each multiprocessor.

    A program of several tiles takes whole groups of 4,096 ids, so that every lane meets its ids in ascending order.
    """
    per_sm = num_rows * vocab_size / arch.num_sms
    groups = cdiv(vocab_size, _TILE.value)
    if per_sm <= 4096 and groups <= 256:
        # One row of 262,144: 256 programs of 1,024 elements, two a multiprocessor, all of them on their way at once.
        return SampleConfig(width=256, tiles_per_program=1, num_warps=4)
    # Four elements a lane and strip at most: 128 registers a thread, 16 warps a multiprocessor. With eight they are 246
    # and 8, and 32 rows took 20.8 µs greedy and 67.6 at temperature 1 (H200, 2026-11-30).
    if per_sm <= 65536 and groups <= 512:
        # 8 rows, greedy: 7.0 µs with half a group a program, 7.5 with a whole one.
        return SampleConfig(width=512, tiles_per_program=1, num_warps=4)
    # Enough programs that every multiprocessor holds about eight, and as few first strips (which have no best score to
    # be skipped by) as that allows. At most 1,024 pairs a row: the second stage reduces them in one block.
    tiles = max(1, cdiv(groups, 1024), min(8, groups * num_rows // (8 * arch.num_sms)))
    return SampleConfig(width=1024, tiles_per_program=tiles, num_warps=8)


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
    groups, rest = divmod(vocab_size, _TILE.value)
    num_tiles = groups * (STRIP.value // config.width) + cdiv(min(rest, STRIP.value), config.width)
    num_parts = cdiv(num_tiles, config.tiles_per_program)
    values = torch.empty((num_rows, num_parts), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, num_parts), dtype=torch.int32, device=logits.device)
    _sample_kernel[(num_rows, num_parts)](
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
        num_tiles,
        config.tiles_per_program,
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
