"""`bench/train_heads.py` in small: what it writes, and that heads draft in decoding what they do in training."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tridraft.models.eagle import Eagle3
from tridraft.models.mtp import MTP
from tridraft.speculator.request import Completion

BENCH = Path(__file__).resolve().parents[2] / "bench"
METHODS = ("eagle3", "mtp")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A smoke run on the CPU: its modules, the arguments of its parts, and the directory it wrote."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        for name in ("_heads", "_head_texts", "train_heads"):
            patch.delitem(sys.modules, name, raising=False)
        script: Any = importlib.import_module("train_heads")
        heads: Any = importlib.import_module("_heads")
        texts: Any = importlib.import_module("_head_texts")
        seen: dict[str, Any] = {"measured": {}, "heads": {}}
        measure, train = script.measure, script.Trainer.train

        def keep_measured(target, method, *arguments):
            result = measure(target, method, *arguments)
            seen["measured"][method] = (target, result[1])
            return result

        def keep_head(self, method, head):
            seen["heads"][method] = head
            return train(self, method, head)

        patch.setattr(script, "measure", keep_measured)
        patch.setattr(script.Trainer, "train", keep_head)
        out = tmp_path_factory.mktemp("heads")
        script.main(["--smoke", "--device", "cpu", "--out", str(out)])
    return SimpleNamespace(script=script, modules=heads, texts=texts, out=out, **seen)


def test_the_record_says_what_was_done(trained):
    record = json.loads((trained.out / "training.json").read_text())
    assert record["texts"] == 192
    release, *_ = record["versions"]["torch"].split("+")  # a build's metadata may leave its "+cu130" out
    assert release == torch.__version__.split("+")[0]
    assert 0.5 < record["draft_vocabulary_share"] < 1
    for method in METHODS:
        facts = record[method]
        assert facts["steps"] == 80
        losses = zip(facts["loss_by_draft"], facts["first_loss_by_draft"], strict=True)
        assert all(last < first - 0.5 for last, first in losses)
        assert facts["bytes"] == (trained.out / method / "model.safetensors").stat().st_size
        assert facts["texts_compared"] == facts["texts_as_transformers"] == 8
        assert facts["acceptance"]["mean_accepted_length"] > 1.2


@pytest.mark.parametrize("method", METHODS)
def test_the_models_load_what_was_trained(trained, method):
    """Every tensor, exactly: a name or a place mixed up shows in no shape."""
    target, _ = trained.measured[method]
    kind: Any = Eagle3 if method == "eagle3" else MTP
    loaded = kind.from_pretrained(trained.out / method, dtype=torch.bfloat16, device="cpu", target=target)
    tensors = trained.heads[method].tensors()
    assert sum(tensor.numel() for tensor in tensors.values()) == sum(
        tensor.numel() for name, tensor in loaded.state_dict().items()
    )
    if method == "eagle3":
        assert torch.equal(loaded.d2t + torch.arange(96), trained.heads[method].ids)
        assert torch.equal(loaded.lm_head_weight, trained.heads[method].lm_head.weight.bfloat16())


@torch.no_grad()
def accepted_in_training(trained, method: str, completion: Completion) -> list[int]:
    """How many drafts each pass accepts, from all chains over the finished text at once, in float32."""
    script, target, head = trained.script, trained.measured[method][0], trained.heads[method]
    for parameter in head.parameters():
        parameter.copy_(parameter.bfloat16())  # as saved
    prompt, output = completion.prompt_ids, completion.output_ids
    ids = torch.tensor([prompt + output])
    depth = len(target.layer_types)
    writer = trained.texts.Writer(target, 1, ids.shape[1] + 1)
    assert writer.aux_layers == (2, depth // 2, depth - 3)
    writer.write([prompt + output], [0.0], 0, 1)
    states = writer.states[:, : ids.shape[1]]
    config = {"head_dim": 64, "rope_theta": target.model.config.rope_parameters["rope_theta"]}
    chains = trained.modules.Chains(config, ids.shape[1] - 1, script.NUM_DRAFTS, torch.device("cpu"))
    outputs = trained.modules.unroll(head, target.embed_weight, ids, states, chains, script.NUM_DRAFTS)
    drafts = torch.stack([head.ids[head.logits(x[0]).argmax(-1)] for x in outputs], dim=1).tolist()
    accepted, end = [], len(prompt) + 1  # tokens known; the newest has no key yet
    while end < ids.shape[1]:
        right = 0
        # no more drafts than leave a place for the target's own token
        for draft in drafts[end - 2][: ids.shape[1] - end - 1]:
            if draft != ids[0, end + right]:
                break
            right += 1
        accepted.append(right)
        end += right + 1
    return accepted


@pytest.mark.parametrize("method", METHODS)
def test_drafting_does_what_training_unrolls(trained, method):
    """The decoder, token by token over pages, accepts in every pass what the parallel chains of training say."""
    completions = trained.measured[method][1]
    assert sum(sum(completion.accepted) for completion in completions) > 20
    for completion in completions:
        if completion.finish_reason == "length":
            assert completion.accepted == accepted_in_training(trained, method, completion)
