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
    gumbel,
    gumbel_at,
    gumbel_of_word,
    philox,
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


def python_word(seed, position, token_id, stream):
    """The counter, in plain integers."""
    low = 2**32 - 1
    c = [token_id // 4096 * 1024 + token_id % 1024, position & low, position >> 32 & low, stream]
    k = [seed & low, seed >> 32 & low]
    for _ in range(7):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [b >> 32 ^ c[1] ^ k[0], b & low, a >> 32 ^ c[3] ^ k[1], a & low]
        k = [k[0] + 0x9E3779B9 & low, k[1] + 0xBB67AE85 & low]
    return c[token_id // 1024 % 4]


def python_gumbel(seed, position, token_id, stream):
    """The noise, in plain floats."""
    return -math.log(-math.log1p(-(python_word(seed, position, token_id, stream) + 0.5) / 2**32))


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
    ids = [0, 1, 1023, 1024, 4095, 4096, 262143, 2**31 - 1]
    for stream in (DRAFT, ACCEPT, RESAMPLE):
        u, g = draw(seed, position, torch.tensor(ids, device=device), stream, impl)
        for i, token_id in enumerate(ids):
            exact = (python_word(seed, position, token_id, stream) + 0.5) / 2**32
            assert abs(u[i].item() - exact) <= 2**-23 * exact  # the word rounds, then word + 1/2
            assert abs(g[i].item() - python_gumbel(seed, position, token_id, stream)) < 4e-6


def test_kernel_uniforms_are_bitwise_the_definition(impl, device):
    token_ids = torch.randint(2**31, (4096,), device=device)
    u, g = draw(1234, 77, token_ids, ACCEPT, impl)
    expected_u, expected_g = draw(1234, 77, token_ids, ACCEPT, "eager")
    assert torch.equal(u, expected_u)
    assert (g - expected_g).abs().max() < 4e-6


@triton.jit
def _noise_kernel(words_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, gumbel_of_word(tl.load(words_ptr + offs).to(tl.uint32)))


def test_noise_resolves_32_bits_toward_zero_and_is_never_infinite(impl, device, monkeypatch):
    edges = [0, 1, 2, 2**7, 2**8 + 1, 2**24 - 1, 2**30 - 1, 2**30, 2**31 - 1, 2**31, 2**32 - 2**8, 2**32 - 2, 2**32 - 1]
    inside = torch.logspace(0, 31.9, 1024 - len(edges), base=2, dtype=torch.float64).long()
    every = torch.cat([torch.tensor(edges), inside]).to(device)
    if impl == "eager":
        monkeypatch.setattr(random, "_words", lambda *args: every)
        got = gumbel(every, every, every, DRAFT)
    else:
        got = torch.empty(1024, device=device)
        _noise_kernel[(1,)](every, got, 1024)
    exact = [-math.log(-math.log1p(-(word + 0.5) / 2**32)) for word in every.tolist()]
    assert (got.double().cpu() - torch.tensor(exact, dtype=torch.float64)).abs().max() < 4e-6
    assert got[0] > 22.8, "the smallest word must give more than 24 bits can"
    assert got.max() < MAX_GUMBEL.value
    assert got.isfinite().all()


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


def test_draws_do_not_touch_the_global_generator(device):
    before = torch.get_rng_state()
    gumbel(torch.tensor(1), torch.tensor(2), torch.arange(10), DRAFT)
    assert torch.equal(before, torch.get_rng_state())


@triton.jit
def _extremes_kernel(lowest_ptr, highest_ptr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    word = (program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)).to(tl.uint32)
    noise = gumbel_of_word(word)
    bad = is_nan(noise)
    tl.store(lowest_ptr + program, tl.min(tl.where(bad, float("-inf"), noise), axis=0))
    tl.store(highest_ptr + program, tl.max(tl.where(bad, float("inf"), noise), axis=0))


@pytest.mark.gpu
def test_no_word_gives_infinite_noise(device):
    block = 4096
    lowest, highest = torch.empty(2**32 // block, device=device), torch.empty(2**32 // block, device=device)
    _extremes_kernel[(2**32 // block,)](lowest, highest, block)
    assert lowest.min() > -3.2
    assert 22.8 < highest.max() < MAX_GUMBEL.value
