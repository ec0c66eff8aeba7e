"""The kernel of `sampling.py`: the best of a part of one row."""

# Kernels are Triton, not Python: their integers are tensors and their flags constexprs, which a Python checker denies.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from tridraft.kernels._argmax import is_nan
from tridraft.kernels._op import DEBUG
from tridraft.kernels._pdl import pdl_wait
from tridraft.kernels._winner import order_key
from tridraft.kernels.random import (
    GROUP,
    MAX_GUMBEL,
    STRIP,
    group_bound,
    group_word_at,
    gumbel_of,
    id_bound,
    race,
    word_at,
    words_of_groups,
)

BLOCK = tl.constexpr(4 * STRIP.value)
"""Ids of four strips, whose groups share their random words."""


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
def _load_tile(row_ptr, lane, block, vocab_size):
    """The four strips of a block as they are stored; NaN, which never wins, past the vocabulary."""
    nan = float("nan")
    offs = lane + block * BLOCK
    ptrs = row_ptr + offs
    if (block + 1) * BLOCK <= vocab_size:  # without masks, a third fewer instructions
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
def _drop_suppressed(x0, x1, x2, x3, offs, block, suppress_ptr, num_suppressed):
    """NaN at suppressed ids. Sixteen are held against the block at a time; few blocks hold any."""
    if suppress_ptr is not None:
        nan = float("nan")
        for start in range(0, num_suppressed, 16):
            index = start + tl.arange(0, 16)
            ids = tl.load(suppress_ptr + index, mask=index < num_suppressed, other=-1)
            if _any((ids >= block * BLOCK) & (ids < (block + 1) * BLOCK)):
                for i in range(start, tl.minimum(start + 16, num_suppressed)):
                    token_id = tl.load(suppress_ptr + i).to(tl.int32)
                    x0 = tl.where(offs == token_id, nan, x0)
                    x1 = tl.where(offs + STRIP == token_id, nan, x1)
                    x2 = tl.where(offs + 2 * STRIP == token_id, nan, x2)
                    x3 = tl.where(offs + 3 * STRIP == token_id, nan, x3)
    return x0, x1, x2, x3


@triton.jit
def _drop(x, ids, suppress_ptr, num_suppressed):
    """Logits of some ids, NaN at the suppressed ones."""
    if suppress_ptr is not None:
        for start in range(0, num_suppressed, 16):
            index = start + tl.arange(0, 16)
            suppressed = tl.load(suppress_ptr + index, mask=index < num_suppressed, other=-1).to(tl.int32)
            found = tl.max((ids[:, None] == suppressed[None, :]).to(tl.int32), axis=1)
            x = tl.where(found > 0, float("nan"), x)
    return x


