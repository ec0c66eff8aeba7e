"""The kernel of `sampling.py`: the best of a part of one row."""

# Kernels are Triton, not Python: their integers are tensors and their flags constexprs, which a Python checker denies.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from tridraft.kernels._argmax import is_nan
from tridraft.kernels._op import DEBUG
from tridraft.kernels._pdl import pdl_wait
from tridraft.kernels.random import MAX_GUMBEL, STRIP, gumbel_of_word, uniform_of_word, words_of_counter

GROUP = tl.constexpr(4 * STRIP.value)
"""Ids of four strips, which share their random words."""

LANES = tl.constexpr(32)
"""Of the one warp that the ladder gives a program; with others the result is the same."""

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _any(flags):
    return tl.max(flags.to(tl.int32)) > 0


@triton.jit
def _zero_like(x):
    """Zeros held by the threads that hold x. The compiler lays out what a range starts as it pleases, and random words
    that other threads need would pass through shared memory, with a barrier for each strip.
    """
    bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
    return (bits.to(tl.uint64) >> 32).to(tl.int32)


@triton.jit
def _load_tile(row_ptr, lane, group, vocab_size):
    """The four strips of a group as they are stored; NaN, which never wins, past the vocabulary."""
    nan = float("nan")
    offs = lane + group * GROUP
    ptrs = row_ptr + offs
    if (group + 1) * GROUP <= vocab_size:  # masks would be a fifth of the greedy loop
        x0, x1 = tl.load(ptrs), tl.load(ptrs + STRIP)
        x2, x3 = tl.load(ptrs + 2 * STRIP), tl.load(ptrs + 3 * STRIP)
    else:
        x0 = tl.load(ptrs, mask=offs < vocab_size, other=nan)
        x1 = tl.load(ptrs + STRIP, mask=offs + STRIP < vocab_size, other=nan)
        x2 = tl.load(ptrs + 2 * STRIP, mask=offs + 2 * STRIP < vocab_size, other=nan)
        x3 = tl.load(ptrs + 3 * STRIP, mask=offs + 3 * STRIP < vocab_size, other=nan)
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
            if _any((ids >= group * GROUP) & (ids < (group + 1) * GROUP)):
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
        mine = (ids >= first_group * GROUP) & (ids < last_group * GROUP) & (ids % STRIP // WIDTH == column)
        minus_inf = tl.full((16,), float("-inf"), tl.float32).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + ids, minus_inf, mask=mine)


@triton.jit
def _take(x, offs, best, best_id):
    """The better of each lane's score and `x`; of equal ones the first, which has the lower id."""
    take = x > best
    return tl.where(take, x, best), tl.where(take, offs, best_id)


@triton.jit
def _best_of_lane(scores, ids, otherwise):
    """Each lane's best score and its lowest id."""
    best = tl.max(scores, axis=1)
    return best, tl.min(tl.where(scores == best[:, None], ids, otherwise), axis=1)


@triton.jit
def _lowest_equal(x0, x1, x2, x3, value, offs, otherwise):
    """The lowest id of each lane whose logit is `value`."""
    lowest = tl.where(x3 == value, offs + 3 * STRIP, otherwise)
    lowest = tl.where(x2 == value, offs + 2 * STRIP, lowest)
    lowest = tl.where(x1 == value, offs + STRIP, lowest)
    return tl.where(x0 == value, offs, lowest)


@triton.jit
def least_score(x, word, inverse):
    """At most the score of x, and nearly that for a small u: −log(1 − u) ≤ u / (1 − u).

    The bits of a float are its binary logarithm, at most 0.0861 too small.
    """
    bits = uniform_of_word(word).to(tl.int32, bitcast=True)
    complement = uniform_of_word(~word).to(tl.int32, bitcast=True)
    return x * inverse + ((complement - bits).to(tl.float32) * 2.0**-23 - 0.0861) * _LN2


@triton.jit
def slack_below(score):
    """A bar that no score above `score` fails by rounding: of scores, logarithms or exponents. None for NaN."""
    score = tl.minimum(tl.maximum(score, float("-inf")), 1e38)
    return score - 1e-3 - 1e-6 * tl.abs(score)


