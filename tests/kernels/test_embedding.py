"""Scaled embeddings beside hidden states."""

import pytest
import torch

from _aot import TARGETS, assert_compiles
from _compare import ROUNDING
from _variants import variants
from conftest import INTERPRET
from tridraft.kernels.embedding import embed_concat

DTYPES = [torch.float32, torch.float16] + ([] if INTERPRET else [torch.bfloat16])
CPU = torch.device("cpu")


def inputs(tokens, embedding, hidden, device, dtype=torch.float32, ids=torch.int64):
    """Random ids of a vocabulary of 50, its embedding, hidden states."""
    weight, states = torch.randn(50, embedding), torch.randn(tokens, hidden)
    return torch.randint(0, 50, (tokens,)).to(device, ids), weight.to(device, dtype), states.to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "embedding", "hidden"), [(1, 1, 1), (3, 96, 64), (5, 1024, 1025), (2, 1536, 1536)])
def test_every_cell(tokens, embedding, hidden, dtype, impl, device):
    """Hidden states to the bit; embeddings are float64's product, rounded."""
    ids, weight, states = inputs(tokens, embedding, hidden, device, dtype, torch.int32)
    scale = 39.25
    out = embed_concat(ids, weight, states, scale=scale, impl=impl)
    assert out.dtype == dtype
    assert torch.equal(out[:, embedding:], states)
    exact = weight.double()[ids.long()] * scale
    assert ((out[:, :embedding].double() - exact).abs() <= ROUNDING[dtype] * 2 * exact.abs()).all()


def test_strides(impl, device):
    ids, weight, states = inputs(4, 24, 40, device)
    wide_weight, wide_states = (
        torch.full((50, 60), torch.nan, device=device),
        torch.full((8, 70), torch.nan, device=device),
    )
    wide_weight[:, 10:34], wide_states[::2, 3:43] = weight, states
    buffer = torch.full((4, 100), 7.0, device=device)
    out = embed_concat(ids, wide_weight[:, 10:34], wide_states[::2, 3:43], scale=2.0, out=buffer[:, 5:69], impl=impl)
    assert out.data_ptr() == buffer[:, 5:69].data_ptr()
    assert torch.equal(out, torch.cat((2 * weight[ids], states), dim=1))
    assert (buffer[:, :5] == 7).all()
    assert (buffer[:, 69:] == 7).all()


def test_no_tokens(impl, device):
    assert embed_concat(*inputs(0, 8, 4, device), impl=impl).shape == (0, 12)


def test_refusals_name_the_argument(device):
    ids, weight, states = inputs(3, 8, 4, device)
    with pytest.raises(TypeError, match="input_ids: got float32, needs int32 or int64"):
        embed_concat(ids.float(), weight, states)
    with pytest.raises(TypeError, match="hidden: got float16, needs float32"):
        embed_concat(ids, weight, states.half())
    with pytest.raises(ValueError, match=r"hidden: got shape \[2, 4\], needs \[3, H\]"):
        embed_concat(ids, weight, states[:2])
    with pytest.raises(ValueError, match=r"weight: got shape \[8\], needs \[V, E\]"):
        embed_concat(ids, weight[0], states)
    with pytest.raises(ValueError, match=r"out: got shape \[3, 11\], needs \[3, 12\]"):
        embed_concat(ids, weight, states, out=torch.zeros(3, 11, device=device))
    with pytest.raises(ValueError, match=r"weight: got strides \[1, 50\], needs a contiguous last dimension"):
        embed_concat(ids, weight.t().contiguous().t(), states)


@pytest.mark.compiled
def test_opcheck_and_full_graph(device, monkeypatch):
    monkeypatch.undo()  # Dynamo would remember the poisoned torch.empty
    ids, weight, states = inputs(3, 8, 4, device)
    out = torch.zeros(3, 12, device=device)
    operation = torch.ops.tridraft.embed_concat.default
    torch.library.opcheck(operation, (ids, weight, states, 2.0, out, device.type == "cuda"))
    compiled = torch.compile(lambda: embed_concat(ids, weight, states, scale=2.0), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(), torch.cat((2 * weight[ids], states), dim=1))


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_ahead_of_time(target, dtype):
    assert_compiles(lambda: embed_concat(*inputs(3, 1536, 1536, CPU, dtype), scale=39.25), target)


@pytest.mark.compiled
def test_the_batch_reaches_no_variant():
    seen = [variants(lambda n=n: embed_concat(*inputs(n, 96, 96, CPU))) for n in (1, 2, 16, 33)]
    assert all(one == seen[0] for one in seen)


@pytest.mark.gpu
def test_captured_at_its_first_call(device):
    ids, weight, states = inputs(3, 2048, 1536, device, torch.bfloat16)
    graph, out = torch.cuda.CUDAGraph(), torch.zeros(3, 3584, device=device, dtype=torch.bfloat16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            embed_concat(ids, weight, states, scale=2.0, out=out)
        ids.add_(1).remainder_(50)
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, torch.cat((2 * weight[ids], states), dim=1))


@pytest.mark.gpu
def test_offsets_past_2_to_31(device):
    weight = torch.zeros(2**21 + 1, 1024, device=device, dtype=torch.bfloat16)
    weight[-1] = 3.0
    states = torch.ones(1, 8, device=device, dtype=torch.bfloat16)
    out = embed_concat(torch.tensor([2**21], device=device), weight, states)
    assert (out[:, :1024] == 3).all()
