"""What an attention layer needs from a paged cache, and what it gets.

A cache is made of blocks of `block_size` tokens. Layers whose heads and window agree form a group; the requests
have one block table per group, and every layer of the group finds token `t` of a request in its own block
`block_table[request, t // block_size]`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tridraft.kernels.attention import paged_attention


@dataclass(frozen=True)
class KVSpec:
    """The keys and values one layer stores for each token.

    Attributes:
        head_dim: width of a key and of a value head.
        num_kv_heads: key and value heads.
        sliding_window: tokens a query sees, itself included; None sees all.
    """

    head_dim: int
    num_kv_heads: int
    sliding_window: int | None


@dataclass
class LayerKV:
    """The cache of one layer. Layers that share keys and values share this object.

    Attributes:
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim], keys after their norm and rotary embedding.
        v_cache: [num_blocks, block_size, num_kv_heads, head_dim].
        k_scale: f32 [1] or [num_kv_heads], what a stored key is multiplied by; None for unquantised caches.
        v_scale: the same for values.
        group: index of the layer's block table and slot mapping in an `AttentionBatch`.
    """

    k_cache: Tensor
    v_cache: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    group: int


@dataclass(frozen=True)
class AttentionBatch:
    """The requests of one forward pass, packed without padding between them: R requests, T tokens.

    Attributes:
        query_start_loc: int32 [R + 1], first token of each request; padding requests repeat the last value.
        seq_lens: int32 [R], keys of each request once this pass's are written; 0 for padding requests.
        block_tables: for each group, int32 [R, M].
        slot_mappings: for each group, int64 [T], where a token's key is written, −1 for nowhere; None: no writes.
        max_query_len: no request has more tokens in this pass.
        attention: what draft layers attend with, called as `paged_attention` is, `metadata_ready` included.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: tuple[Tensor, ...]
    slot_mappings: tuple[Tensor, ...] | None
    max_query_len: int
    attention: Callable[..., Tensor] = paged_attention
