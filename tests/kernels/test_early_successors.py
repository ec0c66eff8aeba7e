"""Chains of launches that let their successors be set up before they have waited."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from _aot import TARGETS, assert_compiles
from tridraft.kernels import _pdl
from tridraft.kernels._pdl import early_successors, pdl_options
from tridraft.kernels.activation import gated_act
from tridraft.kernels.attention import paged_attention
from tridraft.kernels.draft_inputs import update_draft_inputs
from tridraft.kernels.embedding import embed_concat
from tridraft.kernels.kv_cache import qk_norm_rope
from tridraft.kernels.linear import linear, norm_linear
from tridraft.kernels.norm import add_rms_norm

BLOCK_SIZE, CAPACITY, VOCAB = 16, 256, 1000
SHAPES = [(1, 256, 512, 4), (8, 256, 256, 4), (4, 1024, 128, 8)]


class Chain:
    """A draft step as a drafter with its own keys has it: what advances is read early two launches later."""

    def __init__(self, rows: int, hidden: int, head_dim: int, heads: int, device) -> None:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16) * shape[-1] ** -0.5

        blocks = CAPACITY // BLOCK_SIZE
        self.embedding, self.norm = normal(VOCAB, hidden), normal(hidden)
        self.qkv, self.o = normal((heads + 2) * head_dim, 2 * hidden), normal(hidden, heads * head_dim)
        self.gate_up, self.down = normal(8 * hidden, hidden), normal(hidden, 4 * hidden)
        self.inv_freq = 1e4 ** -torch.linspace(0, 1, head_dim // 2, device=device)
        self.k_cache = torch.zeros(rows * blocks, BLOCK_SIZE, 1, head_dim, device=device, dtype=torch.bfloat16)
        self.v_cache = torch.zeros_like(self.k_cache)
        self.table = torch.randperm(rows * blocks, device=device).int().view(rows, blocks)
        self.query_start_loc = torch.arange(rows + 1, device=device, dtype=torch.int32)
        self.idx_mapping = torch.arange(rows, device=device)
        self.first_hidden = normal(rows, hidden)
        self.input_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions, self.seq_lens = self.input_ids.clone(), self.input_ids.int()
        self.slot_mapping = self.input_ids.clone()
        self.heads, self.head_dim = heads, head_dim

    def step(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        update_draft_inputs(
            tokens,
            None,
            self.idx_mapping,
            advance_positions=True,
            max_model_len=CAPACITY,
            input_ids=self.input_ids,
            positions=self.positions,
            seq_lens=self.seq_lens,
            block_table=self.table,
            block_size=BLOCK_SIZE,
            slot_mapping=self.slot_mapping,
        )
        return embed_concat(self.input_ids, self.embedding, hidden)

    def layer(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        qkv = linear(x, self.qkv).view(len(x), -1, self.head_dim)
        q, k, v = qkv.split([self.heads, 1, 1], dim=1)
        caches: Any = {"k_cache": self.k_cache, "v_cache": self.v_cache, "slot_mapping": self.slot_mapping}
        q = qk_norm_rope(q, self.positions, self.inv_freq, k=k, v=v, **caches)
        metadata = (self.table, self.query_start_loc, self.seq_lens)
        options: Any = {"scale": 0.1, "max_query_len": 1, "metadata_ready": True}
        attended = paged_attention(q, self.k_cache, self.v_cache, *metadata, **options).flatten(1)
        merged, stream = norm_linear(linear(attended, self.o), self.norm, self.gate_up, residual=residual)
        return add_rms_norm(linear(gated_act(merged, activation="silu"), self.down), stream, self.norm)[0]

    def run(self, tokens: torch.Tensor, *, early: bool, wait: bool = False) -> torch.Tensor:
        """The hidden states of each step."""
        self.positions.fill_(9)
        self.seq_lens.fill_(10)
        self.k_cache.zero_()
        self.v_cache.zero_()
        hidden, outs = self.first_hidden, []
        for step_tokens in tokens:
            x = self.step(step_tokens, hidden)
            if wait:
                torch.cuda.synchronize()
            with early_successors() if early else nullcontext():
                hidden = self.layer(x, hidden)
            outs.append(hidden)
            if wait:
                torch.cuda.synchronize()
        return torch.stack(outs)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "hidden", "head_dim", "heads"), SHAPES)
def test_steps_see_what_the_launch_before_the_last_wrote(rows, hidden, head_dim, heads, device):
    chain = Chain(rows, hidden, head_dim, heads, device)
    tokens = torch.randint(VOCAB, (40, rows), device=device)
    expected = chain.run(tokens, early=False, wait=True)
    assert expected.isfinite().all()
    assert len(expected.flatten(1).unique(dim=0)) == len(tokens), "every step differs"
    for _ in range(5):
        assert torch.equal(chain.run(tokens, early=True), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = chain.run(tokens, early=True)
    for seed in range(20):
        tokens.copy_(torch.randint(VOCAB, tokens.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        replayed = outs.clone()
        assert torch.equal(replayed, chain.run(tokens, early=False, wait=True)), seed


@pytest.mark.compiled
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_ahead_of_time(target):
    chain = Chain(2, 256, 128, 4, "cpu")

    def call() -> None:
        with early_successors():
            x = linear(chain.first_hidden, chain.o[:, :256], impl="triton")
            add_rms_norm(x, chain.first_hidden, chain.norm, impl="triton")
            q = torch.empty(2, 4, 128, dtype=torch.bfloat16)
            qk_norm_rope(q, chain.positions, chain.inv_freq, impl="triton")
            gated_act(x, activation="silu", impl="triton")

    assert_compiles(call, target)


def test_options(monkeypatch):
    monkeypatch.setattr(_pdl, "INTERPRET", False)
    hopper = TARGETS["sm_90"][1]
    late, early = {"PDL": 1, "launch_pdl": True}, {"PDL": 2, "launch_pdl": True}
    assert pdl_options(hopper) == late
    with early_successors():
        assert pdl_options(hopper) == early
        assert pdl_options(hopper, early=False) == late
        with early_successors():
            pass
        assert pdl_options(hopper) == early
    with pytest.raises(KeyError), early_successors():
        raise KeyError
    assert pdl_options(hopper) == late
    assert pdl_options(hopper, early=True) == early
    for target in ("sm_80", "gfx942"):
        assert pdl_options(TARGETS[target][1], early=True) == {"PDL": 0}
