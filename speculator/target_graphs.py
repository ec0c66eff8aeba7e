"""The target's verify pass in CUDA graphs: what a decoding loop runs most, at the price of a replay.

A pass of a `transformers` model is a thousand launches from Python. Passes in which every request has at most K + 1
tokens are captured by their number of requests; others, which have prompts among them, run as they are.
"""

import logging

import torch
from torch import Tensor

from tridraft.kernels.draft_inputs import compute_slot_mapping
from tridraft.kernels.pad_requests import pad_requests
from tridraft.models.hf_target import HFTarget, TargetOutput
from tridraft.models.paged import AttentionBatch
from tridraft.speculator.batch import InputBatch
from tridraft.speculator.cudagraph import Bucket, PrefillSpeculatorCudaGraphManager, capture_graphs
from tridraft.speculator.kv_cache import KVCache

logger = logging.getLogger(__name__)


class TargetGraphs:
    """Captured verify passes.

    Args:
        target: the model.
        kv: the cache it writes.
        aux_layers: layers whose inputs a drafter wants.
        max_query_len: tokens of one request in a verify pass, K + 1.
    """

    def __init__(self, target: HFTarget, kv: KVCache, *, aux_layers: tuple[int, ...], max_query_len: int) -> None:
        self.target = target
        self.kv = kv
        self.aux_layers = aux_layers
        reqs, device = kv.max_num_reqs, target.device

        tokens = reqs * max_query_len

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._input_ids = zeros(tokens, dtype=torch.int64)
        self._positions = zeros(tokens, dtype=torch.int64)
        self._query_start_loc = zeros(reqs + 1)
        self._seq_lens = zeros(reqs)
        self._idx_mapping = zeros(reqs) - 1
        self._tables = tuple(torch.zeros_like(table) for table in kv.tables)
        # One set for all sizes: what a graph returns would have to stay, and no graph find its memory in the pool.
        self._logits = zeros(tokens, target.vocab_size, dtype=target.dtype)
        self._hidden = zeros(tokens, target.hidden_size, dtype=target.dtype)
        self._aux_hidden = tuple(torch.zeros_like(self._hidden) for _ in aux_layers)
        self.manager = PrefillSpeculatorCudaGraphManager.of_verify(
            self._run, device, max_num_reqs=reqs, max_query_len=max_query_len, num_steps=(0,)
        )

    def capture(self) -> None:
        """Capture every size; a model that cannot be captured is left to run without, with one logged line."""
        self._run(self.manager.buckets[-1])  # what fails here is no matter of capture
        try:
            capture_graphs((self.manager,), self.target.device)
        except RuntimeError as error:
            logger.warning("the target runs without CUDA graphs: %s", error)

    def forward(self, batch: InputBatch) -> TargetOutput | None:
        """The pass with logits of every token, valid until the next call; None if no captured size holds it."""
        bucket = self.manager.find(Bucket(batch.num_tokens, batch.num_reqs, batch.max_query_len, 0))
        if bucket is None:
            return None
        tokens, reqs, count = bucket.num_tokens, bucket.num_reqs, batch.num_tokens
        for buffer, values in ((self._input_ids, batch.input_ids), (self._positions, batch.positions)):
            buffer[:count].copy_(values)
            buffer[count:tokens].zero_()
        pad_requests(
            batch.query_start_loc,
            batch.seq_lens,
            batch.idx_mapping,
            out_query_start_loc=self._query_start_loc[: reqs + 1],
            out_seq_lens=self._seq_lens[:reqs],
            out_idx_mapping=self._idx_mapping[:reqs],
        )
        self.manager.replay(bucket)
        aux = tuple(hidden[:count] for hidden in self._aux_hidden) or None
        return TargetOutput(self._logits[:count], self._hidden[:count], aux)

    def _run(self, bucket: Bucket) -> None:
        tokens, reqs = bucket.num_tokens, bucket.num_reqs
        positions, query_start_loc = self._positions[:tokens], self._query_start_loc[: reqs + 1]
        idx_mapping = self._idx_mapping[:reqs]
        tables = self.kv.block_tables(idx_mapping, [table[:reqs] for table in self._tables])
        slot_mappings = tuple(
            compute_slot_mapping(
                positions,
                query_start_loc,
                table,
                self.kv.block_size,
                idx_mapping=idx_mapping,
                max_model_len=self.kv.max_model_len,
            )
            for table in tables
        )
        batch = AttentionBatch(query_start_loc, self._seq_lens[:reqs], tables, slot_mappings, bucket.max_query_len)
        rows = torch.arange(tokens, device=positions.device)
        output = self.target.forward(
            self._input_ids[:tokens], positions, self.kv.layers, batch, rows, aux_layers=self.aux_layers
        )
        self._logits[:tokens].copy_(output.logits)
        self._hidden[:tokens].copy_(output.hidden)
        for kept, hidden in zip(self._aux_hidden, output.aux_hidden or (), strict=True):
            kept[:tokens].copy_(hidden)
