"""The one home of randomness: a draw is a function of (seed, position, token id, stream) and of nothing else.

Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with 7 rounds, the fewest that
pass BigCrush: sampling is bound by this arithmetic, and 10 rounds would cost 1.4 times as much.

    key     = (seed low, seed high)
    counter = (token id // 4096 * 1024 + token id % 1024, position low, position high, stream)
    word    = output[token id // 1024 % 4]

One call serves four token ids that lie 1,024 apart, so a kernel that reads four strips of a row uses all four words
where they are, and the result still does not depend on how a kernel cuts its blocks.

A word w becomes the uniform u = (w + 1/2) / 2³², which keeps 32 bits of resolution toward 0, and the Gumbel noise
−log(−log(1 − u)), whose large values come from small u: it lies in (−3.2, 22.9) and is never infinite. Rounding u to 24
bits first, as fp32 generators do, would cap the noise at 16.6 and never draw a token of a long, flat tail.
"""

# Kernels are Triton, not Python: their integers are tensors and their flags constexprs, which a Python checker denies.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

DRAFT, ACCEPT, RESAMPLE = 0, 1, 2
"""The streams: drawing drafts, accepting them, and drawing recovered and bonus tokens."""

_ROUNDS = tl.constexpr(7)
_MULTIPLIER_A, _MULTIPLIER_B = 0xD2511F53, 0xCD9E8D57
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85
_M_A, _M_B = tl.constexpr(_MULTIPLIER_A), tl.constexpr(_MULTIPLIER_B)
_W_A, _W_B = tl.constexpr(_WEYL_A), tl.constexpr(_WEYL_B)
_UNIT = tl.constexpr(2.0**-32)
_SQRT_HALF = tl.constexpr(0x3F3504F3)  # its bits
_LN_2 = tl.constexpr(0.6931471805599453)

STRIP = tl.constexpr(1024)
"""Token ids of one counter lie this far apart."""

MAX_GUMBEL = tl.constexpr(22.9)
"""No noise reaches this: the largest is −log(−log(1 − 2⁻³³)) = 22.874."""


