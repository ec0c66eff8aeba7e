"""The kernel of `sampling.py`: the best of a part of one row."""

# Kernels are Triton, not Python: their integers are tensors and their flags constexprs, which a Python checker denies.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from tridraft.kernels._argmax import is_nan, is_suppressed
from tridraft.kernels._op import DEBUG
from tridraft.kernels._pdl import pdl_wait
from tridraft.kernels._winner import order_key
from tridraft.kernels.random import MAX_GUMBEL, STRIP, gumbel_of_word, words_of_counter

GROUP = tl.constexpr(4 * STRIP.value)
"""Ids of four strips, which share their random words."""

LANES = tl.constexpr(32)
"""Of the one warp that the ladder gives a program; with others the result is the same."""

_LOWEST = tl.constexpr(-3.4028234663852886e38)
"""No score but −inf, which never wins, is lower."""


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
def _load_tile(row_ptr, lane, group, last_group, vocab_size, WHOLE: tl.constexpr):
    """The four strips of a group as they are stored; NaN, which never wins, past the vocabulary.

    Anything past the last group, if all groups are WHOLE: their loads need no mask of their own, and nothing to fall
    back on.
    """
    offs = lane + group * GROUP
    ptrs = row_ptr + offs
    inside = group < last_group
    if WHOLE:
        inside = tl.full(offs.shape, group, tl.int32) < last_group  # a scalar mask is not interpreted
        x0, x1 = tl.load(ptrs, mask=inside), tl.load(ptrs + STRIP, mask=inside)
        x2, x3 = tl.load(ptrs + 2 * STRIP, mask=inside), tl.load(ptrs + 3 * STRIP, mask=inside)
    else:
        nan = float("nan")
        limit = tl.where(inside, vocab_size, 0)
        x0 = tl.load(ptrs, mask=offs < limit, other=nan)
        x1 = tl.load(ptrs + STRIP, mask=offs + STRIP < limit, other=nan)
        x2 = tl.load(ptrs + 2 * STRIP, mask=offs + 2 * STRIP < limit, other=nan)
        x3 = tl.load(ptrs + 3 * STRIP, mask=offs + 3 * STRIP < limit, other=nan)
    return x0, x1, x2, x3


@triton.jit
def _load_ids(row_ptr, ids, vocab_size):
    """The logits of one id of each strip a lane; NaN past the vocabulary."""
    nan = float("nan")
    x0 = tl.load(row_ptr + ids, mask=ids < vocab_size, other=nan)
    x1 = tl.load(row_ptr + ids + STRIP, mask=ids + STRIP < vocab_size, other=nan)
    x2 = tl.load(row_ptr + ids + 2 * STRIP, mask=ids + 2 * STRIP < vocab_size, other=nan)
    x3 = tl.load(row_ptr + ids + 3 * STRIP, mask=ids + 3 * STRIP < vocab_size, other=nan)
    return x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)


@triton.jit
def _take(score, ids, best, best_id):
    """The better of each lane's best score and another; of equal ones the lower id."""
    take = (score > best) | ((score == best) & (ids < best_id))
    return tl.where(take, score, best), tl.where(take, ids, best_id)


@triton.jit
def _store_strip(out_ptr, offs, x, limit):
    x = x.to(tl.float32)
    x = tl.where(is_nan(x), float("-inf"), x)
    tl.store(out_ptr + offs, x.to(out_ptr.dtype.element_ty), mask=offs < limit)


