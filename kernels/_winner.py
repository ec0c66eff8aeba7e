"""Where programs that share a row meet: one 64-bit maximum of (score, lowest id first) and a count of arrivals.

The key holds the score above, as an integer that orders as the float does, and the complement of the id below, so its
maximum is the rule of `_argmax.py`, and no order of arrival can change it. The last program to arrive holds the row's
winner: no launch only to reduce. A kernel before must have called `open_meeting`.
"""

# Kernels are Triton, not Python: what they return are tensors, which a Python checker denies.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

import triton
import triton.language as tl

from tridraft.kernels._argmax import lowest_eligible

_NOTHING = tl.constexpr(-(2**63))  # no score above −inf yet
_ONLY_NAN = tl.constexpr(-(2**63) + 1)  # the same, and one was NaN; still below every score's key
_LOW_WORD = tl.constexpr(2**32 - 1)


@triton.jit
def order_key(values):
    """int32 that orders as the float does, with both zeros equal."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def open_meeting(best_ptrs, arrivals_ptrs, mask=None):
    """Make meeting places ready; in a launch before the one that meets there."""
    tl.store(best_ptrs, _NOTHING, mask=mask)
    tl.store(arrivals_ptrs, 0, mask=mask)


@triton.jit
def nothing():
    """The key of no candidates."""
    return tl.full((), _NOTHING, tl.int64)


@triton.jit
def winner_key(scores, ids, mask, AXIS: tl.constexpr = 0):
    """The key of the best of a block of candidates, along an axis."""
    keys = (order_key(scores).to(tl.int64) << 32) + (_LOW_WORD - ids.to(tl.int64))
    keys = tl.where(scores > float("-inf"), keys, tl.where(scores == float("-inf"), _NOTHING, _ONLY_NAN))
    return tl.max(tl.where(mask, keys, _NOTHING), axis=AXIS)


@triton.jit
def meet(key, index, num_programs, best_ptr, arrivals_ptr):
    """(whether this is the last of `num_programs` to arrive, the winner's key if it is)."""
    tl.atomic_max(best_ptr + index, key, sem="relaxed")  # ordered by the arrival, of the same thread
    last = tl.atomic_add(arrivals_ptr + index, 1) == num_programs - 1
    winner = key
    if last:
        winner = tl.atomic_max(best_ptr + index, key)
    return last, winner


@triton.jit
def winning_token(key, suppress_ptr, num_suppressed, vocab_size):
    """(the token a winner's key stands for, whether NaN left it without a candidate)."""
    token = _LOW_WORD - (key & _LOW_WORD)
    if key <= _ONLY_NAN:
        token = lowest_eligible(suppress_ptr, num_suppressed, None, vocab_size).to(tl.int64)
    return token, key == _ONLY_NAN


@triton.jit
def winning_tokens(keys, suppress_ptr, num_suppressed, vocab_size):
    """`winning_token` of a block of keys."""
    tokens = _LOW_WORD - (keys & _LOW_WORD)
    without = keys <= _ONLY_NAN
    if tl.max(without.to(tl.int32), axis=0) > 0:
        lowest = lowest_eligible(suppress_ptr, num_suppressed, None, vocab_size)
        tokens = tl.where(without, lowest, tokens)
    return tokens, keys == _ONLY_NAN