def _words(seeds: Tensor, positions: Tensor, token_ids: Tensor, stream: int) -> Tensor:
    """The 32-bit word of each draw, in int64."""
    low = 0xFFFFFFFF
    seeds, positions, token_ids = torch.broadcast_tensors(seeds.long(), positions.long(), token_ids.long())
    counter = [
        token_ids // 4096 * 1024 + token_ids % 1024,
        positions & low,
        (positions >> 32) & low,
        torch.full_like(positions, stream),
    ]
    words = torch.stack(philox(counter, [seeds & low, (seeds >> 32) & low], _ROUNDS.value))
    return words.gather(0, (token_ids // 1024 % 4)[None])[0]


def philox(counter: list[Tensor], key: list[Tensor], rounds: int) -> list[Tensor]:
    """Philox4x32 of four counter words and two key words, each a 32-bit value in an int64 tensor."""
    low = 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        product_a, product_b = c0 * _MULTIPLIER_A, c2 * _MULTIPLIER_B  # wraps modulo 2^64, as it should
        c0, c1 = (product_b >> 32) & low ^ c1 ^ k0, product_b & low
        c2, c3 = (product_a >> 32) & low ^ c3 ^ k1, product_a & low
        k0, k1 = (k0 + _WEYL_A) & low, (k1 + _WEYL_B) & low
    return [c0, c1, c2, c3]


def uniform(seeds: Tensor, positions: Tensor, token_ids: Tensor, stream: int) -> Tensor:
    """Uniform draws in (0, 1], float32, for integer tensors that broadcast.

    >>> seeds, positions = torch.tensor([7, 8]), torch.tensor([100, 100])
    >>> uniform(seeds[:, None], positions[:, None], torch.arange(3), DRAFT).shape
    torch.Size([2, 3])
    """
    return (_words(seeds, positions, token_ids, stream).float() + 0.5) * 2.0**-32


def gumbel(seeds: Tensor, positions: Tensor, token_ids: Tensor, stream: int) -> Tensor:
    """Standard Gumbel draws, float32, for integer tensors that broadcast."""
    u = (_words(seeds, positions, token_ids, stream).double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-u)).float()


@triton.jit
def _philox4x32(c0, c1, c2, c3, k0, k1):
    for _ in tl.static_range(_ROUNDS):
        # One widening multiply gives both halves; two 32-bit ones would be two instructions.
        product_a = c0.to(tl.uint64) * _M_A
        product_b = c2.to(tl.uint64) * _M_B
        c0 = (product_b >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = product_b.to(tl.uint32)
        c2 = (product_a >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = product_a.to(tl.uint32)
        k0 = tl.add(k0, _W_A, sanitize_overflow=False)
        k1 = tl.add(k1, _W_B, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def words_of_counter(seed, position, counter, STREAM: tl.constexpr):
    """The words of token ids base, base + 1024, base + 2048 and base + 3072 (base // 1024 % 4 == 0).

    `counter` is base // 4096 * 1024 + base % 1024; `seed` and `position` are int64.
    """
    c0 = counter.to(tl.uint32)
    zero = c0 ^ c0
    c1 = zero + position.to(tl.uint32)
    c2 = zero + (position >> 32).to(tl.uint32)
    return _philox4x32(c0, c1, c2, zero + STREAM, seed.to(tl.uint32), (seed >> 32).to(tl.uint32))


@triton.jit
def word_at(seed, position, token_ids, STREAM: tl.constexpr):
    """The word of each of arbitrary token ids: one call a token, for gathers."""
    w0, w1, w2, w3 = words_of_counter(seed, position, token_ids // 4096 * STRIP + token_ids % STRIP, STREAM)
    which = token_ids // STRIP % 4
    return tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))


@triton.jit
def uniform_of_word(word):
    """(w + 1/2) / 2³², in (0, 1]."""
    return (word.to(tl.float32) + 0.5) * _UNIT


@triton.jit
def _two_artanh(z):
    """2 artanh(z) for |z| below 0.18, by its series."""
    s = z * z
    p = tl.fma(s, 1.0 / 9.0, 1.0 / 7.0)
    p = tl.fma(p, s, 1.0 / 5.0)
    p = tl.fma(p, s, 1.0 / 3.0)
    return 2.0 * tl.fma(p * s, z, z)


@triton.jit
def _log(x):
    """log(x) for normal positive x: m · 2^e with m in [√½, √2), and log(m) = 2 artanh((m − 1) / (m + 1)).

    Half the instructions of the library's logarithm, which also serves 0, ∞ and what lies below normal numbers.
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - _SQRT_HALF) >> 23
    m = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    return tl.fma(exponent.to(tl.float32), _LN_2, _two_artanh((m - 1.0) / (m + 1.0)))


@triton.jit
def gumbel_of_word(word):
    """−log(−log(1 − u)), to one unit in the last place of a score near the noise's upper end.

    1 − u comes from the complement of the word, exactly where u is near 1. Where u is small, −log(1 − u) is
    2 artanh(u / (2 − u)), because 1 − u would have rounded away what makes the noise large.
    """
    u = uniform_of_word(word)
    exponential = tl.where(u < 0.25, _two_artanh(u / (2.0 - u)), -_log(uniform_of_word(~word)))
    return -_log(exponential)


@triton.jit
def uniform_at(seed, position, token_ids, STREAM: tl.constexpr):
    """`uniform` inside a kernel: bit for bit the same values."""
    return uniform_of_word(word_at(seed, position, token_ids, STREAM))


@triton.jit
def gumbel_at(seed, position, token_ids, STREAM: tl.constexpr):
    """`gumbel` inside a kernel: the same words, and values equal to float32's accuracy."""
    return gumbel_of_word(word_at(seed, position, token_ids, STREAM))