@triton.jit
def may_win(x, word, inverse, bar):
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
def sample_kernel(
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
    EACH: tl.constexpr = WIDTH // LANES
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1)
    first_group = tl.program_id(2) * groups_per_program
    last_group = tl.minimum(first_group + groups_per_program, num_groups)
    row_ptr = logits_ptr + row * stride_n
    # A lane's ids of a strip are consecutive: their maximum is taken without another lane.
    first_ids = column * WIDTH + tl.arange(0, LANES) * EACH
    lane = first_ids[:, None] + tl.arange(0, EACH)[None, :]

    # All that has a latency of its own is on its way before anything is known: at N = 1 it is most of the kernel.
    slot = tl.load(idx_mapping_ptr + row).to(tl.int64)
    r0, r1, r2, r3 = _load_tile(row_ptr, lane, first_group, vocab_size)
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
        best = tl.full((LANES,), float("-inf"), tl.float32)
        best_id = tl.zeros((LANES,), tl.int32)
        seen = tl.full((LANES,), float("nan"), tl.float32)
        bar = float("-inf")
        for group in range(first_group, last_group):
            offs = lane + group * GROUP
            x0, x1, x2, x3 = r0.to(tl.float32), r1.to(tl.float32), r2.to(tl.float32), r3.to(tl.float32)
            if again:
                x0, x1, x2, x3 = _drop_suppressed(x0, x1, x2, x3, offs, group, suppress_ptr, num_suppressed)
            if logits_out_ptr is not None:
                _store_strip(out_ptr, offs, x0, vocab_size)
                _store_strip(out_ptr, offs + STRIP, x1, vocab_size)
                _store_strip(out_ptr, offs + 2 * STRIP, x2, vocab_size)
                _store_strip(out_ptr, offs + 3 * STRIP, x3, vocab_size)

            top = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
            highest = tl.max(top, axis=1)
            if group + 1 < last_group:  # greedy, nothing below wants this tile: the next gets its registers
                r0, r1, r2, r3 = _load_tile(row_ptr, lane, group + 1, vocab_size)
            if again:
                seen = tl.maximum(seen, highest)
            if temperature > 0:
                if _any(highest * inverse + MAX_GUMBEL >= bar):
                    w0, w1, w2, w3 = words_of_counter(seed, position, lane + group * STRIP + _zero_like(top), STREAM)
                    word = tl.minimum(tl.minimum(w0, w1), tl.minimum(w2, w3))
                    if group == first_group:
                        # The best of a tile is nearly always the one of its four with the largest noise.
                        x = tl.where(w0 == word, x0, tl.where(w1 == word, x1, tl.where(w2 == word, x2, x3)))
                        bar = slack_below(tl.max(least_score(x, word, inverse)))
                    if _any(may_win(top, word, inverse, bar)):
                        for strip in range(4):
                            x = _pick(strip, x0, x1, x2, x3)
                            word = _pick(strip, w0, w1, w2, w3)
                            if _any(may_win(x, word, inverse, bar)):
                                score = x * inverse + gumbel_of_word(word)
                                score, score_id = _best_of_lane(score, offs + strip * STRIP, vocab_size)
                                best, best_id = _take(score, score_id, best, best_id)
                        bar = tl.maximum(bar, slack_below(tl.max(best, axis=0)))
            else:
                best, best_id = _take(highest, first_ids + group * GROUP, best, best_id)

        value = tl.max(best, axis=0)
        token = tl.min(tl.where(best == value, best_id, vocab_size), axis=0)
        if temperature <= 0:
            # The greedy loop knows the group alone; one more look at it, in the cache, tells which of its ids.
            group = token // GROUP
            offs = lane + group * GROUP
            r0, r1, r2, r3 = _load_tile(row_ptr, lane, group, vocab_size)
            x0, x1, x2, x3 = r0.to(tl.float32), r1.to(tl.float32), r2.to(tl.float32), r3.to(tl.float32)
            if again:
                x0, x1, x2, x3 = _drop_suppressed(x0, x1, x2, x3, offs, group, suppress_ptr, num_suppressed)
            token = tl.min(_lowest_equal(x0, x1, x2, x3, value, offs, vocab_size))
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
            r0, r1, r2, r3 = _load_tile(row_ptr, lane, first_group, vocab_size)
            again = True

    part = tl.program_id(2) * tl.num_programs(1) + column
    offset = row * tl.num_programs(1) * tl.num_programs(2) + part
    tl.store(values_ptr + offset, value)
    tl.store(ids_ptr + offset, token)
    if logits_out_ptr is not None and suppress_ptr is not None:
        _store_suppressed(out_ptr, first_group, last_group, column, suppress_ptr, num_suppressed, WIDTH)
