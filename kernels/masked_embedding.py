"""Masked embedding: sampling from an ordered vocabulary through its centroids (Gemma 4's E2B and E4B assistants).

    s[n, c]      = hidden[n] · centroids[c]
    top[n]       = the top_k centroids of s[n]; among equal scores the lowest index, NaN as −inf
    logits[n, i] = hidden[n] · weight[i]    for i in token_ordering.view(C, V / C)[top[n]], −inf elsewhere

hidden: `[N, H]`; centroids: `[C, H]`; token_ordering: `[V]`, ordered position → vocabulary id; weight: `[V, H]`, the
tied head in vocabulary order. Products are summed in float32. With C = 2,048 and top_k = 32 a row reads 1/64 of the
head. Centroid scores choose candidates and are no part of the logits; candidates left out have probability 0 (Hugging
Face fills them with a finite value that depends on the batch, vLLM and SGLang with a large negative one: the argmax
agrees).

Sampling, ties and NaN are those of `sampling.py` over `logits`: if no candidate exceeds −inf (all are suppressed, say),
the row gives the lowest eligible id of the whole vocabulary, as the dense head does.
"""

from typing import Any

import torch
from torch import Tensor

from tridraft.kernels._argmax import eligible_ids
from tridraft.kernels._masked_embedding_kernels import (
    CANDIDATE_BYTES,
    SCORE_BYTES,
    SCORE_ROWS,
    SELECT_WARPS,
    MaskedEmbeddingLaunch,
    candidate_logits_kernel,
    centroid_candidates_kernel,
    centroid_scores_kernel,
    dot_columns,
    group_count,
    launch_options,
    masked_embedding_launch,
    row_candidates_kernel,
    select_kernel,
    write_tokens_kernel,
)
from tridraft.kernels._op import FLOATS, Impl, arch_of, cdiv, check_tensor, next_power_of_2, register, use_triton
from tridraft.kernels.sampling import check_sampling, sample_reference, store_reference
from tridraft.kernels.suppress import check_suppress_ids

_MINUS_INF = float("-inf")


def top_centroids_reference(hidden: Tensor, centroids: Tensor, top_k: int) -> Tensor:
    """The selected centroids `[N, top_k]`, best first."""
    scores = hidden.float() @ centroids.float().T
    scores = scores.masked_fill(scores.isnan(), _MINUS_INF)
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]


def masked_embedding_logits_reference(
    hidden: Tensor,
    centroids: Tensor,
    token_ordering: Tensor,
    weight: Tensor,
    top_k: int,
    suppress_ids: Tensor | None = None,
) -> Tensor:
    """The definition: `[N, V]` float32, −inf outside the candidates and at suppressed ids."""
    top = top_centroids_reference(hidden, centroids, top_k)
    ids = token_ordering.long().view(centroids.shape[0], -1)[top].flatten(1)
    candidates = (weight[ids].float() @ hidden.float().unsqueeze(2)).squeeze(2)
    logits = candidates.new_full((hidden.shape[0], weight.shape[0]), _MINUS_INF).scatter(1, ids, candidates)
    return logits if suppress_ids is None else logits.index_fill(1, suppress_ids, _MINUS_INF)


