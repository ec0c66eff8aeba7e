"""Top-k and top-p against the processors of `transformers`, and the text that is sampled under them."""

import pytest
import torch
from scipy import stats

from tridraft.speculator.request import Request
from tridraft.speculator.truncation import truncate

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 1e-6])
@pytest.mark.parametrize("top_k", [0, 1, 7, 500])
def test_keeps_what_transformers_keeps(top_k, top_p, temperature, device):
    logits = 3 * torch.randn(5, 200, device=device)
    logits[1] = logits[1].round()  # ties
    logits[2, 50:] = float("-inf")
    expected = logits / temperature
    if top_k:
        expected = transformers.TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = transformers.TopPLogitsWarper(top_p)(None, expected)
    rows = torch.ones(5, device=device)
    ours = truncate(logits, temperature * rows, top_k * rows.long(), top_p * rows)
    kept = ours.isfinite()
    assert torch.equal(ours[kept], logits[kept])
    # Of equal tokens at the edge of p either may be the last: their number is the same, and so are their logits.
    assert torch.equal(ours.sort(dim=-1).values.isfinite(), expected.sort(dim=-1).values.isfinite())
    torch.testing.assert_close(ours.sort(dim=-1).values[:, 100:] / temperature, expected.sort(dim=-1).values[:, 100:])


def test_rows_have_their_own(device):
    logits = torch.tensor([[4.0, 3, 2, 1]] * 4, device=device)
    ours = truncate(
        logits,
        torch.tensor([1.0, 1, 0, 1], device=device),
        torch.tensor([0, 2, 1, 3], device=device),
        torch.tensor([1.0, 1, 1, 0.7], device=device),
    )
    assert ours.isfinite().sum(dim=1).tolist() == [4, 2, 1, 2]


@pytest.mark.parametrize("steps", [None, 3])
def test_sampled_text_is_drawn_from_what_is_kept(tiny, steps):
    """Top-k and top-p beside a request without: each second token's frequencies are those of its own distribution."""
    pair, draws = tiny("plain"), 400
    decoder = pair.decoder(steps, max_num_reqs=8)
    prompt = [5, 9, 30]
    limited = [Request(prompt, 2, temperature=1.0, top_k=12, top_p=0.8, seed=seed) for seed in range(draws)]
    free = [Request(prompt, 2, temperature=1.0, seed=seed) for seed in range(40)]
    completions = decoder.generate([*limited, *free])
    device = pair.target.device

    def distribution(tokens):
        with torch.no_grad():
            logits = pair.reference(input_ids=torch.tensor([tokens], device=device)).logits[:, -1]
        logits = transformers.TopPLogitsWarper(0.8)(None, transformers.TopKLogitsWarper(12)(None, logits))
        return logits.softmax(-1)[0].double().cpu()

    first = distribution(prompt)
    firsts = torch.tensor([one.output_ids[0] for one in completions[:draws]])
    assert (first[firsts] > 0).all()
    common = first * draws >= 5
    observed = torch.bincount(firsts, minlength=len(first))
    frequencies = [*observed[common].tolist(), observed[~common].sum().item()]
    probabilities = torch.cat((first[common], first[~common].sum()[None]))
    kept = probabilities > 0
    counts = torch.tensor(frequencies)[kept]
    expected = probabilities[kept] / probabilities.sum() * draws
    assert stats.chisquare(counts.tolist(), expected.tolist()).pvalue > 0.001
    for one in completions[:40]:
        assert distribution([*prompt, one.output_ids[0]])[one.output_ids[1]] > 0
    unlimited = {one.output_ids[0] for one in completions[draws:]}
    assert any(first[token] == 0 for token in unlimited)