@triton.jit
def _drop_suppressed(x0, x1, x2, x3, offs, group, suppress_ptr, num_suppressed):
    """NaN at suppressed ids. Sixteen are held against the group at a time; few groups hold any."""
    if suppress_ptr is not None:
        nan = tl.full((), float("nan"), tl.float32).to(x0.dtype)
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
def _drop_suppressed_ids(x0, x1, x2, x3, ids, group, suppress_ptr, num_suppressed):
    """`_drop_suppressed` of a few ids, one of each strip a lane: sixteen suppressed ids at a time."""
    if suppress_ptr is not None:
        nan = float("nan")
        for start in range(0, num_suppressed, 16):
            index = start + tl.arange(0, 16)
            suppressed = tl.load(suppress_ptr + index, mask=index < num_suppressed, other=-1)
            if _any((suppressed >= group * GROUP) & (suppressed < (group + 1) * GROUP)):
                after = suppressed.to(tl.int32)[None, :] - ids[:, None]
                x0 = tl.where(tl.max((after == 0).to(tl.int32), axis=1) > 0, nan, x0)
                x1 = tl.where(tl.max((after == STRIP).to(tl.int32), axis=1) > 0, nan, x1)
                x2 = tl.where(tl.max((after == 2 * STRIP).to(tl.int32), axis=1) > 0, nan, x2)
                x3 = tl.where(tl.max((after == 3 * STRIP).to(tl.int32), axis=1) > 0, nan, x3)
    return x0, x1, x2, x3


@triton.jit
def _store_suppressed(
    out_ptr, first_group, last_group, column, vocab_size, suppress_ptr, num_suppressed, WIDTH: tl.constexpr
):
    """−inf at the suppressed ids among a program's, after its strips are stored."""
    tl.debug_barrier()
    for start in range(0, num_suppressed, 16):
        index = start + tl.arange(0, 16)
        ids = tl.load(suppress_ptr + index, mask=index < num_suppressed, other=-1)
        mine = (ids >= first_group * GROUP) & (ids < tl.minimum(last_group * GROUP, vocab_size))
        mine &= ids % STRIP // WIDTH == column
        minus_inf = tl.full((16,), float("-inf"), tl.float32).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + ids, minus_inf, mask=mine)


@triton.jit
def _allowed(r0, r1, r2, r3, lane, group, suppress_ptr, num_suppressed, out_ptr, limit, AGAIN: tl.constexpr):
    """A tile, if AGAIN with NaN at suppressed ids; it is stored where there is room for it."""
    offs = lane + group * GROUP
    if AGAIN:
        r0, r1, r2, r3 = _drop_suppressed(r0, r1, r2, r3, offs, group, suppress_ptr, num_suppressed)
    if out_ptr is not None:
        _store_strip(out_ptr, offs, r0, limit)
        _store_strip(out_ptr, offs + STRIP, r1, limit)
        _store_strip(out_ptr, offs + 2 * STRIP, r2, limit)
        _store_strip(out_ptr, offs + 3 * STRIP, r3, limit)
    return r0, r1, r2, r3


@triton.jit
def _top(r0, r1, r2, r3):
    """The best of each counter's four logits."""
    x0, x1, x2, x3 = r0.to(tl.float32), r1.to(tl.float32), r2.to(tl.float32), r3.to(tl.float32)
    return tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))


@triton.jit
def _lowest_equal(x0, x1, x2, x3, value, offs, otherwise):
    """The lowest id of each lane whose logit is `value`."""
    x0, x1, x2, x3 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
    lowest = tl.where(x3 == value, offs + 3 * STRIP, otherwise)
    lowest = tl.where(x2 == value, offs + 2 * STRIP, lowest)
    lowest = tl.where(x1 == value, offs + STRIP, lowest)
    return tl.where(x0 == value, offs, lowest)


@triton.jit
def most_score(x, word, inverse):
    """At least the score of x, within rounding, and at most 0.06 more for a small u: −log(−log(1 − u)) < −log u.

    The bits of a float are its binary logarithm, at most 0.0861 too small; those of 1 are 127 · 2²³.
    """
    bits = (word.to(tl.float32) + 0.5).to(tl.int32, bitcast=True)
    noise = tl.fma(bits.to(tl.float32), -8.262958294867817e-08, 110.21040141088987)  # (32 + 127 − bits / 2²³) ln 2
    return tl.fma(x, inverse, noise)