def masked_embedding_sample_reference(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    suppress_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition, on the masked logits: ids `[N]`, and whether NaN left the row without a candidate `[N]`."""
    vocab_size, device = logits.shape[1], logits.device
    tokens, _ = sample_reference(
        logits,
        idx_mapping,
        temperature,
        seeds,
        positions,
        torch.arange(vocab_size, device=device),
        eligible_ids(vocab_size, suppress_ids, device),
    )
    return tokens, logits.isnan().any(dim=1) & ~(logits > _MINUS_INF).any(dim=1)


def _ladder(hidden: Tensor, centroids: Tensor, weight: Tensor, top_k: int) -> MaskedEmbeddingLaunch:
    return masked_embedding_launch(hidden.shape[0], centroids.shape[0], weight.shape[0], top_k)


def _launch_scores(
    hidden: Tensor,
    centroids: Tensor,
    launch: MaskedEmbeddingLaunch,
    idx_mapping: Tensor | None = None,
    best: Tensor | None = None,
    arrivals: Tensor | None = None,
    counts: Tensor | None = None,
    num_slots: int = 0,
) -> Tensor:
    """Keys `[N, C]` int32 that order, as unsigned integers, as the scores do."""
    (num_rows, hidden_size), num_centroids = hidden.shape, centroids.shape[0]
    keys = torch.empty(num_rows, num_centroids, dtype=torch.int32, device=hidden.device)
    kernel: Any = centroid_scores_kernel[(cdiv(num_centroids, launch.score_block), cdiv(num_rows, SCORE_ROWS))]
    kernel(
        *(hidden, centroids, idx_mapping, keys, best, arrivals, counts),
        *(num_rows, num_centroids, hidden.stride(0), centroids.stride(0), num_slots),
        BLOCK_N=SCORE_ROWS,
        BLOCK_C=launch.score_block,
        HIDDEN=hidden_size,
        BLOCK_H=dot_columns(hidden_size, hidden.element_size(), SCORE_BYTES),
        **launch_options(launch.score_warps, arch_of(hidden.device), early=None),
    )
    return keys


def _tile_arguments(hidden: Tensor, launch: MaskedEmbeddingLaunch) -> dict[str, Any]:
    """What the kernels over candidates are compiled for."""
    return {
        "TILE": launch.tile,
        "HIDDEN": hidden.shape[1],
        "BLOCK_H": dot_columns(hidden.shape[1], hidden.element_size(), CANDIDATE_BYTES),
        **launch_options(launch.num_warps, arch_of(hidden.device)),
    }


def _select_arguments(num_centroids: int, top_k: int) -> dict[str, Any]:
    """What the kernels that select are compiled for; the block has a centroid for every thread of `select_kernel`."""
    block = max(128, next_power_of_2(num_centroids))
    return {"BLOCK_C": block, "GROUPS": group_count(top_k, block)}


def _launch_sample(
    hidden: Tensor,
    centroids: Tensor,
    token_ordering: Tensor,
    weight: Tensor,
    top_k: int,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    suppress_ids: Tensor | None,
    nan_flag: Tensor | None,
    out: Tensor,
    launch: MaskedEmbeddingLaunch,
) -> None:
    num_rows, num_centroids, vocab_size = hidden.shape[0], centroids.shape[0], weight.shape[0]
    per_centroid = vocab_size // num_centroids
    parts = cdiv(per_centroid, launch.tile)
    device, arch = hidden.device, arch_of(hidden.device)
    best = torch.empty(num_rows, dtype=torch.int64, device=device)
    arrivals = torch.empty(num_rows, dtype=torch.int32, device=device)
    counts = torch.empty(num_centroids + 1, dtype=torch.int32, device=device) if launch.order == "centroid" else None
    keys = _launch_scores(
        hidden, centroids, launch, idx_mapping, best, arrivals, counts, num_slots=temperature.shape[0]
    )
    tensors = (hidden, token_ordering, weight, suppress_ids, idx_mapping, temperature, seeds, positions)
    num_suppressed = 0 if suppress_ids is None else suppress_ids.shape[0]
    out_strides = (0 if nan_flag is None else nan_flag.stride(0), out.stride(0))
    select, tile = _select_arguments(num_centroids, top_k), _tile_arguments(hidden, launch)
    pairs = num_rows * top_k
    chosen = active = members = None
    if launch.order == "row":
        chosen = torch.empty(pairs, dtype=torch.int32, device=device)
    if launch.order == "centroid":
        active = torch.empty(min(num_centroids, pairs) + pairs // SCORE_ROWS, dtype=torch.int32, device=device)
        members = torch.empty(num_centroids, num_rows, dtype=torch.int32, device=device)
    if launch.order != "search":
        kernel: Any = select_kernel[(num_rows,)]
        kernel(
            *(keys, idx_mapping, chosen, counts, active, members, num_rows, num_centroids, top_k),
            **select,
            **launch_options(SELECT_WARPS, arch),
        )
    if active is not None:
        kernel = centroid_candidates_kernel[(active.shape[0] * parts,)]
        sizes = (num_rows, num_centroids, per_centroid, num_suppressed, hidden.stride(0), weight.stride(0))
        kernel(counts, active, members, *tensors, best, *sizes, **tile)
    else:
        kernel = row_candidates_kernel[(num_rows, top_k, parts)]
        sizes = (num_centroids, per_centroid, num_suppressed, vocab_size)
        strides = (hidden.stride(0), weight.stride(0), *out_strides)
        kernel(keys, chosen, *tensors, best, arrivals, nan_flag, out, *sizes, *strides, **select, **tile)
    if launch.order != "search":
        kernel = write_tokens_kernel[(cdiv(num_rows, 32),)]
        sizes = (num_rows, num_suppressed, vocab_size)
        kernel(
            idx_mapping, best, suppress_ids, nan_flag, out, *sizes, *out_strides, BLOCK_N=32, **launch_options(1, arch)
        )


def _launch_logits(
    hidden: Tensor,
    centroids: Tensor,
    token_ordering: Tensor,
    weight: Tensor,
    top_k: int,
    suppress_ids: Tensor | None,
    out: Tensor,
    launch: MaskedEmbeddingLaunch,
) -> None:
    num_rows, num_centroids = hidden.shape[0], centroids.shape[0]
    per_centroid = weight.shape[0] // num_centroids
    num_suppressed = 0 if suppress_ids is None else suppress_ids.shape[0]
    keys = _launch_scores(hidden, centroids, launch)
    out.fill_(_MINUS_INF)
    kernel: Any = candidate_logits_kernel[(num_rows, top_k, cdiv(per_centroid, launch.tile))]
    kernel(
        *(keys, hidden, token_ordering, weight, suppress_ids, out),
        *(num_centroids, per_centroid, num_suppressed),
        *(hidden.stride(0), weight.stride(0), out.stride(0)),
        **_select_arguments(num_centroids, top_k),
        **_tile_arguments(hidden, launch),
    )


@register("masked_embedding_sample", mutates=("nan_flag", "out"))
def _masked_embedding_sample(
    hidden: Tensor,
    centroids: Tensor,
    token_ordering: Tensor,
    weight: Tensor,
    top_k: int,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    suppress_ids: Tensor | None,
    nan_flag: Tensor | None,
    out: Tensor,
    triton: bool,
) -> None:
    model = (hidden, centroids, token_ordering, weight, top_k)
    rows = (idx_mapping, temperature, seeds, positions, suppress_ids)
    if triton:
        _launch_sample(*model, *rows, nan_flag, out, _ladder(hidden, centroids, weight, top_k))
    else:
        logits = masked_embedding_logits_reference(*model, suppress_ids)
        store_reference(*masked_embedding_sample_reference(logits, *rows), idx_mapping, nan_flag, out)


@register("masked_embedding_logits", mutates=("out",))
def _masked_embedding_logits(
    hidden: Tensor,
    centroids: Tensor,
    token_ordering: Tensor,
    weight: Tensor,
    top_k: int,
    suppress_ids: Tensor | None,
    out: Tensor,
    triton: bool,
) -> None:
    model = (hidden, centroids, token_ordering, weight, top_k)
    if triton:
        _launch_logits(*model, suppress_ids, out, _ladder(hidden, centroids, weight, top_k))
    else:
        out.copy_(masked_embedding_logits_reference(*model, suppress_ids))


def _check(
    hidden: Tensor,
    centroids: Tensor,
    token_ordering: Tensor,
    weight: Tensor,
    top_k: int,
) -> None:
    check_tensor("hidden", hidden, shape=("N", "H"), dtype=FLOATS)
    device, dtype, hidden_size = hidden.device, hidden.dtype, hidden.shape[1]
    check_tensor("centroids", centroids, shape=("C", hidden_size), dtype=dtype, device=device)
    check_tensor("weight", weight, shape=("V", hidden_size), dtype=dtype, device=device)
    num_centroids, vocab_size = centroids.shape[0], weight.shape[0]
    integers = (torch.int64, torch.int32)
    check_tensor("token_ordering", token_ordering, shape=(vocab_size,), dtype=integers, device=device)
    if hidden.shape[0] >= 2**20:  # the kernels pack a sixteenth of their number with a centroid's into 31 bits
        raise ValueError(f"hidden: got {hidden.shape[0]} rows, needs fewer than {2**20}")
    if not 1 <= num_centroids < 2**15:  # the kernels count them in 16 bits and pack them into 15
        raise ValueError(f"centroids: got {num_centroids} rows, needs 1 to {2**15 - 1}")
    if vocab_size == 0 or vocab_size % num_centroids:
        raise ValueError(f"weight: got {vocab_size} rows, needs a multiple of the {num_centroids} centroids")
    if not 1 <= top_k <= num_centroids:
        raise ValueError(f"top_k: got {top_k}, needs 1 to {num_centroids}, the number of centroids")


def masked_embedding_sample(
    hidden: Tensor,
    centroids: Tensor,
    token_ordering: Tensor,
    weight: Tensor,
    top_k: int,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    suppress_ids: Tensor | None = None,
    nan_flag: Tensor | None = None,
    out: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Sample one token a row from the candidates of its best centroids, without materialising logits.

    Args:
        hidden: `[N, H]` float32, bfloat16 or float16: the drafter's last hidden states.
        centroids: `[C, H]`, same dtype (`masked_embedding.centroids.weight`); read early: no kernel that lets others
            start before it ends may write it right before.
        token_ordering: `[V]` int64 or int32, a permutation of the vocabulary (`masked_embedding.token_ordering`).
        weight: `[V, H]`, same dtype (`model.embed_tokens.weight`).
        top_k: centroids a row reads.
        idx_mapping: `[N]` int64 or int32, the request slot of each row; −1: padding, for which nothing is written,
            though its hidden state and position may be read.
        temperature: `[S]` float32 of each request slot, finite; 0 is greedy.
        seeds: `[S]` int64 of each request slot.
        positions: `[N]` int64 or int32, the position before the token being sampled.
        suppress_ids: `[n]` int64 vocabulary ids that never win (see `make_suppress_ids`).
        nan_flag: `[N]` bool or int32; receives whether NaN left the row without a candidate.
        out: `[N]` int64 or int32, any stride.
        impl: "auto", "triton" or "eager".

    Returns:
        `out`, or a new `[N]` int64 tensor, in which rows of padding hold anything.

    Four centroids of two tokens each, the row nearest to the last:

    >>> weight, ordering = torch.arange(8.0)[:, None], torch.tensor([7, 0, 6, 1, 5, 2, 4, 3])
    >>> zero = torch.zeros(1).long()
    >>> centroids = torch.tensor([[0.1], [0.2], [0.3], [0.4]])
    >>> masked_embedding_sample(torch.ones(1, 1), centroids, ordering, weight, 1, zero, zero.float(), zero, zero)
    tensor([4])
    """
    _check(hidden, centroids, token_ordering, weight, top_k)
    num_rows, device = hidden.shape[0], hidden.device
    out = check_sampling(num_rows, device, idx_mapping, temperature, seeds, positions, nan_flag, out)
    suppress_ids = check_suppress_ids(suppress_ids, device)
    triton = use_triton(impl, hidden)
    model = (hidden, centroids, token_ordering, weight, top_k)
    if num_rows:
        _masked_embedding_sample(
            *model, idx_mapping, temperature, seeds, positions, suppress_ids, nan_flag, out, triton
        )
    return out


def masked_embedding_logits(
    hidden: Tensor,
    centroids: Tensor,
    token_ordering: Tensor,
    weight: Tensor,
    top_k: int,
    *,
    suppress_ids: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """The logits `masked_embedding_sample` samples from: −inf outside the candidates and at suppressed ids.

    Args:
        hidden: `[N, H]` float32, bfloat16 or float16.
        centroids: `[C, H]`, same dtype.
        token_ordering: `[V]` int64 or int32, a permutation of the vocabulary.
        weight: `[V, H]`, same dtype.
        top_k: centroids a row reads.
        suppress_ids: `[n]` int64 vocabulary ids.
        impl: "auto", "triton" or "eager".

    Returns:
        `[N, V]` float32: rounded to a narrower type, candidates would tie that `masked_embedding_sample` tells apart.
    """
    _check(hidden, centroids, token_ordering, weight, top_k)
    suppress_ids = check_suppress_ids(suppress_ids, hidden.device)
    triton = use_triton(impl, hidden)
    out = torch.empty(hidden.shape[0], weight.shape[0], dtype=torch.float32, device=hidden.device)
    if hidden.shape[0]:
        _masked_embedding_logits(hidden, centroids, token_ordering, weight, top_k, suppress_ids, out, triton)
    return out
