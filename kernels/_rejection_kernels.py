"""The kernels of `rejection.py` and their launch settings.

1. `statistics_kernel` reads every row of logits once: argmax and softmax partials of each vocabulary block.
2. `judge_kernel` walks the chain of drafts from those partials, in every program of a request alike, and then draws its
   share of the token behind them; the last program to arrive writes it (`_winner.py`).
"""

# Kernels are Triton, not Python: their integers are tensors and their flags constexprs, which a Python checker denies.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

from dataclasses import dataclass

import triton
import triton.language as tl

from tridraft.kernels._argmax import argmax, is_nan, lowest_eligible
from tridraft.kernels._op import DEBUG, cdiv, next_power_of_2
from tridraft.kernels._pdl import pdl_wait
from tridraft.kernels._winner import meet, nothing, open_meeting, winner_key, winning_token
from tridraft.kernels.random import ACCEPT, RESAMPLE, STRIP, gumbel_of_word, uniform_at, words_of_counter

_ACCEPT, _RESAMPLE = tl.constexpr(ACCEPT), tl.constexpr(RESAMPLE)

FALLBACK = 1000.0
"""How far below a residual's scores those of p lie. log(p − q) + noise > −108 and log p + noise < 23."""
_FALLBACK = tl.constexpr(FALLBACK)


@triton.jit
def _load_eligible(row_ptr, offs, vocab_size, suppress_ptr, num_suppressed, first, last):
    """float32 logits of ids in [first, last]; NaN, which is not there, at suppressed ids and past the end."""
    logits = tl.load(row_ptr + offs, mask=offs < vocab_size, other=float("nan")).to(tl.float32)
    if suppress_ptr is not None:
        for i in range(num_suppressed):
            token_id = tl.load(suppress_ptr + i)
            if (token_id >= first) & (token_id <= last):
                logits = tl.where(offs == token_id, float("nan"), logits)
    return logits


@triton.jit
def _softmax_partial(scaled, largest):
    """Sum of exp(scaled − largest), where an infinity equal to the largest counts 1 and NaN (not there) 0."""
    weights = tl.where(scaled == largest, 1.0, tl.exp(scaled - largest))
    return tl.sum(tl.where(scaled <= largest, weights, 0.0), axis=0)


@triton.jit
def _merge_partials(maxima, sums):
    """(largest, sum) of softmax partials `[rows, P]` along the second axis; NaN marks a block with nothing there."""
    largest = tl.max(maxima, axis=1)
    weights = tl.where(maxima == largest[:, None], 1.0, tl.exp(maxima - largest[:, None]))
    return largest, tl.sum(tl.where(maxima <= largest[:, None], weights * sums, 0.0), axis=1)


@triton.jit
def _softmax_at(scaled, largest, total):
    """The probability of a scaled logit; 0 for NaN. For rows with a logit above −inf."""
    weights = tl.where(scaled == largest, 1.0, tl.exp(scaled - largest))
    return tl.where(scaled <= largest, weights / total, 0.0)


@triton.jit
def _log_residual(scaled, p_max, p_sum, q_row_ptr, ids, vocab_size, q_max, q_sum, draft, inverse):
    """log(p − q) where p exceeds q, otherwise log p far below it: rounding can leave no p above q anywhere."""
    p = tl.where(p_max > float("-inf"), _softmax_at(scaled, p_max, p_sum), 0.0)
    q_logits = tl.load(q_row_ptr + ids, mask=ids < vocab_size, other=float("nan")).to(tl.float32)
    q = _softmax_at(q_logits * inverse, q_max, q_sum)
    q = tl.where(q_max > float("-inf"), q, (ids == draft).to(tl.float32))
    return tl.where(p > q, tl.log(p - q), tl.log(p) - _FALLBACK)


@triton.jit
def _pick(values, offs, index):
    """The element at `index` of a block."""
    return tl.sum(tl.where(offs == index, values, 0), axis=0)