@triton.jit
def slack_below(score):
    """A bar that no score above `score` fails by rounding: of scores or of logarithms. None for NaN."""
    score = tl.minimum(tl.maximum(score, float("-inf")), 1e38)
    return score - 1e-3 - 1e-6 * tl.abs(score)


@triton.jit
def _key(score, index, COUNT: tl.constexpr):
    """An integer that orders as the score does but for its last bits, which hold the index: no two are equal."""
    return (order_key(tl.maximum(score, float("-inf"))) & -COUNT) | index


@triton.jit
def _below(keys, key):
    """`keys` that are below `key`."""
    return tl.where(keys < key, keys, -(2**31))


@triton.jit
def _maximum(values):
    """The largest of a warp's floats: from sm_80 on, a reduction of integers is one instruction."""
    key = tl.max(order_key(tl.maximum(values, float("-inf"))), axis=0)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best_lane(best, best_id, otherwise):
    """The best score of the lanes and its lowest id."""
    value = _maximum(best)
    return value, tl.min(tl.where(best == value, best_id, otherwise), axis=0)


@triton.jit
def _pick(strip, a0, a1, a2, a3):
    """One of four strips by its number."""
    return tl.where(strip < 2, tl.where(strip == 0, a0, a1), tl.where(strip == 2, a2, a3))


@triton.jit
def _look(
    row_ptr,
    ids,
    group,
    seed,
    position,
    inverse,
    best,
    best_id,
    bar,
    suppress_ptr,
    num_suppressed,
    vocab_size,
    AGAIN: tl.constexpr,
    STREAM: tl.constexpr,
):
    """The bests and the bar after a lane's four ids of one counter, of which the first is given."""
    x0, x1, x2, x3 = _load_ids(row_ptr, ids, vocab_size)
    if AGAIN:
        x0, x1, x2, x3 = _drop_suppressed_ids(x0, x1, x2, x3, ids, group, suppress_ptr, num_suppressed)
    w0, w1, w2, w3 = words_of_counter(seed, position, ids - group * (GROUP - STRIP), STREAM)
    k0, k1 = _key(most_score(x0, w0, inverse), 0, 4), _key(most_score(x1, w1, inverse), 1, 4)
    k2, k3 = _key(most_score(x2, w2, inverse), 2, 4), _key(most_score(x3, w3, inverse), 3, 4)
    key = tl.maximum(tl.maximum(k0, k1), tl.maximum(k2, k3))
    while tl.max(key, axis=0) >= (order_key(bar) & -4):
        strip = key & 3
        x, word = _pick(strip, x0, x1, x2, x3), _pick(strip, w0, w1, w2, w3)
        best, best_id = _take(x * inverse + gumbel_of_word(word), ids + strip * STRIP, best, best_id)
        bar = tl.maximum(bar, slack_below(_maximum(best)))
        key = tl.maximum(tl.maximum(_below(k0, key), _below(k1, key)), tl.maximum(_below(k2, key), _below(k3, key)))
    return best, best_id, bar


