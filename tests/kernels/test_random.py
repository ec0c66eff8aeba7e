"""Philox against its published vectors, the counter against plain integers, the noise against float64."""

# Kernels are Triton, not Python: their integers are tensors and their flags constexprs, which a Python checker denies.
# pyright: reportArgumentType=false

import math

import pytest
import torch
import triton
import triton.language as tl
from scipy import stats

from tridraft.kernels import random
from tridraft.kernels._argmax import is_nan
from tridraft.kernels.random import (
    ACCEPT,
    DRAFT,
    MAX_GUMBEL,
    RESAMPLE,
    group_bound,
    gumbel,
    gumbel_at,
    gumbel_of,
    philox,
    race,
    uniform,
    uniform_at,
)

# Random123's kat_vectors: counter, key, expected.
PI = ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0")
VECTORS = [
    (7, "00000000 " * 4, "00000000 " * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, "ffffffff " * 4, "ffffffff " * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, *PI, "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, "00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, "ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, *PI, "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text, device="cpu"):
    return [torch.tensor([int(word, 16)], device=device) for word in text.split()]


@pytest.mark.parametrize(("rounds", "counter", "key", "expected"), VECTORS)
def test_philox_known_answers(rounds, counter, key, expected, device):
    got = philox(words(counter, device), words(key, device), rounds)
    assert [int(word) for word in got] == [int(word) for word in words(expected)]


def python_philox(seed, position, number, domain):
    """The four words of a call, in plain integers."""
    low = 2**32 - 1
    c = [number, position & low, position >> 32 & low, domain]
    k = [seed & low, seed >> 32 & low]
    for _ in range(7):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [b >> 32 ^ c[1] ^ k[0], b & low, a >> 32 ^ c[3] ^ k[1], a & low]
        k = [k[0] + 0x9E3779B9 & low, k[1] + 0xBB67AE85 & low]
    return c


def python_uniform(seed, position, token_id, stream):
    """The uniform draw, in plain floats."""
    return (python_philox(seed, position, token_id // 4, stream)[token_id % 4] + 0.5) / 2**32


def python_noise(group_word, place, u):
    """The noise of an id from its group's word, its place there and its own uniform draw."""
    shortest = -math.log1p(-(group_word // 8 + 0.5) / 2**29) / 8
    return -math.log(shortest + (0 if place == group_word % 8 else -math.log1p(-u)))


def python_gumbel(seed, position, token_id, stream):
    """The noise, in plain floats."""
    number = token_id // 4096 * 128 + token_id % 1024 // 8
    group_word = python_philox(seed, position, number, stream + 2**31)[token_id // 1024 % 4]
    return python_noise(group_word, token_id % 8, python_uniform(seed, position, token_id, stream))


@triton.jit
def _draw_kernel(seed, position, token_ids_ptr, uniform_ptr, gumbel_ptr, n, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    token_ids = tl.load(token_ids_ptr + offs, mask=offs < n, other=0)
    seed, position = tl.load(seed), tl.load(position)
    tl.store(uniform_ptr + offs, uniform_at(seed, position, token_ids, STREAM), mask=offs < n)
    tl.store(gumbel_ptr + offs, gumbel_at(seed, position, token_ids, STREAM), mask=offs < n)


def draw(seed, position, token_ids, stream, impl):
    seed, position = (torch.tensor([x], device=token_ids.device) for x in (seed, position))
    if impl == "eager":
        return uniform(seed, position, token_ids, stream), gumbel(seed, position, token_ids, stream)
    n = token_ids.numel()
    u, g = torch.empty(n, device=token_ids.device), torch.empty(n, device=token_ids.device)
    _draw_kernel[(1,)](seed, position, token_ids, u, g, n, stream, triton.next_power_of_2(n))
    return u, g


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40 + 17, -(2**63)])
@pytest.mark.parametrize("position", [0, 131071, 2**33 + 5])
def test_draws_are_the_counter_based_formula(seed, position, impl, device):
    ids = [0, 1, 7, 8, 1023, 1024, 4095, 4096, 262143, *range(6144, 6152), 2**31 - 1]
    for stream in (DRAFT, ACCEPT, RESAMPLE):
        u, g = draw(seed, position, torch.tensor(ids, device=device), stream, impl)
        for i, token_id in enumerate(ids):
            exact = python_uniform(seed, position, token_id, stream)
            assert abs(u[i].item() - exact) <= 2**-23 * exact  # the word rounds, then word + 1/2
            assert abs(g[i].item() - python_gumbel(seed, position, token_id, stream)) < 4e-6


def test_kernel_uniforms_are_bitwise_the_definition(impl, device):
    token_ids = torch.randint(2**31, (4096,), device=device)
    u, g = draw(1234, 77, token_ids, ACCEPT, impl)
    expected_u, expected_g = draw(1234, 77, token_ids, ACCEPT, "eager")
    assert torch.equal(u, expected_u)
    assert (g - expected_g).abs().max() < 4e-6


EDGES = [0, 1, 2, 2**7, 2**8 + 1, 2**24 - 1, 2**30 - 1, 2**30, 2**31 - 1, 2**31, 2**32 - 2**8, 2**32 - 2, 2**32 - 1]
INSIDE = torch.logspace(0, 31.9, 1024 - len(EDGES), base=2, dtype=torch.float64).long()


@triton.jit
def _noise_kernel(group_words_ptr, words_ptr, first_ptr, other_ptr, bound_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    group_word, word = tl.load(group_words_ptr + offs).to(tl.uint32), tl.load(words_ptr + offs).to(tl.uint32)
    shortest, place = race(group_word)
    tl.store(first_ptr + offs, gumbel_of(shortest, place, place, word))
    tl.store(other_ptr + offs, gumbel_of(shortest, place, place ^ 1, word))
    tl.store(bound_ptr + offs, group_bound(group_word))


@pytest.mark.parametrize("rolled", [0, 1, 511])
def test_noise_resolves_32_bits_toward_its_upper_end_and_is_never_infinite(rolled, impl, device, monkeypatch):
    group_words = torch.cat([torch.tensor(EDGES), INSIDE]).to(device)
    words = group_words.roll(rolled)
    if impl == "eager":
        monkeypatch.setattr(random, "_group_words", lambda *args: group_words)
        monkeypatch.setattr(random, "_id_words", lambda *args: words)
        first, other = (gumbel(words, words, ids, DRAFT) for ids in (group_words % 8, group_words % 8 ^ 1))
    else:
        first, other, bound = torch.empty(3, 1024, device=device)
        _noise_kernel[(1,)](group_words, words, first, other, bound, 1024)
        assert (bound > first - 2e-5).all()
        assert (bound - first)[first > 6].max() < 0.075
    for got, flip in ((first, 0), (other, 1)):
        exact = [
            python_noise(group_word, group_word % 8 ^ flip, (word + 0.5) / 2**32)
            for group_word, word in zip(group_words.tolist(), words.tolist(), strict=True)
        ]
        assert (got.double().cpu() - torch.tensor(exact, dtype=torch.float64)).abs().max() < 4e-6
        assert got.max() < MAX_GUMBEL.value
        assert got.min() > -3.3
    assert first[0] > 22.8, "the smallest word must give more than 24 bits can"


@pytest.mark.parametrize("stream", [DRAFT, ACCEPT, RESAMPLE])
def test_uniforms_are_uniform(stream, device):
    u = uniform(
        torch.tensor(5, device=device),
        torch.arange(64, device=device)[:, None],
        torch.arange(8192, device=device),
        stream,
    )
    counts = torch.histc(u.cpu(), 256, 0, 1)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-4
    assert 0 < u.min() < 1e-4
    assert u.max() <= 1


def test_streams_seeds_and_positions_are_disjoint(device):
    token_ids = torch.arange(8192, device=device)
    keys = [(7, 9, DRAFT), (7, 9, ACCEPT), (7, 9, RESAMPLE), (8, 9, DRAFT), (7, 10, DRAFT), (7 + 2**32, 9, DRAFT)]
    draws = torch.stack([uniform(torch.tensor(s), torch.tensor(p), token_ids.cpu(), stream) for s, p, stream in keys])
    correlation = torch.corrcoef(draws) - torch.eye(len(keys))
    assert correlation.abs().max() < 5 / 8192**0.5
    assert max((one == other).sum() for i, one in enumerate(draws) for other in draws[:i]) <= 4  # 2^-11 expected


@pytest.fixture(scope="module")
def noise():
    """`[groups, 8]` of 64 positions and 4,096 groups, ids 0 to 32,767."""
    draws = gumbel(torch.tensor(11), torch.arange(64)[:, None], torch.arange(32768), DRAFT)
    return draws.double().view(-1, 8)


def test_noise_is_gumbel(noise):
    assert stats.kstest(noise.flatten()[::4].numpy(), "gumbel_r").pvalue > 1e-4
    for place in range(8):
        assert stats.kstest(noise[:, place].numpy(), "gumbel_r").pvalue > 1e-4
    above = int((noise > 10).sum())  # 1 − exp(−exp(−10)) of 2 ²¹: 95 expected
    assert 55 <= above <= 145


def test_noise_of_a_group_is_independent(noise):
    exponential = torch.exp(-noise)
    for values in (noise, exponential, exponential.log1p()):
        assert (torch.corrcoef(values.T) - torch.eye(8)).abs().max() < 5 / len(noise) ** 0.5
    # Who is first, who is second, and by how much: independent of each other, as eight clocks would have it.
    times, order = exponential.sort(dim=1)
    pairs = torch.bincount(order[:, 0] * 8 + order[:, 1], minlength=64).view(8, 8)
    assert (pairs.diagonal() == 0).all()
    assert stats.chisquare(pairs[~torch.eye(8, dtype=torch.bool)].numpy()).pvalue > 1e-4
    gaps = times.diff(dim=1, prepend=torch.zeros(len(times), 1)) * torch.arange(8, 0, -1)
    for gap in gaps.T:
        assert stats.kstest(gap.numpy(), "expon").pvalue > 1e-4
    assert (torch.corrcoef(gaps.T) - torch.eye(8)).abs().max() < 5 / len(noise) ** 0.5


@pytest.mark.parametrize("ids", [range(8), range(4, 12), range(0, 8192, 1024), range(0, 64, 8)], ids=str)
def test_the_winner_has_the_softmax_distribution(ids):
    """Within a group, across two, across groups of one call, and across calls."""
    logits = torch.linspace(-1.5, 1.5, 8)
    scores = logits + gumbel(torch.tensor(3), torch.arange(20_000)[:, None], torch.tensor(list(ids)), DRAFT)
    counts = torch.bincount(scores.argmax(dim=1), minlength=8)
    expected = logits.double().softmax(0) * 20_000
    assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-4


def test_groups_of_a_call_are_independent(noise):
    strips = noise.view(64, 8, 4, 128, 8).amax(dim=-1).movedim(2, 0).reshape(4, -1)
    assert (torch.corrcoef(torch.exp(-strips)) - torch.eye(4)).abs().max() < 5 / strips.shape[1] ** 0.5


def test_noise_of_streams_is_disjoint():
    ids = torch.arange(8192)
    draws = [gumbel(torch.tensor(7), torch.tensor(9), ids, stream) for stream in (DRAFT, ACCEPT, RESAMPLE)]
    draws += [uniform(torch.tensor(7), torch.tensor(9), ids, ACCEPT).log()]
    correlation = torch.corrcoef(torch.stack(draws)) - torch.eye(4)
    correlation[1, 3] = correlation[3, 1] = 0  # one stream serves one of them
    assert correlation.abs().max() < 5 / 8192**0.5


def test_draws_do_not_touch_the_global_generator(device):
    before = torch.get_rng_state()
    gumbel(torch.tensor(1), torch.tensor(2), torch.arange(10), DRAFT)
    assert torch.equal(before, torch.get_rng_state())


@triton.jit
def _extremes_kernel(lowest_ptr, highest_ptr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    word = (program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)).to(tl.uint32)
    shortest, place = race(word)
    first = gumbel_of(shortest, place, place, word)
    other = gumbel_of(shortest, place, place ^ 1, word)
    last = gumbel_of(shortest, place, place ^ 1, ~(word ^ word))
    lowest, highest = tl.minimum(tl.minimum(first, other), last), tl.maximum(tl.maximum(first, other), last)
    bad = is_nan(first) | is_nan(other) | is_nan(last)
    tl.store(lowest_ptr + program, tl.min(tl.where(bad, float("-inf"), lowest), axis=0))
    tl.store(highest_ptr + program, tl.max(tl.where(bad, float("inf"), highest), axis=0))


@pytest.mark.gpu
def test_no_word_gives_infinite_noise(device):
    block = 4096
    lowest, highest = torch.empty(2**32 // block, device=device), torch.empty(2**32 // block, device=device)
    _extremes_kernel[(2**32 // block,)](lowest, highest, block)
    assert lowest.min() > -3.3
    assert 22.8 < highest.max() < MAX_GUMBEL.value
