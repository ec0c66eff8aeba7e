"""The one home of randomness: a draw is a function of (seed, position, token id, stream) and of nothing else.

Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with 7 rounds, the fewest that
pass BigCrush: sampling is bound by this arithmetic, and 10 rounds would cost 1.4 times as much.

    key     = (seed low, seed high)
    counter = (number, position low, position high, domain)
    a token id's word             output[id % 4]              number = id // 4                     domain = stream
    a group's word, g = id // 8   output[id // 1024 % 4]      number = id // 4096 * 128 + g % 128  domain = stream + 2³¹

A word w becomes the uniform u = (w + 1/2) / 2³², which keeps 32 bits of resolution toward 0.

Gumbel noise is −log of an exponential variable, and the largest sum of logit and noise has the softmax's distribution
(the Gumbel-max trick). The eight exponentials of a group are drawn as a race: the smallest of eight is E ~ Exp(8), any
of them is equally likely to be it, and by memorylessness what each of the others takes longer is Exp(1) again
(Devroye, "Non-Uniform Random Variate Generation", 1986, V.2; Rényi, "On the theory of order statistics", 1953):

    first = group's word % 8        E = −log(1 − (group's word // 8 + 1/2) / 2²⁹) / 8
    noise = −log(E + e)             e = 0 for the group's first, otherwise −log(1 − u) of the id's own word

So one word bounds the noise of eight ids by −log E, and hardly ever is more of them wanted. One call serves four
groups that lie 1,024 ids apart, so a kernel that reads four strips of a row uses all four words where they are, and the
result still does not depend on how a kernel cuts its blocks. Noise lies in (−3.3, 22.9), is never infinite, and has a
resolution of 2⁻³² toward its upper end: of uniforms rounded to 24 bits first, as fp32 generators do, it would end at
16.6 and never draw a token of a long, flat tail.
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

GROUP = tl.constexpr(8)
"""Token ids that race."""

STRIP = tl.constexpr(1024)
"""The four groups of one counter lie this many ids apart."""

_GROUPS_OF_STRIP = tl.constexpr(STRIP.value // GROUP.value)
_OF_GROUPS = tl.constexpr(2**31)
_EIGHTH = tl.constexpr(1 / GROUP.value)

MAX_GUMBEL = tl.constexpr(22.9)
"""No noise reaches this: the largest is −log(−log(1 − 2⁻³⁰) / 8) = 22.874."""


def _words(seeds: Tensor, positions: Tensor, numbers: Tensor, domain: int, which: Tensor) -> Tensor:
    """Word `which` of each call, in int64."""
    low = 0xFFFFFFFF
    seeds, positions, numbers, which = torch.broadcast_tensors(seeds.long(), positions.long(), numbers, which)
    counter = [numbers, positions & low, (positions >> 32) & low, torch.full_like(positions, domain)]
    words = torch.stack(philox(counter, [seeds & low, (seeds >> 32) & low], _ROUNDS.value))
    return words.gather(0, which[None])[0]


def _id_words(seeds: Tensor, positions: Tensor, token_ids: Tensor, stream: int) -> Tensor:
    token_ids = token_ids.long()
    return _words(seeds, positions, token_ids // 4, stream, token_ids % 4)


def _group_words(seeds: Tensor, positions: Tensor, token_ids: Tensor, stream: int) -> Tensor:
    strip, group = token_ids.long() // STRIP.value, token_ids.long() // GROUP.value
    numbers = strip // 4 * _GROUPS_OF_STRIP.value + group % _GROUPS_OF_STRIP.value
    return _words(seeds, positions, numbers, stream + _OF_GROUPS.value, strip % 4)


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
    return (_id_words(seeds, positions, token_ids, stream).float() + 0.5) * 2.0**-32


def gumbel(seeds: Tensor, positions: Tensor, token_ids: Tensor, stream: int) -> Tensor:
    """Standard Gumbel draws, float32, for integer tensors that broadcast."""
    group_words = _group_words(seeds, positions, token_ids, stream)
    shortest = -torch.log1p(-((group_words // 8).double() + 0.5) * 2.0**-29) / GROUP.value
    u = (_id_words(seeds, positions, token_ids, stream).double() + 0.5) * 2.0**-32
    longer = torch.where(group_words % 8 == token_ids % GROUP.value, 0.0, -torch.log1p(-u))
    return -torch.log(shortest + longer).float()


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
def _words_of_number(seed, position, number, DOMAIN: tl.constexpr):
    """The four words of a call; `seed` and `position` are int64."""
    c0 = number.to(tl.uint32)
    zero = c0 ^ c0
    c1 = zero + position.to(tl.uint32)
    c2 = zero + (position >> 32).to(tl.uint32)
    return _philox4x32(c0, c1, c2, zero + DOMAIN, seed.to(tl.uint32), (seed >> 32).to(tl.uint32))


@triton.jit
def _select(which, w0, w1, w2, w3):
    return tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))


@triton.jit
def words_of_ids(seed, position, number, STREAM: tl.constexpr):
    """The words of token ids 4 · number to 4 · number + 3."""
    return _words_of_number(seed, position, number, STREAM)


@triton.jit
def words_of_groups(seed, position, number, STREAM: tl.constexpr):
    """The words of four groups, 1,024 ids apart: of those of ids base, base + 1024, base + 2048 and base + 3072.

    Where base // 1024 % 4 is 0; `number` is base // 4096 * 128 + base // 8 % 128.
    """
    return _words_of_number(seed, position, number, STREAM + _OF_GROUPS)


@triton.jit
def word_at(seed, position, token_ids, STREAM: tl.constexpr):
    """The word of each of arbitrary token ids: one call a token, for gathers."""
    w0, w1, w2, w3 = words_of_ids(seed, position, token_ids // 4, STREAM)
    return _select(token_ids % 4, w0, w1, w2, w3)


@triton.jit
def group_word_at(seed, position, token_ids, STREAM: tl.constexpr):
    """The word of the group of each of arbitrary token ids."""
    strip = token_ids // STRIP
    number = strip // 4 * _GROUPS_OF_STRIP + token_ids // GROUP % _GROUPS_OF_STRIP
    w0, w1, w2, w3 = words_of_groups(seed, position, number, STREAM)
    return _select(strip % 4, w0, w1, w2, w3)


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
def _exponential(u, complement):
    """−log(1 − u), to float32's relative accuracy wherever it lies.

    `complement` is 1 − u, exact where u is near 1. Where u is small, −log(1 − u) is 2 artanh(u / (2 − u)), because
    1 − u would have rounded away what makes the noise large.
    """
    return tl.where(u < 0.25, _two_artanh(u / (2.0 - u)), -_log(complement))


@triton.jit
def _group_uniform(word):
    """(w // 8 + 1/2) / 2²⁹."""
    return ((word >> 3).to(tl.float32) + 0.5) * (8 * _UNIT)


@triton.jit
def race(group_word):
    """(E, place of the first): the shortest exponential of the group and whose it is."""
    return _exponential(_group_uniform(group_word), _group_uniform(~group_word)) * _EIGHTH, group_word % 8


@triton.jit
def gumbel_of(shortest, first, place, word):
    """−log(E + e), to one unit in the last place of a score near the noise's upper end."""
    longer = _exponential(uniform_of_word(word), uniform_of_word(~word))
    return -_log(shortest + tl.where(place == first, 0.0, longer))


@triton.jit
def _minus_log_bound(x):
    """At least −log(x), by at most 0.06: the bits of a float are its binary logarithm, at most 0.0861 too small."""
    return x.to(tl.int32, bitcast=True).to(tl.float32) * (-(2.0**-23) * _LN_2) + 127 * _LN_2


@triton.jit
def group_bound(group_word):
    """At least the noise of any of the group, but for rounding: −log(E) ≤ −log(u / 8), because −log(1 − u) ≥ u."""
    return _minus_log_bound(_group_uniform(group_word) * _EIGHTH)


@triton.jit
def id_bound(group_word, place, word):
    """At least the noise of an id, but for rounding: E + e is at least the sum of their uniforms."""
    longer = tl.where(place == group_word % 8, 0.0, uniform_of_word(word))
    return _minus_log_bound(_group_uniform(group_word) * _EIGHTH + longer)


@triton.jit
def uniform_at(seed, position, token_ids, STREAM: tl.constexpr):
    """`uniform` inside a kernel: bit for bit the same values."""
    return uniform_of_word(word_at(seed, position, token_ids, STREAM))


@triton.jit
def gumbel_at(seed, position, token_ids, STREAM: tl.constexpr):
    """`gumbel` inside a kernel: the same words, and values equal to float32's accuracy. Two calls a token."""
    shortest, first = race(group_word_at(seed, position, token_ids, STREAM))
    return gumbel_of(shortest, first, token_ids % GROUP, word_at(seed, position, token_ids, STREAM))