@triton.jit
def _scan(
    r0,
    r1,
    r2,
    r3,
    row_ptr,
    first_ids,
    lane,
    first_group,
    last_group,
    inverse,
    seed,
    position,
    suppress_ptr,
    num_suppressed,
    out_ptr,
    vocab_size,
    AGAIN: tl.constexpr,
    STREAM: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """(best score, its lowest id) of a program's groups, of which the first is loaded.

    Only if AGAIN, suppressed ids are left out, and the score is NaN where there is nothing but NaN.
    """
    EACH: tl.constexpr = lane.shape[1]
    # Each lane keeps a best score of its own: one reduction for the program instead of one for each tile.
    best = tl.full((LANES,), float("-inf"), tl.float32)
    best_id = tl.zeros((LANES,), tl.int32)
    seen = tl.full((LANES,), float("nan"), tl.float32)
    bar = _LOWEST
    for group in range(first_group, last_group):
        r0, r1, r2, r3 = _allowed(r0, r1, r2, r3, lane, group, suppress_ptr, num_suppressed, out_ptr, vocab_size, AGAIN)
        top = _top(r0, r1, r2, r3)
        highest = tl.max(top, axis=1)
        # Nothing below wants this tile: the next gets its registers.
        r0, r1, r2, r3 = _load_tile(row_ptr, lane, group + 1, last_group, vocab_size, WHOLE)
        if AGAIN:
            seen = tl.maximum(seen, highest * inverse)
        if _any(highest * inverse + MAX_GUMBEL >= bar):
            w0, w1, w2, w3 = words_of_counter(seed, position, lane + group * STRIP + _zero_like(top), STREAM)
            # Ids of one counter are bounded together: by the best of their logits and the least of their words.
            most = most_score(top, tl.minimum(tl.minimum(w0, w1), tl.minimum(w2, w3)), inverse)
            if _any(tl.max(most, axis=1) >= bar):
                keys = _key(most, tl.arange(0, EACH)[None, :], EACH)
                key = tl.max(keys, axis=1)
                looking = True
                while looking:
                    best, best_id, bar = _look(
                        row_ptr,
                        first_ids + (key & (EACH - 1)) + group * GROUP,
                        group,
                        seed,
                        position,
                        inverse,
                        best,
                        best_id,
                        bar,
                        suppress_ptr,
                        num_suppressed,
                        vocab_size,
                        AGAIN,
                        STREAM,
                    )
                    key = tl.max(_below(keys, key[:, None]), axis=1)
                    looking = tl.max(key, axis=0) >= (order_key(bar) & -EACH)
    value, token = _best_lane(best, best_id, vocab_size)
    if AGAIN:
        seen_nan = is_nan(tl.max(seen, axis=0))  # no logit is a score
        value = tl.where(value > float("-inf"), value, tl.where(seen_nan, float("nan"), float("-inf")))
    return value, token


@triton.jit
def _scan_greedy(
    r0,
    r1,
    r2,
    r3,
    row_ptr,
    first_ids,
    lane,
    first_group,
    last_group,
    suppress_ptr,
    num_suppressed,
    out_ptr,
    vocab_size,
    AGAIN: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """`_scan` at temperature 0."""
    best = tl.full((LANES,), float("-inf"), tl.float32)
    best_id = tl.zeros((LANES,), tl.int32)
    r0, r1, r2, r3 = _allowed(
        r0, r1, r2, r3, lane, first_group, suppress_ptr, num_suppressed, out_ptr, vocab_size, AGAIN
    )
    highest = tl.max(_top(r0, r1, r2, r3), axis=1)
    seen = highest
    best, best_id = _take(highest, first_ids + first_group * GROUP, best, best_id)
    # Two groups at a time are on their way. Loads that pass from one round to the next do not pay: the assembler holds
    # 16-bit values of a loop in halves of registers, which it waits for at the loop's end.
    for group in range(first_group + 1, last_group, 2):
        r0, r1, r2, r3 = _load_tile(row_ptr, lane, group, last_group, vocab_size, WHOLE)
        s0, s1, s2, s3 = _load_tile(row_ptr, lane, group + 1, last_group, vocab_size, WHOLE)
        r0, r1, r2, r3 = _allowed(r0, r1, r2, r3, lane, group, suppress_ptr, num_suppressed, out_ptr, vocab_size, AGAIN)
        second = group + 1 < last_group
        limit = tl.where(second, vocab_size, 0)
        s0, s1, s2, s3 = _allowed(s0, s1, s2, s3, lane, group + 1, suppress_ptr, num_suppressed, out_ptr, limit, AGAIN)
        highest = tl.max(_top(r0, r1, r2, r3), axis=1)
        later = tl.where(second, tl.max(_top(s0, s1, s2, s3), axis=1), float("nan"))
        if AGAIN:
            seen = tl.maximum(seen, tl.maximum(highest, later))
        best, best_id = _take(highest, first_ids + group * GROUP, best, best_id)
        best, best_id = _take(later, first_ids + (group + 1) * GROUP, best, best_id)
    value, token = _best_lane(best, best_id, vocab_size)
    # The loop knows the group alone; one more look at it, in the cache, tells which of its ids.
    group = token // GROUP
    r0, r1, r2, r3 = _load_tile(row_ptr, lane, group, last_group, vocab_size, WHOLE)
    r0, r1, r2, r3 = _allowed(r0, r1, r2, r3, lane, group, suppress_ptr, num_suppressed, None, vocab_size, AGAIN)
    token = tl.min(tl.min(_lowest_equal(r0, r1, r2, r3, value, lane + group * GROUP, vocab_size), axis=1), axis=0)
    if AGAIN:
        value = tl.where(value > float("-inf"), value, tl.max(seen, axis=0))
    return value, token


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
    WHOLE: tl.constexpr,
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
    r0, r1, r2, r3 = _load_tile(row_ptr, lane, first_group, last_group, vocab_size, WHOLE)
    position = tl.load(positions_ptr + row).to(tl.int64)
    if suppress_ptr is not None:
        index = tl.arange(0, 16)
        suppressed = tl.load(suppress_ptr + index, mask=index < num_suppressed, other=-1)
    tl.debug_barrier()  # else the assembler moves loads to where they are needed
    if slot < 0:
        return
    tl.device_assert(slot < num_slots, "idx_mapping out of range")
    temperature = tl.load(temperature_ptr + slot)
    seed = tl.load(seeds_ptr + slot)
    inverse = tl.div_rn(tl.full((), 1.0, tl.float32), tl.where(temperature > 0, temperature, 1.0))
    out_ptr = logits_out_ptr
    if logits_out_ptr is not None:
        step = tl.load(draft_step_ptr).to(tl.int64)
        out_ptr += slot * stride_os + step * stride_ok

    if temperature > 0:
        value, token = _scan(
            r0,
            r1,
            r2,
            r3,
            row_ptr,
            first_ids,
            lane,
            first_group,
            last_group,
            inverse,
            seed,
            position,
            suppress_ptr,
            num_suppressed,
            out_ptr,
            vocab_size,
            False,
            STREAM,
            WHOLE,
        )
    else:
        value, token = _scan_greedy(
            r0,
            r1,
            r2,
            r3,
            row_ptr,
            first_ids,
            lane,
            first_group,
            last_group,
            suppress_ptr,
            num_suppressed,
            out_ptr,
            vocab_size,
            False,
            WHOLE,
        )
    # Whoever wins without a look at the suppressed ids wins with it, unless it is one of them, or nothing was there.
    done = value > float("-inf")
    if suppress_ptr is not None:
        done = done & ~_any(suppressed == token)
        done = done & ~is_suppressed(token, suppress_ptr + 16, num_suppressed - 16)
    if not done:
        r0, r1, r2, r3 = _load_tile(row_ptr, lane, first_group, last_group, vocab_size, WHOLE)
        if temperature > 0:
            value, token = _scan(
                r0,
                r1,
                r2,
                r3,
                row_ptr,
                first_ids,
                lane,
                first_group,
                last_group,
                inverse,
                seed,
                position,
                suppress_ptr,
                num_suppressed,
                out_ptr,
                vocab_size,
                True,
                STREAM,
                WHOLE,
            )
        else:
            value, token = _scan_greedy(
                r0,
                r1,
                r2,
                r3,
                row_ptr,
                first_ids,
                lane,
                first_group,
                last_group,
                suppress_ptr,
                num_suppressed,
                out_ptr,
                vocab_size,
                True,
                WHOLE,
            )

    part = tl.program_id(2) * tl.num_programs(1) + column
    offset = row * tl.num_programs(1) * tl.num_programs(2) + part
    tl.store(values_ptr + offset, value)
    tl.store(ids_ptr + offset, token)
    if logits_out_ptr is not None and suppress_ptr is not None:
        _store_suppressed(out_ptr, first_group, last_group, column, vocab_size, suppress_ptr, num_suppressed, WIDTH)
