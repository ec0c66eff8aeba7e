"""A minimal paged cache for tests of models: scattered blocks, other block tables for each group."""

from collections.abc import Sequence

import torch

from tridraft.models.paged import AttentionBatch, KVSpec, LayerKV

BLOCK = 4


class PagedCache:
    """Blocks for `num_requests` requests of at most `max_len` tokens; blocks start as NaN, so a stray read shows."""

    def __init__(self, specs: Sequence[KVSpec], num_requests: int, max_len: int, *, dtype, device) -> None:
        kinds = list(dict.fromkeys(specs))
        blocks = -(-max_len // BLOCK)
        generator = torch.Generator().manual_seed(7)
        self.device = device
        self.tables = []
        for _ in kinds:
            shuffled = torch.randperm(num_requests * blocks, generator=generator)
            self.tables.append(shuffled.view(num_requests, blocks).int().to(device))
        self.layers = []
        for spec in specs:
            shape = (num_requests * blocks, BLOCK, spec.num_kv_heads, spec.head_dim)
            k_cache, v_cache = (torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in "kv")
            self.layers.append(LayerKV(k_cache, v_cache, None, None, kinds.index(spec)))

    def batch(self, lengths: Sequence[int], new: Sequence[int]) -> tuple[AttentionBatch, torch.Tensor]:
        """A pass that adds `new` tokens to requests of `lengths` tokens, and those tokens' positions."""
        ranges = [range(length, length + count) for length, count in zip(lengths, new, strict=True)]
        positions = torch.tensor([position for one in ranges for position in one], device=self.device)
        rows = torch.tensor([row for row, one in enumerate(ranges) for _ in one], device=self.device)
        slots = tuple(table[rows, positions // BLOCK].long() * BLOCK + positions % BLOCK for table in self.tables)
        return (
            AttentionBatch(
                query_start_loc=self._starts(new),
                seq_lens=torch.tensor([one.stop for one in ranges], dtype=torch.int32, device=self.device),
                block_tables=tuple(self.tables),
                slot_mappings=slots,
                max_query_len=max(new),
            ),
            positions,
        )

    def draft_batch(self, lengths: Sequence[int], rows: Sequence[int] | None = None) -> AttentionBatch:
        """One query for each of the requests `rows` (all) over its `lengths` keys; nothing is written."""
        rows = range(len(lengths)) if rows is None else rows
        return AttentionBatch(
            query_start_loc=self._starts([1] * len(lengths)),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=self.device),
            block_tables=tuple(table[list(rows)] for table in self.tables),
            slot_mappings=None,
            max_query_len=1,
        )

    def _starts(self, counts: Sequence[int]) -> torch.Tensor:
        return torch.tensor(
            [sum(counts[:index]) for index in range(len(counts) + 1)], dtype=torch.int32, device=self.device
        )