@triton.jit
def _store_suppressed(out_ptr, first_block, last_block, column, suppress_ptr, num_suppressed, WIDTH: tl.constexpr):
    """−inf at the suppressed ids among a program's, after its strips are stored."""
    tl.debug_barrier()
    for start in range(0, num_suppressed, 16):
        index = start + tl.arange(0, 16)
        ids = tl.load(suppress_ptr + index, mask=index < num_suppressed, other=-1)
        mine = (ids >= first_block * BLOCK) & (ids < last_block * BLOCK) & (ids % STRIP // WIDTH == column)
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
def slack_below(score):
    """A bar that no score above `score` fails by rounding: of scores, logarithms or exponents. None for NaN."""
    score = tl.minimum(tl.maximum(score, float("-inf")), 1e38)
    return score - 1e-3 - 1e-6 * tl.abs(score)


@triton.jit
def _most(x, group_word, inverse):
    """At least the scores of a group whose best logit is x; NaN where there is none."""
    return x * inverse + group_bound(group_word)


@triton.jit
def _keys(most):
    """Integers that order as `most` does but for its last bits, which hold the index: no two are equal."""
    return (order_key(tl.maximum(most, float("-inf"))) & -most.shape[0]) | tl.arange(0, most.shape[0])


@triton.jit
def _best(scores, ids):
    """The best score and its lowest id; reductions of integers of one warp are an instruction each."""
    keys = order_key(tl.maximum(scores, float("-inf")))
    key = tl.max(keys, axis=0)
    score = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return score, tl.min(tl.where(keys == key, ids, 2**31 - 1), axis=0)


@triton.jit
def _next_key(keys, key):
    """The largest key below `key`."""
    return tl.max(tl.where(keys < key, keys, -(2**31)), axis=0)


@triton.jit
def _pick(strip, a0, a1, a2, a3):
    """One of four strips by its number."""
    return tl.where(strip < 2, tl.where(strip == 0, a0, a1), tl.where(strip == 2, a2, a3))


@triton.jit(debug=DEBUG, do_not_specialize=["num_slots", "num_suppressed", "num_blocks", "blocks_per_program"])
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
    num_blocks,
    blocks_per_program,
    stride_n,
    stride_os,
    stride_ok,
    STREAM: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (n, c, b): of row n, WIDTH ids of each of the four strips of some consecutive blocks of 4,096 ids."""
    NUM_GROUPS: tl.constexpr = WIDTH // GROUP
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1)
    first_block = tl.program_id(2) * blocks_per_program
    last_block = tl.minimum(first_block + blocks_per_program, num_blocks)
    row_ptr = logits_ptr + row * stride_n
    # A lane's eight ids are a group's, so that their maximum is taken without another lane.
    first_ids = column * WIDTH + tl.arange(0, NUM_GROUPS) * GROUP
    lane = first_ids[:, None] + tl.arange(0, GROUP)[None, :]

    # All that has a latency of its own is on its way before anything is known: at N = 1 it is most of the kernel.
    slot = tl.load(idx_mapping_ptr + row).to(tl.int64)
    r0, r1, r2, r3 = _load_tile(row_ptr, lane, first_block, vocab_size)
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
        value = float("-inf")
        token = 0
        # Greedy, each lane keeps a best logit of its own: one reduction for the program instead of one for each tile.
        best = tl.full((NUM_GROUPS,), float("-inf"), tl.float32)
        best_id = tl.zeros((NUM_GROUPS,), tl.int32)
        seen = tl.full((NUM_GROUPS,), float("nan"), tl.float32)
        for block in range(first_block, last_block):
            offs = lane + block * BLOCK
            x0, x1, x2, x3 = r0.to(tl.float32), r1.to(tl.float32), r2.to(tl.float32), r3.to(tl.float32)
            if again:
                x0, x1, x2, x3 = _drop_suppressed(x0, x1, x2, x3, offs, block, suppress_ptr, num_suppressed)
            if logits_out_ptr is not None:
                _store_strip(out_ptr, offs, x0, vocab_size)
                _store_strip(out_ptr, offs + STRIP, x1, vocab_size)
                _store_strip(out_ptr, offs + 2 * STRIP, x2, vocab_size)
                _store_strip(out_ptr, offs + 3 * STRIP, x3, vocab_size)

            m0, m1, m2, m3 = tl.max(x0, axis=1), tl.max(x1, axis=1), tl.max(x2, axis=1), tl.max(x3, axis=1)
            # Nothing below wants the tile, so the next one is on its way to the same registers.
            if block + 1 < last_block:
                r0, r1, r2, r3 = _load_tile(row_ptr, lane, block + 1, vocab_size)

            top = tl.maximum(tl.maximum(m0, m1), tl.maximum(m2, m3))
            if again:
                seen = tl.maximum(seen, top)
            if temperature > 0:
                bar = slack_below(value)
                if _any(top * inverse + MAX_GUMBEL > bar):
                    number = (first_ids + block * STRIP) // GROUP + _zero_like(top)
                    w0, w1, w2, w3 = words_of_groups(seed, position, number, STREAM)
                    b0, b1 = _most(m0, w0, inverse), _most(m1, w1, inverse)
                    b2, b3 = _most(m2, w2, inverse), _most(m3, w3, inverse)
                    if _any(tl.maximum(tl.maximum(b0, b1), tl.maximum(b2, b3)) > bar):
                        k0, k1, k2, k3 = _keys(b0), _keys(b1), _keys(b2), _keys(b3)
                        i0, i1, i2, i3 = tl.max(k0, axis=0), tl.max(k1, axis=0), tl.max(k2, axis=0), tl.max(k3, axis=0)
                        # The most promising group left of each strip; a lane has one of the 32 ids.
                        place = tl.arange(0, 4 * GROUP)
                        strip = place // GROUP
                        ids = block * BLOCK + column * WIDTH + strip * STRIP + place % GROUP
                        while tl.maximum(tl.maximum(i0, i1), tl.maximum(i2, i3)) >= (order_key(bar) & -NUM_GROUPS):
                            token_ids = ids + (_pick(strip, i0, i1, i2, i3) & (NUM_GROUPS - 1)) * GROUP
                            inside = token_ids < vocab_size
                            x = tl.load(row_ptr + token_ids, mask=inside, other=float("nan")).to(tl.float32)
                            if again:
                                x = _drop(x, token_ids, suppress_ptr, num_suppressed)
                            group_word = group_word_at(seed, position, token_ids, STREAM)
                            word = word_at(seed, position, token_ids, STREAM)
                            # Two thirds of those that may win by their group's word alone may not by their own.
                            if _any(x * inverse + id_bound(group_word, token_ids % GROUP, word) > bar):
                                shortest, first = race(group_word)
                                scores = x * inverse + gumbel_of(shortest, first, token_ids % GROUP, word)
                                score, score_id = _best(scores, token_ids)
                                better = (score > value) | ((score == value) & (score_id < token))
                                value, token = tl.where(better, score, value), tl.where(better, score_id, token)
                                bar = slack_below(value)
                            i0, i1, i2, i3 = _next_key(k0, i0), _next_key(k1, i1), _next_key(k2, i2), _next_key(k3, i3)
            else:
                best, best_id = _take(top, first_ids + block * BLOCK, best, best_id)

        if temperature <= 0:
            value = tl.max(best, axis=0)
            token = tl.min(tl.where(best == value, best_id, vocab_size), axis=0)
            # The loop knows the block alone; one more look at it, in the cache, tells which of its ids.
            block = token // BLOCK
            offs = lane + block * BLOCK
            r0, r1, r2, r3 = _load_tile(row_ptr, lane, block, vocab_size)
            x0, x1, x2, x3 = r0.to(tl.float32), r1.to(tl.float32), r2.to(tl.float32), r3.to(tl.float32)
            if again:
                x0, x1, x2, x3 = _drop_suppressed(x0, x1, x2, x3, offs, block, suppress_ptr, num_suppressed)
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
            r0, r1, r2, r3 = _load_tile(row_ptr, lane, first_block, vocab_size)
            again = True

    part = tl.program_id(2) * tl.num_programs(1) + column
    offset = row * tl.num_programs(1) * tl.num_programs(2) + part
    tl.store(values_ptr + offset, value)
    tl.store(ids_ptr + offset, token)
    if logits_out_ptr is not None and suppress_ptr is not None:
        _store_suppressed(out_ptr, first_block, last_block, column, suppress_ptr, num_suppressed, WIDTH)
