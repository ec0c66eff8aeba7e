"""The paged KV cache: one pool of blocks for each kind of layer, one block table a pool.

Layers whose keys have the same shape and window form a group. They share a block table and a free list, while each
keeps tensors of its own, so block 7 of a group is block 7 in all of its layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tridraft.kernels._op import cdiv
from tridraft.models.paged import KVSpec, LayerKV

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class KVCache:
    """Blocks for every layer that owns keys and values.

    Args:
        specs: the shape of each owning layer's keys, in layer order.
        num_blocks: blocks in each group.
        block_size: tokens a block holds.
        max_num_reqs: request slots.
        max_model_len: the longest request, in tokens.
        dtype: of the keys and values. An fp8 cache gets one scale a layer for each, 1 until it is set.
        device: where everything lives.

    Attributes:
        layers: one `LayerKV` for each spec. A draft layer that reads a target layer's keys holds that same object.
        tables: for each group `[max_num_reqs, M]` int32, blocks of each slot in order; -1 where none is reserved.
    """

    def __init__(
        self,
        specs: Sequence[KVSpec],
        *,
        num_blocks: int,
        block_size: int,
        max_num_reqs: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        for name, size in (
            ("num_blocks", num_blocks),
            ("block_size", block_size),
            ("max_num_reqs", max_num_reqs),
            ("max_model_len", max_model_len),
        ):
            if size < 1:
                raise ValueError(f"{name}: got {size}, needs at least 1")
        if not specs:
            raise ValueError("specs: got none, needs one for each layer that owns keys")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len

        kinds = list(dict.fromkeys(specs))
        shape = (max_num_reqs, cdiv(max_model_len, block_size))
        self.tables = tuple(torch.full(shape, -1, dtype=torch.int32, device=device) for _ in kinds)
        # Lowest block first, so that a run is reproducible down to its addresses.
        self._free = [list(range(num_blocks - 1, -1, -1)) for _ in kinds]
        self._reserved: list[list[list[int]]] = [[[] for _ in range(max_num_reqs)] for _ in kinds]

        def layer(spec: KVSpec) -> LayerKV:
            size = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
            scales = [torch.ones(1, device=device) if dtype in _FP8 else None for _ in range(2)]
            # Zeros rather than `empty`: a NaN in a block nobody wrote survives a multiplication by a masked-out 0.
            caches = [torch.zeros(size, dtype=dtype, device=device) for _ in range(2)]
            return LayerKV(caches[0], caches[1], scales[0], scales[1], kinds.index(spec))

        self.layers = [layer(spec) for spec in specs]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of each group that `num_tokens` tokens of one request take."""
        return cdiv(num_tokens, self.block_size)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that every group still has."""
        return min(len(free) for free in self._free)

    def reserve(self, slot: int, num_tokens: int) -> None:
        """Give `slot` blocks for its first `num_tokens` tokens in every group, keeping those it has.

        Raises:
            ValueError: the tokens pass `max_model_len`.
            RuntimeError: a group has too few free blocks; nothing was reserved.
        """
        if num_tokens > self.max_model_len:
            raise ValueError(f"num_tokens: got {num_tokens}, max_model_len is {self.max_model_len}")
        missing = self.blocks_for(num_tokens) - len(self._reserved[0][slot])
        if missing <= 0:
            return
        if missing > self.num_free_blocks:
            raise RuntimeError(
                f"{num_tokens} tokens need {missing} more blocks of {self.block_size} and {self.num_free_blocks} are "
                f"free: raise num_blocks (now {self.num_blocks}) or run fewer requests at once"
            )
        for table, free, reserved in zip(self.tables, self._free, self._reserved, strict=True):
            start = len(reserved[slot])
            blocks = [free.pop() for _ in range(missing)]
            reserved[slot] += blocks
            table[slot, start : start + missing] = torch.tensor(blocks, dtype=torch.int32)

    def free(self, slot: int) -> None:
        """Take back every block of `slot`."""
        for table, free, reserved in zip(self.tables, self._free, self._reserved, strict=True):
            free.extend(reversed(reserved[slot]))
            reserved[slot] = []
            table[slot].fill_(-1)

    def block_tables(
        self, idx_mapping: Tensor, out: Sequence[Tensor] | None = None, groups: Sequence[int] | None = None
    ) -> tuple[Tensor, ...]:
        """Each group's table by row: `[R, M]` int32 for the slots in `idx_mapping`.

        Padding rows (-1) get some slot's blocks; their sequence length of 0 keeps them from being read. With `out`,
        the tables of `groups` (None: all) are written there.
        """
        slots = idx_mapping.clamp(min=0)
        if out is None:
            return tuple(table.index_select(0, slots) for table in self.tables)
        for group in range(len(self.tables)) if groups is None else groups:
            torch.index_select(self.tables[group], 0, slots, out=out[group])
        return tuple(out)
