"""Rejection sampling: how many drafts the target accepts, and the token that follows them.

Row i of a request's target logits is the distribution p of the token after `positions[i]`; draft i proposes that
token. Drafts are judged in order until one is rejected; the request emits the accepted ones and one token more:
the *recovered* token at the first rejection, or the *bonus* token behind the last draft.

    temperature 0    accept d if it is the target's argmax; the token is the argmax
    temperature > 0  accept d if u ≤ p(d) / q(d), u uniform in (0, 1]
                     recovered ~ max(p − q, 0), normalised; bonus ~ p

q is the distribution the draft was sampled from: softmax(draft_logits / temperature), or all of it on d where drafts
were picked, not sampled (no `draft_logits`). Either way the emitted tokens are distributed as the target's own
(Leviathan et al., "Fast inference from transformers via speculative decoding", ICML 2023). p is the softmax of
logits / temperature over the eligible ids: neither suppressed nor NaN. Where no logit exceeds −inf it is all on the
lowest eligible id, as for every sampler here, and a row whose eligible logits are all NaN sets its flag.

Drafts are padded with −1, which ends a request's chain: nothing was proposed there, so the token is drawn from p.
Draws: ACCEPT at (position, d), RESAMPLE at (position, id) for the Gumbel noise of the token that follows.

vLLM and SGLang hold these shapes: target logits packed by request, drafts `[num_reqs, K]`.

    result = rejection_sample(logits, drafts, query_start_loc, idx_mapping, temperature, seeds, positions)
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tridraft.kernels._argmax import argmax_reference, eligible_ids
from tridraft.kernels._op import FLOATS, Impl, arch_of, cdiv, check_tensor, next_power_of_2, register, use_triton
from tridraft.kernels._pdl import pdl_options
from tridraft.kernels._rejection_kernels import FALLBACK, judge_kernel, rejection_launch, statistics_kernel
from tridraft.kernels.random import ACCEPT, RESAMPLE, gumbel, uniform
from tridraft.kernels.suppress import check_suppress_ids

_INTS = (torch.int32, torch.int64)
_MINUS_INF = float("-inf")


class RejectionResult(NamedTuple):
    """What a verification pass decided.

    Attributes:
        output_ids: `[R, K + 1]` int64, accepted drafts and the token behind them, then −1.
        num_sampled: `[R]` int32, tokens emitted: accepted drafts + 1; 0 for a request without rows.
        num_rejected: `[R]` int32, rows whose token was not kept: rows − num_sampled.
        last_sampled: `[R]` int64, the last emitted token; 0 where there is none.
    """

    output_ids: Tensor
    num_sampled: Tensor
    num_rejected: Tensor
    last_sampled: Tensor


def _probabilities(scaled: Tensor, fallback_ids: Tensor) -> Tensor:
    """Softmax where infinities are numbers too; all on `fallback_ids` where nothing exceeds −inf."""
    largest = scaled.amax(dim=-1, keepdim=True)
    weights = torch.where(scaled == largest, 1.0, (scaled - largest).exp())
    certain = F.one_hot(fallback_ids, scaled.shape[-1]).to(scaled.dtype)
    return torch.where(largest == _MINUS_INF, certain, weights / weights.sum(dim=-1, keepdim=True))


def rejection_sample_reference(
    target_logits: Tensor,
    draft_tokens: Tensor,
    query_start_loc: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    draft_logits: Tensor | None = None,
    suppress_ids: Tensor | None = None,
) -> tuple[RejectionResult, Tensor, Tensor]:
    """The definition; see `rejection_sample`.

    Also returns, `[T]` bool each, whether all eligible logits of the row are NaN and whether it is a real request's.
    """
    (num_rows, vocab_size), (num_reqs, num_drafts) = target_logits.shape, draft_tokens.shape
    device = target_logits.device
    counts = (query_start_loc.diff().long().clamp(max=num_drafts + 1)).where(idx_mapping >= 0, 0)
    if num_rows == 0:
        target_logits, positions = target_logits.new_zeros(1, vocab_size), positions.new_zeros(1)
    step = torch.arange(num_drafts + 1, device=device)
    rows = (query_start_loc[:-1, None].long() + step).clamp(max=max(num_rows - 1, 0))
    slots = idx_mapping.long().clamp(min=0)
    request_seeds, request_temperature = seeds[slots, None], temperature[slots, None, None]
    sampling = request_temperature[:, 0] > 0

    eligible = eligible_ids(vocab_size, suppress_ids, device)
    chosen, all_nan = argmax_reference(target_logits.float(), eligible)
    inverse = 1 / request_temperature.where(sampling[:, None], 1.0)
    scaled = target_logits.float().masked_fill(target_logits.isnan() | ~eligible, _MINUS_INF)[rows] * inverse
    p = _probabilities(scaled, chosen[rows])

    proposed = (draft_tokens >= 0) & (draft_tokens < vocab_size) & (step[:-1] < counts[:, None] - 1)
    drafts = draft_tokens.long().where(proposed, 0)
    q = F.one_hot(drafts, vocab_size).to(p.dtype)
    if draft_logits is not None:
        scaled_drafts = draft_logits[slots, :num_drafts, :vocab_size].float() * inverse
        q = _probabilities(scaled_drafts.masked_fill(scaled_drafts.isnan(), _MINUS_INF), drafts)
    p_draft = p[:, :-1].gather(2, drafts[:, :, None])[:, :, 0]
    q_draft = q.gather(2, drafts[:, :, None])[:, :, 0]
    u = uniform(request_seeds, positions[rows[:, :-1]], drafts, ACCEPT)
    accept = torch.where(sampling, (p_draft > 0) & (u * q_draft <= p_draft), drafts == chosen[rows[:, :-1]])
    accepted = (accept & proposed).long().cumprod(dim=1).sum(dim=1)

    # The row behind the accepted drafts gives the last token: a bonus row, or one whose draft was rejected.
    request = torch.arange(num_reqs, device=device)
    row = rows[request, accepted]
    residual = F.pad(proposed, (0, 1))[request, accepted]
    noise = gumbel(request_seeds, positions[row, None], torch.arange(vocab_size, device=device), RESAMPLE)
    scores = scaled[request, accepted]
    if num_drafts:
        at_draft = (request, accepted.clamp(max=num_drafts - 1))
        if draft_logits is None:
            rejected = scores.scatter(1, drafts[at_draft][:, None], _MINUS_INF)
        else:
            p_row = p[request, accepted]
            left = (p_row - q[at_draft]).clamp(min=0)
            # Rounding can leave nothing of p − q; p itself is then as near to it as anything.
            rejected = torch.where(left > 0, left.log(), p_row.log() - FALLBACK)
        scores = rejected.where(residual[:, None], scores)
    sampled, _ = argmax_reference(scores + noise, eligible)
    last = torch.where(sampling[:, 0], sampled, chosen[row])

    emits = counts > 0
    tokens = torch.where(step < accepted[:, None], F.pad(drafts, (0, 1)), last[:, None])
    output_ids = tokens.where((step <= accepted[:, None]) & emits[:, None], -1)
    num_sampled = (accepted + 1).where(emits, 0)
    result = RejectionResult(output_ids, num_sampled.int(), (counts - num_sampled).int(), last.where(emits, 0))
    owned = rows.where(step < counts[:, None], num_rows).flatten()
    judged = torch.zeros(num_rows + 1, dtype=torch.bool, device=device).scatter(0, owned, True)[:num_rows]
    return result, all_nan[:num_rows], judged


def _launch_rejection(
    target_logits: Tensor,
    draft_tokens: Tensor,
    query_start_loc: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    draft_logits: Tensor | None,
    suppress_ids: Tensor | None,
    nan_flag: Tensor | None,
    outputs: RejectionResult,
) -> None:
    (num_reqs, num_drafts), vocab_size = draft_tokens.shape, target_logits.shape[1]
    device = target_logits.device
    launch = rejection_launch(vocab_size)
    num_blocks = cdiv(vocab_size, launch.block)
    arch = arch_of(device)
    maxima, sums, q_maxima, q_sums = torch.empty(
        4, num_reqs, num_drafts + 1, num_blocks, dtype=torch.float32, device=device
    ).unbind()
    ids = torch.empty(num_reqs, num_drafts + 1, num_blocks, dtype=torch.int32, device=device)
    best = torch.empty(num_reqs, dtype=torch.int64, device=device)
    arrivals = torch.empty(num_reqs, dtype=torch.int32, device=device)
    partials = (maxima, ids, sums, q_maxima, q_sums, best, arrivals)
    draft_strides = (0, 0) if draft_logits is None else draft_logits.stride()[:2]
    num_suppressed = 0 if suppress_ids is None else suppress_ids.shape[0]
    sizes = (num_drafts, vocab_size, num_suppressed, target_logits.stride(0), *draft_strides)
    kernel: Any = statistics_kernel[(num_reqs, num_drafts + 1, num_blocks)]
    kernel(
        *(target_logits, draft_logits, query_start_loc, idx_mapping, temperature, suppress_ids),
        *partials,
        *(*sizes, temperature.shape[0]),
        BLOCK_V=launch.block,
        num_warps=launch.num_warps,
        **pdl_options(arch),
    )
    kernel = judge_kernel[(num_reqs, launch.draw_blocks(vocab_size))]
    kernel(
        *(target_logits, draft_logits, draft_tokens, query_start_loc, idx_mapping, temperature, seeds, positions),
        *(suppress_ids, *partials, *outputs, nan_flag),
        *(*sizes, draft_tokens.stride(0), num_blocks),
        WIDTH=launch.width,
        STEPS=next_power_of_2(num_drafts + 1),
        PARTIALS=next_power_of_2(num_blocks),
        num_warps=launch.num_warps,
        **pdl_options(arch, early=True),
    )


@register("rejection_sample", mutates=("output_ids", "num_sampled", "num_rejected", "last_sampled", "nan_flag"))
def _rejection_sample(
    target_logits: Tensor,
    draft_tokens: Tensor,
    query_start_loc: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    draft_logits: Tensor | None,
    suppress_ids: Tensor | None,
    nan_flag: Tensor | None,
    output_ids: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    last_sampled: Tensor,
    triton: bool,
) -> None:
    inputs = (target_logits, draft_tokens, query_start_loc, idx_mapping, temperature, seeds, positions)
    outputs = RejectionResult(output_ids, num_sampled, num_rejected, last_sampled)
    if triton:
        _launch_rejection(*inputs, draft_logits, suppress_ids, nan_flag, outputs)
        return
    result, all_nan, judged = rejection_sample_reference(*inputs, draft_logits, suppress_ids)
    for output, value in zip(outputs, result, strict=True):
        output.copy_(value)
    if nan_flag is not None:
        nan_flag.copy_(torch.where(judged, all_nan.to(nan_flag.dtype), nan_flag))


def rejection_sample(
    target_logits: Tensor,
    draft_tokens: Tensor,
    query_start_loc: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    draft_logits: Tensor | None = None,
    suppress_ids: Tensor | None = None,
    nan_flag: Tensor | None = None,
    impl: Impl = "auto",
) -> RejectionResult:
    """Accept or reject drafts and emit one token more; lossless at every temperature.

    Args:
        target_logits: `[T, V]` float32, bfloat16 or float16, before temperature; any row stride.
        draft_tokens: `[R, K]` drafts; a negative one ends the request's chain.
        query_start_loc: `[R + 1]` rows of each request: one more than its drafts, at most K + 1. Without rows it emits
            nothing.
        idx_mapping: `[R]` request slots; −1 is padding.
        temperature: `[S]` float32 by slot, finite; 0 is greedy.
        seeds: `[S]` int64 by slot.
        positions: `[T]` position of each row, the one before the token it predicts.
        draft_logits: `[S, K, ≥ V]` what drafts were sampled from, before temperature, −inf at ids the drafter
            suppressed. None: drafts were picked greedily.
        suppress_ids: `[n]` int64 ids of the target's vocabulary that are neither accepted nor emitted.
        nan_flag: `[T]` bool or int32, written for the rows of real requests: all eligible logits are NaN.
        impl: "auto", "triton" or "eager".

    >>> target = torch.eye(4)[torch.tensor([2, 3, 1])] * 9  # argmax 2, 3, 1
    >>> one, zero = torch.ones(1), torch.zeros(1).long()
    >>> rejection_sample(target, torch.tensor([[2, 0]]), torch.tensor([0, 3]), zero, 0 * one, zero, torch.arange(3))[:3]
    (tensor([[ 2,  3, -1]]), tensor([2], dtype=torch.int32), tensor([1], dtype=torch.int32))
    """
    device = target_logits.device
    check_tensor("target_logits", target_logits, shape=("T", "V"), dtype=FLOATS)
    if target_logits.shape[1] == 0:
        raise ValueError("target_logits: got 0 columns, needs at least one")
    check_tensor("draft_tokens", draft_tokens, shape=("R", "K"), dtype=_INTS, device=device)
    num_reqs, num_drafts = draft_tokens.shape
    check_tensor("query_start_loc", query_start_loc, shape=(num_reqs + 1,), dtype=_INTS, device=device)
    check_tensor("idx_mapping", idx_mapping, shape=(num_reqs,), dtype=_INTS, device=device)
    check_tensor("temperature", temperature, shape=("S",), dtype=torch.float32, device=device)
    num_slots = temperature.shape[0]
    check_tensor("seeds", seeds, shape=(num_slots,), dtype=torch.int64, device=device)
    check_tensor("positions", positions, shape=(target_logits.shape[0],), dtype=_INTS, device=device)
    if draft_logits is not None:
        check_tensor("draft_logits", draft_logits, shape=(num_slots, "K", "V"), dtype=FLOATS, device=device)
        if draft_logits.shape[1] < num_drafts or draft_logits.shape[2] < target_logits.shape[1]:
            wanted = f"at least [{num_slots}, {num_drafts}, {target_logits.shape[1]}]"
            raise ValueError(f"draft_logits: got shape {list(draft_logits.shape)}, needs {wanted}")
    if nan_flag is not None:
        check_tensor(
            "nan_flag",
            nan_flag,
            shape=(target_logits.shape[0],),
            dtype=(torch.bool, torch.int32),
            device=device,
        )
    suppress_ids = check_suppress_ids(suppress_ids, device)
    result = RejectionResult(
        torch.empty(num_reqs, num_drafts + 1, dtype=torch.int64, device=device),
        torch.empty(num_reqs, dtype=torch.int32, device=device),
        torch.empty(num_reqs, dtype=torch.int32, device=device),
        torch.empty(num_reqs, dtype=torch.int64, device=device),
    )
    inputs = (target_logits, draft_tokens, query_start_loc, idx_mapping, temperature, seeds, positions)
    triton = use_triton(impl, target_logits)
    if num_reqs:
        _rejection_sample(*inputs, draft_logits, suppress_ids, nan_flag, *result, triton)
    return result
