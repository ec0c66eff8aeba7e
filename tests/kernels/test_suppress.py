"""Suppressed tokens: validated once, −inf in place."""

import numpy
import pytest
import torch

from _aot import TARGETS, assert_compiles
from tridraft.kernels.suppress import make_suppress_ids, suppress_tokens_

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("bad", [[10], [-1], [True], [1.0], ["1"], [None], list(range(10)), [*range(10), 3]], ids=str)
def test_c2_bad_ids_are_refused_at_load(bad):
    with pytest.raises(ValueError, match="token_ids"):
        make_suppress_ids(bad, 10, "cpu")


@pytest.mark.parametrize(
    ("ids", "expected"),
    [([7, 7], [7]), ([0], [0]), ((9, 2), [2, 9]), ([numpy.int64(4)], [4]), (list(range(9)), [*range(9)])],
)
def test_make_suppress_ids(ids, expected, device):
    made = make_suppress_ids(ids, 10, device)
    assert made is not None
    assert made.tolist() == expected
    assert (made.dtype, made.device) == (torch.int64, device)


@pytest.mark.parametrize("nothing", [None, [], ()])
def test_nothing_to_suppress(nothing):
    assert make_suppress_ids(nothing, 10, "cpu") is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ids", [[3], [0, 9_999], [7, 7], list(range(100, 200))], ids=["one", "ends", "twice", "many"])
def test_suppress_tokens(ids, dtype, impl, device):
    wide = torch.randn(4, 10_007, device=device).to(dtype)
    logits, before = wide[:, 4:10_004], wide.clone()
    result = suppress_tokens_(logits, torch.tensor(ids, device=device), impl=impl)
    assert result is logits
    before[:, torch.tensor(ids, device=device) + 4] = float("-inf")
    assert torch.equal(wide, before)


def test_no_ids_and_no_rows_do_nothing(impl, device):
    none = torch.empty(0, dtype=torch.int64, device=device)
    assert torch.equal(suppress_tokens_(torch.ones(2, 5, device=device), none, impl=impl).cpu(), torch.ones(2, 5))
    assert suppress_tokens_(torch.ones(0, 5, device=device), none + 1, impl=impl).shape == (0, 5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": torch.zeros(5)}, ValueError, "logits"),
        ({"logits": torch.zeros(5, 2).T}, ValueError, "logits"),
        ({"logits": torch.zeros(2, 5, dtype=torch.int64)}, TypeError, "logits"),
        ({"token_ids": [1]}, TypeError, "token_ids"),
        ({"token_ids": torch.tensor([1], dtype=torch.int32)}, TypeError, "token_ids"),
        ({"token_ids": torch.tensor(1)}, ValueError, "token_ids"),
        ({"impl": "cuda"}, ValueError, "impl"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    arguments = {"logits": torch.zeros(2, 5), "token_ids": torch.tensor([1]), "impl": "auto"}
    with pytest.raises(error, match=message):
        suppress_tokens_(**{**arguments, **change})


@pytest.mark.parametrize("logits", [torch.zeros(3, 16), torch.zeros(2, 40)[:, 3:35]], ids=["contiguous", "view"])
@pytest.mark.compiled
def test_opcheck(logits, device):
    args = (logits.to(device), torch.tensor([1, 5], device=device), device.type == "cuda")
    torch.library.opcheck(torch.ops.tridraft.suppress_tokens_.default, args)


@pytest.mark.compiled
def test_compiles_into_a_full_graph(device, monkeypatch):
    monkeypatch.undo()  # Dynamo cannot trace a poisoned torch.empty

    def masked(logits, ids):
        return suppress_tokens_(logits * 2, ids).softmax(-1)

    logits, ids = torch.randn(3, 8, device=device), torch.tensor([2, 6], device=device)
    compiled = torch.compile(masked, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(logits, ids), masked(logits, ids))


@pytest.mark.compiled
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_aot(dtype, target):
    logits, ids = torch.zeros(2, 64, dtype=dtype), torch.tensor([1, 2])
    assert_compiles(lambda: suppress_tokens_(logits, ids, impl="triton"), target)


@pytest.mark.gpu
def test_c1_first_call_is_inside_a_capture(device):
    logits = torch.zeros(4, 262_144, device=device, dtype=torch.bfloat16)
    ids = make_suppress_ids([258_883, 258_882], 262_144, device)
    assert ids is not None
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            suppress_tokens_(logits, ids)
        logits.copy_(torch.randn(4, 262_144, device=device))
        fresh = logits.clone()
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    fresh[:, 258_882:258_884] = float("-inf")
    assert torch.equal(logits, fresh)


@pytest.mark.gpu
def test_rows_beyond_two_to_the_31st_element(device):
    logits = torch.zeros(8_200, 262_144, device=device, dtype=torch.bfloat16)
    suppress_tokens_(logits, torch.tensor([262_143], device=device))
    assert logits[-1, -1] == float("-inf")
    assert logits.isinf().sum(dim=1).eq(1).all()
