"""Winners of several shards of a vocabulary."""

import torch

from tridraft.kernels.lm_head import lm_head_sample
from tridraft.models.vocab_parallel import _pack, _unpack


def test_keys_order_by_score_and_then_by_lowest_id():
    scores = torch.tensor([float("-inf"), -1e30, -2.5, -1e-40, -0.0, 0.0, 1e-40, 1.0, 3e38, float("inf")])
    ids = torch.randint(0, 2**31, scores.shape, generator=torch.Generator().manual_seed(0))
    keys = _pack(scores, ids)
    for a, (score_a, id_a) in enumerate(zip(scores, ids, strict=True)):
        for b, (score_b, id_b) in enumerate(zip(scores, ids, strict=True)):
            wins = score_a > score_b or (score_a == score_b and id_a < id_b)
            assert (keys[a] > keys[b]).item() == wins
    assert torch.equal(_unpack(keys), ids)


def test_the_largest_score_of_the_shards_is_the_whole_heads_winner(impl, device):
    """Greedy and sampled rows, ties across shards, suppressed ids, a shard of nothing else, a row of padding."""
    torch.manual_seed(0)
    hidden = torch.randn(6, 32, device=device)
    weight = torch.randn(90, 32, device=device)
    weight[70] = weight[10]  # equal logits in two shards
    hidden[0] = weight[10] * 9
    slots = torch.tensor([0, 1, 2, 3, 0, -1], device=device)
    temperature = torch.tensor([0.0, 0.8, 1.3, 0.0], device=device)
    seeds, positions = torch.arange(4, device=device), torch.arange(6, device=device)
    suppressed = torch.arange(30, 60, device=device)
    options = {"suppress_ids": suppressed, "impl": impl}
    whole = lm_head_sample(hidden, weight, slots, temperature, seeds, positions, **options)
    keys = []
    for first in (0, 30, 60):
        scores = torch.full((6,), -7.0, device=device)
        d2t = torch.full((30,), first, device=device)
        ids = lm_head_sample(
            hidden,
            weight[first : first + 30],
            slots,
            temperature,
            seeds,
            positions,
            d2t=d2t,
            scores_out=scores,
            **options,
        )
        assert scores[5] == -7
        assert (scores[:5] == float("-inf")).all() == (first == 30)
        keys.append(_pack(scores, ids))
    winners = _unpack(torch.stack(keys).amax(dim=0))
    assert winners[0] == 10
    assert torch.equal(winners[:5], whole[:5])