@triton.jit(do_not_specialize=["num_drafts", "num_slots"], debug=DEBUG)
def statistics_kernel(
    target_ptr,  # [T, V] float
    draft_ptr,  # [S, K, V] float, or None
    query_start_loc_ptr,  # [R + 1] int
    idx_mapping_ptr,  # [R] int
    temperature_ptr,  # [S] f32
    suppress_ptr,  # [n] i64, or None
    maxima_ptr,  # [R, K + 1, P] f32: the best logit of a block, NaN where nothing is there
    ids_ptr,  # [R, K + 1, P] i32: its lowest id
    sums_ptr,  # [R, K + 1, P] f32
    draft_maxima_ptr,  # [R, K + 1, P] f32
    draft_sums_ptr,  # [R, K + 1, P] f32
    best_ptr,  # [R] i64
    arrivals_ptr,  # [R] i32
    num_drafts,
    vocab_size,
    num_suppressed,
    stride_tn,
    stride_ds,
    stride_dk,
    num_slots,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (r, i, block): argmax and softmax partials of request r's row i, of target and draft."""
    pdl_wait(PDL)
    request = tl.program_id(0).to(tl.int64)
    step = tl.program_id(1)
    block = tl.program_id(2)
    if (step == 0) & (block == 0):
        open_meeting(best_ptr + request, arrivals_ptr + request)
    row = tl.load(query_start_loc_ptr + request).to(tl.int64) + step
    slot = tl.load(idx_mapping_ptr + request).to(tl.int64)
    tl.device_assert(slot < num_slots, "idx_mapping: slot out of range")
    if (slot >= 0) & (row < tl.load(query_start_loc_ptr + request + 1)):
        offs = block * BLOCK_V + tl.arange(0, BLOCK_V)
        partial = (request * (num_drafts + 1) + step) * tl.num_programs(2) + block
        row_ptr = target_ptr + row * stride_tn
        first = block * BLOCK_V
        logits = _load_eligible(row_ptr, offs, vocab_size, suppress_ptr, num_suppressed, first, first + BLOCK_V - 1)
        largest = tl.max(logits, axis=0)
        tl.store(maxima_ptr + partial, largest)
        tl.store(ids_ptr + partial, tl.min(tl.where(logits == largest, offs, vocab_size), axis=0))
        temperature = tl.load(temperature_ptr + slot)
        if temperature > 0.0:
            inverse = tl.div_rn(1.0, temperature)
            tl.store(sums_ptr + partial, _softmax_partial(logits * inverse, largest * inverse))
            if draft_ptr is not None and step < num_drafts:
                q_ptrs = draft_ptr + slot * stride_ds + step * stride_dk + offs
                q_logits = tl.load(q_ptrs, mask=offs < vocab_size, other=float("nan")).to(tl.float32) * inverse
                q_largest = tl.max(q_logits, axis=0)
                tl.store(draft_maxima_ptr + partial, q_largest)
                tl.store(draft_sums_ptr + partial, _softmax_partial(q_logits, q_largest))


@triton.jit(do_not_specialize=["num_drafts"])
def judge_kernel(
    target_ptr,  # [T, V] float
    draft_ptr,  # [S, K, V] float, or None
    draft_tokens_ptr,  # [R, K] int
    query_start_loc_ptr,  # [R + 1] int
    idx_mapping_ptr,  # [R] int
    temperature_ptr,  # [S] f32
    seeds_ptr,  # [S] i64
    positions_ptr,  # [T] int
    suppress_ptr,  # [n] i64, or None
    maxima_ptr,  # [R, K + 1, P] f32
    ids_ptr,  # [R, K + 1, P] i32
    sums_ptr,  # [R, K + 1, P] f32
    draft_maxima_ptr,  # [R, K + 1, P] f32
    draft_sums_ptr,  # [R, K + 1, P] f32
    best_ptr,  # [R] i64
    arrivals_ptr,  # [R] i32
    output_ids_ptr,  # [R, K + 1] i64
    num_sampled_ptr,  # [R] i32
    num_rejected_ptr,  # [R] i32
    last_sampled_ptr,  # [R] i64
    nan_flag_ptr,  # [T] bool or i32, or None
    num_drafts,
    vocab_size,
    num_suppressed,
    stride_tn,
    stride_ds,
    stride_dk,
    stride_tokens,
    num_partials,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    PARTIALS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (r, block): judges request r's drafts (every block does, from the partials), then draws its share of
    the token behind them. Block 0 writes what is decided by then.
    """
    pdl_wait(PDL)
    request = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    begin = tl.load(query_start_loc_ptr + request).to(tl.int64)
    rows = tl.minimum(tl.load(query_start_loc_ptr + request + 1) - begin, num_drafts + 1)
    slot = tl.load(idx_mapping_ptr + request).to(tl.int64)
    rows = tl.where(slot >= 0, rows, 0)
    steps = tl.arange(0, STEPS)
    output_ptrs = output_ids_ptr + request * (num_drafts + 1) + steps
    if rows <= 0:
        if block == 0:
            tl.store(output_ptrs, tl.full((STEPS,), -1, tl.int64), mask=steps <= num_drafts)
            tl.store(num_sampled_ptr + request, 0)
            tl.store(num_rejected_ptr + request, 0)
            tl.store(last_sampled_ptr + request, 0)
    else:
        temperature = tl.load(temperature_ptr + slot)
        offs_p = tl.arange(0, PARTIALS)
        partials = (request * (num_drafts + 1) + steps[:, None]) * num_partials + offs_p[None, :]
        mask_p = (steps < rows)[:, None] & (offs_p < num_partials)[None, :]
        maxima = tl.load(maxima_ptr + partials, mask=mask_p, other=float("nan"))
        largest, chosen = argmax(maxima, tl.load(ids_ptr + partials, mask=mask_p, other=0), 1)
        if nan_flag_ptr is not None and block == 0:
            all_nan = is_nan(largest).to(nan_flag_ptr.dtype.element_ty)
            tl.store(nan_flag_ptr + begin + steps, all_nan, mask=steps < rows)
        finite = largest > float("-inf")
        lowest = 0
        if tl.min(tl.where(steps < rows, finite.to(tl.int32), 1), axis=0) == 0:
            lowest = lowest_eligible(suppress_ptr, num_suppressed, None, vocab_size)
        chosen = tl.where(finite, chosen, lowest)

        drafts_ptrs = draft_tokens_ptr + request * stride_tokens + steps
        drafts = tl.load(drafts_ptrs, mask=steps < rows - 1, other=-1).to(tl.int32)
        proposed = (drafts >= 0) & (drafts < vocab_size)
        accept = drafts == chosen
        p_largest, p_total = largest, largest
        q_largest, q_total = largest, largest
        inverse = temperature
        if temperature > 0.0:
            inverse = tl.div_rn(1.0, temperature)
            sums = tl.load(sums_ptr + partials, mask=mask_p, other=0.0)
            p_largest, p_total = _merge_partials(maxima * inverse, sums)
            drafts_in_range = tl.where(proposed, drafts, vocab_size)
            rows_ptr = target_ptr + (begin + steps) * stride_tn
            logits = _load_eligible(rows_ptr, drafts_in_range, vocab_size, suppress_ptr, num_suppressed, 0, vocab_size)
            p_draft = tl.where(
                finite, _softmax_at(logits * inverse, p_largest, p_total), (drafts == lowest).to(tl.float32)
            )
            q_draft = tl.full((STEPS,), 1.0, tl.float32)
            if draft_ptr is not None:
                mask_q = (steps < rows - 1)[:, None] & (offs_p < num_partials)[None, :]
                q_maxima = tl.load(draft_maxima_ptr + partials, mask=mask_q, other=float("nan"))
                q_sums = tl.load(draft_sums_ptr + partials, mask=mask_q, other=0.0)
                q_largest, q_total = _merge_partials(q_maxima, q_sums)
                q_ptrs = draft_ptr + slot * stride_ds + steps * stride_dk + drafts
                q_logits = tl.load(q_ptrs, mask=proposed, other=float("nan")).to(tl.float32) * inverse
                q_draft = tl.where(q_largest > float("-inf"), _softmax_at(q_logits, q_largest, q_total), 1.0)
            positions = tl.load(positions_ptr + begin + steps, mask=steps < rows, other=0).to(tl.int64)
            u = uniform_at(tl.load(seeds_ptr + slot), positions, drafts, _ACCEPT)
            accept = (p_draft > 0.0) & (u * q_draft <= p_draft)
        accepted = tl.min(tl.where(proposed & accept, STEPS, steps), axis=0)

        last = _pick(chosen, steps, accepted)
        if block == 0:
            tokens = tl.where(steps < accepted, drafts, tl.where(steps == accepted, last, -1))
            drawn = tl.where(temperature > 0.0, accepted, -1)  # the last program to draw writes that one
            tl.store(output_ptrs, tokens.to(tl.int64), mask=(steps <= num_drafts) & (steps != drawn))
            tl.store(num_sampled_ptr + request, accepted + 1)
            tl.store(num_rejected_ptr + request, rows - accepted - 1)
            if temperature <= 0.0:
                tl.store(last_sampled_ptr + request, last)

        if temperature > 0.0:
            draft = _pick(drafts, steps, accepted)  # negative: nothing was proposed there, so nothing was rejected
            row_ptr = target_ptr + (begin + accepted) * stride_tn
            q_row_ptr = target_ptr
            if draft_ptr is not None:
                q_row_ptr = draft_ptr + slot * stride_ds + accepted * stride_dk
            p_max, p_sum = _pick(p_largest, steps, accepted), _pick(p_total, steps, accepted)
            q_max, q_sum = _pick(q_largest, steps, accepted), _pick(q_total, steps, accepted)
            draft = tl.where(_pick(proposed.to(tl.int32), steps, accepted) > 0, draft, -1)

            position = tl.load(positions_ptr + begin + accepted).to(tl.int64)
            counters = block * WIDTH + tl.arange(0, WIDTH)
            words = words_of_counter(tl.load(seeds_ptr + slot), position, counters, _RESAMPLE)
            offs = counters // STRIP * (4 * STRIP) + counters % STRIP
            last_id = block * WIDTH // STRIP * (4 * STRIP) + 4 * WIDTH + 4 * STRIP
            key = nothing()
            for strip in tl.static_range(4):
                ids = offs + strip * STRIP
                logits = _load_eligible(row_ptr, ids, vocab_size, suppress_ptr, num_suppressed, block * WIDTH, last_id)
                scores = logits * inverse
                if draft >= 0:
                    if draft_ptr is None:
                        scores = tl.where(ids == draft, float("nan"), scores)
                    else:
                        scores = _log_residual(
                            scores, p_max, p_sum, q_row_ptr, ids, vocab_size, q_max, q_sum, draft, inverse
                        )
                key = tl.maximum(key, winner_key(scores + gumbel_of_word(words[strip]), ids, ids < vocab_size))
            done, winner = meet(key, request, tl.num_programs(1), best_ptr, arrivals_ptr)
            if done:
                token, _ = winning_token(winner, suppress_ptr, num_suppressed, vocab_size)
                tl.store(output_ids_ptr + request * (num_drafts + 1) + accepted, token)
                tl.store(last_sampled_ptr + request, token)


@dataclass(frozen=True)
class RejectionLaunch:
    """Launch knobs.

    Attributes:
        block: ids of a program of `statistics_kernel`.
        width: a quarter of the ids of a program of `judge_kernel`.
        num_warps: warps of both.
    """

    block: int
    width: int
    num_warps: int

    def draw_blocks(self, vocab_size: int) -> int:
        """Programs that draw a token: strips of 1,024 ids, four to a random number."""
        strip = STRIP.value
        counters = vocab_size // (4 * strip) * strip + min(vocab_size % (4 * strip), strip)
        return cdiv(counters, self.width)


def rejection_launch(vocab_size: int) -> RejectionLaunch:
    """Launch settings; they depend on the vocabulary only, so that a request's sums do not depend on its batch."""
    # 32 blocks of Gemma's vocabulary: with K = 3 one request makes 128 programs, about one a multiprocessor, and many
    # requests still have long enough programs. 32 elements a thread keep a block in registers for its second pass.
    block = min(next_power_of_2(vocab_size), 8192)
    # Drawing is bound by arithmetic, and of one row only, so its blocks are half as long: 64 programs a request.
    return RejectionLaunch(block, width=min(block, 1024), num_warps=max(1, min(8, block // 256)))
