"""Trains the built-in pair `models/tiny_gemma4`: a byte-level Gemma 4 target and its assistant.

The text is the standard library's own sources, found next to the Python that runs this; `HELD_OUT` names the files that
are kept for evaluation. Three steps, the first on a GPU (about three minutes on an H200), the others anywhere:

    python bench/train_tiny_pair.py train --out DIR        two safetensors files and training.json
    python bench/train_tiny_pair.py package --trained DIR  adds configs and tokenizer: the checkpoints that ship
    python bench/train_tiny_pair.py check                  both checkpoints against transformers, position by position

The target learns to predict the next byte. The assistant then learns to predict the *target's* choices, on library text
and on the target's own greedy continuations of it, in the regime it is used in: K steps unrolled with its own fed-back
hidden state, every position of a sequence at once. Ctrl-C ends the phase that is running and goes on with the next.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _tiny_pair import (
    BOS,
    EOS,
    MAX_LENGTH,
    PAD,
    VOCAB_SIZE,
    Assistant,
    AssistantConfig,
    Cache,
    KVStates,
    Rotary,
    Target,
    TargetConfig,
    Visibility,
    assistant_config_json,
    cluster_tokens,
    shift_keys,
    target_config_json,
)
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

PACKAGE = Path(__file__).resolve().parent.parent / "models" / "tiny_gemma4"
NUM_DRAFTS = 4
HELD_OUT = (
    "calendar.py",
    "colorsys.py",
    "concurrent/futures/thread.py",
    "fractions.py",
    "heapq.py",
    "html/parser.py",
    "json/decoder.py",
    "queue.py",
    "sched.py",
    "shlex.py",
    "string.py",
    "textwrap.py",
    "urllib/robotparser.py",
    "wsgiref/headers.py",
    "xml/dom/pulldom.py",
    "zipapp.py",
)
# Not on every machine (test, tkinter …), not part of the library, or tables of numbers (encodings).
EXCLUDED = {
    *("__pycache__", "dist-packages", "distutils", "encodings", "ensurepip", "idlelib", "lib2to3", "site-packages"),
    *("test", "tests", "tkinter", "turtledemo"),
}


@dataclass(frozen=True)
class Corpus:
    """Token streams (bytes, EOS after every file) and what they were made of."""

    train: Tensor
    held_out: dict[str, Tensor]
    facts: dict[str, Any]


def read_corpus(device: torch.device) -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [
        path.relative_to(root)
        for path in sorted(root.rglob("*.py"))
        if not EXCLUDED & set(path.relative_to(root).parts)
        and not path.relative_to(root).parts[0].startswith("config-")
    ]
    digest = hashlib.sha256()
    streams: dict[str, Tensor] = {}
    for name in names:
        content = (root / name).read_bytes()
        digest.update(content)
        tokens = torch.tensor([*content, EOS], dtype=torch.int64)
        streams[name.as_posix()] = tokens.to(device)
    held_out = {name: streams.pop(name) for name in HELD_OUT if name in streams}
    train = torch.cat(list(streams.values()))
    if train.numel() < 4_000_000 or len(held_out) < len(HELD_OUT):
        sys.exit(f"{root} holds {train.numel()} bytes of training text: this Python came without its sources")
    facts = {
        "text": f"the standard library of Python {platform.python_version()}",
        "train_files": len(streams),
        "train_bytes": train.numel() - len(streams),
        "held_out_files": list(held_out),
        "held_out_bytes": sum(stream.numel() - 1 for stream in held_out.values()),
        "sha256": digest.hexdigest(),
    }
    return Corpus(train, held_out, facts)


def random_crops(stream: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """[batch, length] crops of the stream, each behind a BOS as a prompt would be."""
    starts = torch.randint(stream.numel() - length, (batch, 1), generator=generator, device=stream.device)
    return F.pad(stream[starts + torch.arange(length - 1, device=stream.device)], (1, 0), value=BOS)


class Phase:
    """A training loop that lasts `seconds`: Muon for the matrices of the layers, AdamW for everything else."""

    def __init__(self, name: str, model: nn.Module, seconds: float, muon_lr: float, adam_lr: float) -> None:
        self.name, self.seconds = name, seconds
        matrices, rest = [], []
        for parameter_name, parameter in model.named_parameters():
            hidden = parameter.ndim == 2 and "embed" not in parameter_name and "centroids" not in parameter_name
            (matrices if hidden else rest).append(parameter)
        self.parameters = [*matrices, *rest]
        self.optimizers = [
            torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.01),
            torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.peaks = (muon_lr, adam_lr)

    def run(self, loss_of_batch: Callable[[], Tensor], tokens_per_batch: int) -> dict[str, Any]:
        started = reported = time.monotonic()
        steps, loss, running = 0, math.nan, None
        try:
            while (elapsed := time.monotonic() - started) < self.seconds:
                done = elapsed / self.seconds
                # Rise over the first 20 steps, stay, and fall linearly over the last 60 % of the time.
                factor = min(1.0, (steps + 1) / 20, max(0.02, (1 - done) / 0.6))
                for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
                    optimizer.param_groups[0]["lr"] = peak * factor
                batch_loss = loss_of_batch()
                batch_loss.backward()
                nn.utils.clip_grad_norm_(self.parameters, 1.0)
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                steps += 1
                detached = batch_loss.detach()
                running = detached if running is None else torch.lerp(running, detached, 0.05)
                if time.monotonic() - reported > 5:
                    reported, loss = time.monotonic(), running.item()
                    rate = steps * tokens_per_batch / (reported - started)
                    progress = f"{reported - started:5.0f} s  step {steps:5d}  loss {loss:.4f}  {rate:.3g} tokens/s"
                    print(self.name, progress, flush=True)
        except KeyboardInterrupt:
            print(f"{self.name}: interrupted after {steps} steps", flush=True)
        loss = math.nan if running is None else running.item()
        elapsed = time.monotonic() - started
        return {
            "steps": steps,
            "tokens": steps * tokens_per_batch,
            "seconds": round(elapsed, 1),
            "train_loss": round(loss, 4),
        }


class Trainer:
    """Holds the pair and everything that depends on device, dtype and sequence length."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.device = torch.device(args.device)
        self.generator = torch.Generator(self.device).manual_seed(args.seed)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.args = args
        self.target = Target(TargetConfig()).to(self.device)
        self.assistant = Assistant(AssistantConfig()).to(self.device)
        self.rotary = Rotary(MAX_LENGTH, self.device)
        self.window = self.target.config.sliding_window

    def target_visibility(self, length: int) -> Visibility:
        return Visibility(length, self.window, self.window, 0, self.device)

    def assistant_visibility(self, length: int) -> Visibility:
        return Visibility(length, self.window, self.window + 1, 1, self.device)

    def train_target(self, stream: Tensor) -> dict[str, Any]:
        length = self.args.length
        batch = self.args.batch_tokens // length
        visibility = self.target_visibility(length)

        def loss_of_batch() -> Tensor:
            ids = random_crops(stream, batch, length + 1, self.generator)
            hidden, _ = self.target(ids[:, :-1], self.rotary, visibility, self.dtype)
            return F.cross_entropy(self.target.logits(hidden).flatten(0, 1), ids[:, 1:].flatten())

        return Phase("target", self.target, self.args.target_seconds, 0.02, 4e-3).run(loss_of_batch, batch * length)

    @torch.no_grad()
    def bits_per_byte(self, streams: dict[str, Tensor]) -> float:
        length = self.args.length
        visibility = self.target_visibility(length)
        bits, count = 0.0, 0
        for stream in streams.values():
            padding = -stream.numel() % (length - 1)
            rows = F.pad(stream, (0, padding), value=-100).view(-1, length - 1)
            for row in rows.split(16):
                ids = F.pad(row.clamp(min=0), (1, 0), value=BOS)
                hidden, _ = self.target(ids, self.rotary, visibility, self.dtype)
                nll = F.cross_entropy(self.target.logits(hidden[:, :-1]).flatten(0, 1), row.flatten(), reduction="sum")
                bits += nll.item() / math.log(2)
            count += stream.numel()
        return bits / count

    @torch.no_grad()
    def continue_greedily(self, prompts: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """The prompts [B, a multiple of the window] and the target's greedy continuation up to `length`."""
        prompt_length = prompts.shape[1]
        cache = Cache()
        hidden, _ = self.target(prompts, self.rotary, self.target_visibility(prompt_length), dtype, cache)
        room = length - prompt_length
        cache.keys = [F.pad(keys, (0, 0, 0, room)) for keys in cache.keys]
        cache.values = [F.pad(values, (0, 0, 0, room)) for values in cache.values]
        ids = F.pad(prompts, (0, room), value=PAD)
        last = hidden[:, -1]
        for position in range(prompt_length, length):
            ids[:, position] = self.target.logits(last).argmax(-1)
            if position + 1 < length:
                last = self.target.decode(ids[:, position], self.rotary, cache, dtype)
        return ids

    def own_text(self, stream: Tensor) -> Tensor:
        """Library text continued by the target, from a quarter of the length on."""
        length = self.args.draft_length
        pool = []
        for _ in range(self.args.own_rows // self.args.own_batch):
            prompts = random_crops(stream, self.args.own_batch, length // 4, self.generator)
            pool.append(self.continue_greedily(prompts, length, self.dtype))
        return torch.cat(pool)

    def unroll(
        self, ids: Tensor, hidden: Tensor, shared: KVStates, visibility: Visibility, *, greedy: bool = False
    ) -> list[Tensor]:
        """The K draft steps of every row P of ids [B, T]; row P starts from bonus token x_P and h_{P−1}.

        Step s reads token x_{P+s} and gives the post-norm state [B, T, d]. With `greedy` it reads the draft of step
        s − 1 instead and gives its own [B, T].
        """
        shared = shift_keys(shared)
        tokens = ids
        fed_back = F.pad(hidden, (0, 0, 1, 0))[:, :-1]
        outputs = []
        for step in range(NUM_DRAFTS):
            if not greedy:
                tokens = F.pad(ids[:, step:], (0, step), value=PAD)
            embedded = self.target.embed(tokens, hidden.dtype)
            x, fed_back = self.assistant.step(embedded, fed_back, shared, self.rotary, visibility)
            if greedy:
                tokens = self.assistant.draft(x)
            outputs.append(tokens if greedy else x)
        return outputs

    def train_assistant(self, stream: Tensor, own: Tensor) -> dict[str, Any]:
        length = self.args.draft_length
        batch = self.args.draft_batch_tokens // length
        target_visibility, visibility = self.target_visibility(length), self.assistant_visibility(length)
        ordering = cluster_tokens(self.target.model.embed_tokens.weight.detach(), self.assistant.config.num_centroids)
        self.assistant.masked_embedding.set_ordering(ordering)
        cluster = self.assistant.cluster_of_token()
        library_rows = batch // 3

        def loss_of_batch() -> Tensor:
            picked = torch.randint(own.shape[0], (batch - library_rows,), generator=self.generator, device=self.device)
            ids = torch.cat([random_crops(stream, library_rows, length, self.generator), own[picked]])
            with torch.no_grad():
                hidden, shared = self.target(ids, self.rotary, target_visibility, self.dtype)
                logits = self.target.logits(hidden)
                probs, choice = logits.softmax(-1), logits.argmax(-1)
            losses = []
            for step, states in enumerate(self.unroll(ids, hidden, shared, visibility)):
                # Row 0 has no h_{−1}; step s of row P is judged by the target's choice at P + s.
                x = states[:, 1 : length - step]
                wanted, wanted_probs = choice[:, 1 + step :], probs[:, 1 + step :]
                log_probs = self.assistant.logits(x).log_softmax(-1)
                soft = -(wanted_probs * log_probs).sum(-1).mean()
                hard = F.nll_loss(log_probs.flatten(0, 1), wanted.flatten())
                centroid = F.cross_entropy(self.assistant.centroid_logits(x).flatten(0, 1), cluster[wanted].flatten())
                losses.append((soft + hard) / 2 + 0.5 * centroid)
            return torch.stack(losses).mean()

        return Phase("assistant", self.assistant, self.args.draft_seconds, 0.02, 4e-3).run(
            loss_of_batch, batch * length
        )

    @torch.no_grad()
    def acceptance(
        self, streams: dict[str, Tensor], prompts_per_file: int, prompt_length: int, new_tokens: int
    ) -> dict[str, Any]:
        """Greedy speculative decoding of held-out prompts, K drafts a pass, in fp32.

        The target's greedy text decides what is accepted, so it is generated first, the drafts of every position of it
        are made at once, and a pass then jumps from bonus token to bonus token.
        """
        crops = []
        for stream in streams.values():
            room = stream.numel() - prompt_length
            for index in range(prompts_per_file):
                start = room * index // prompts_per_file
                crops.append(F.pad(stream[start : start + prompt_length - 1], (1, 0), value=BOS))
        length = prompt_length + new_tokens
        ids = self.continue_greedily(torch.stack(crops), length, torch.float32)
        target_visibility, visibility = self.target_visibility(length), self.assistant_visibility(length)
        by_count = [0] * (NUM_DRAFTS + 1)
        for rows in ids.split(64):
            hidden, shared = self.target(rows, self.rotary, target_visibility, torch.float32)
            drafts = torch.stack(self.unroll(rows, hidden, shared, visibility, greedy=True), -1)
            following = F.pad(rows, (0, NUM_DRAFTS), value=-1).unfold(1, NUM_DRAFTS, 1)[:, 1 : length + 1]
            matches = (drafts == following).long().cumprod(-1).sum(-1).tolist()
            for row, accepted in zip(rows.tolist(), matches, strict=True):
                end = next((i for i in range(prompt_length, length) if row[i] == EOS), length - 1)
                position = prompt_length
                while position + NUM_DRAFTS < end:
                    by_count[accepted[position]] += 1
                    position += accepted[position] + 1
        passes = sum(by_count)
        return {
            "num_speculative_tokens": NUM_DRAFTS,
            "prompts": len(crops),
            "prompt_tokens": prompt_length,
            "new_tokens": new_tokens,
            "target_passes": passes,
            "mean_accepted_length": round(sum((n + 1) * count for n, count in enumerate(by_count)) / max(passes, 1), 4),
            "acceptance_by_position": [round(sum(by_count[n:]) / max(passes, 1), 4) for n in range(1, NUM_DRAFTS + 1)],
        }


def round_weights(model: nn.Module) -> dict[str, Tensor]:
    """The state dict as it is saved, bf16; the model goes on with the rounded values."""
    state = {
        name: tensor.detach().bfloat16().cpu().contiguous() if tensor.is_floating_point() else tensor.cpu()
        for name, tensor in model.state_dict().items()
    }
    model.load_state_dict(state)
    return state


def train(args: argparse.Namespace) -> None:
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    started = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args)
    corpus = read_corpus(trainer.device)
    print(f"{corpus.facts['train_bytes']} bytes to train on, {corpus.facts['held_out_bytes']} held out", flush=True)
    if args.target is not None:
        trainer.target.load_state_dict(load_file(args.target / "target.safetensors"))
        record = json.loads((args.target / "training.json").read_text())["target"]
    else:
        record = {
            "parameters": sum(p.numel() for p in trainer.target.parameters()),
            **trainer.train_target(corpus.train),
        }
    trainer.target.requires_grad_(False)
    save_file(round_weights(trainer.target), args.out / "target.safetensors", {"format": "pt"})
    if args.target is None:
        record["held_out_bits_per_byte"] = round(trainer.bits_per_byte(corpus.held_out), 4)
    _write_json(args.out / "training.json", {"target": record})
    print(f"target: {json.dumps(record)}", flush=True)

    own = trainer.own_text(corpus.train)
    print(f"{own.numel()} tokens of the target's own text at {time.monotonic() - started:.0f} s", flush=True)
    draft_record = {"parameters": sum(p.numel() for p in trainer.assistant.parameters())}
    draft_record |= trainer.train_assistant(corpus.train, own)
    save_file(round_weights(trainer.assistant), args.out / "assistant.safetensors", {"format": "pt"})
    print(f"assistant: {json.dumps(draft_record)}", flush=True)

    acceptance = trainer.acceptance(corpus.held_out, args.eval_prompts, 2 * trainer.window, args.eval_tokens)
    print(f"acceptance: {json.dumps(acceptance)}", flush=True)
    name = torch.cuda.get_device_name(trainer.device) if trainer.device.type == "cuda" else "CPU"
    everything = {
        "seed": args.seed,
        "torch": torch.__version__,
        "device": name,
        "data": corpus.facts,
        "target": record,
        "assistant": draft_record,
        "acceptance": acceptance,
        "wall_seconds": round(time.monotonic() - started, 1),
    }
    _write_json(args.out / "training.json", everything)
    print(f"done in {everything['wall_seconds']} s: {args.out}", flush=True)


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer without merges: byte b is id b, and a BOS goes in front."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors  # noqa: PLC0415

    # ByteLevel spells bytes as printable characters: the printable ones as themselves, the others from U+0100 on.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    spelling = {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={spelling[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<pad>", "<eos>", "<bos>")]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", "<bos> $A <bos> $B", [("<bos>", BOS)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "bos_token": "<bos>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
    }
    _write_json(directory / "tokenizer_config.json", settings)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def package(args: argparse.Namespace) -> None:
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    configs = {"target": target_config_json(TargetConfig()), "assistant": assistant_config_json(AssistantConfig())}
    generation = {"target": ids, "assistant": {**ids, "num_assistant_tokens": NUM_DRAFTS}}
    for name, config in configs.items():
        directory = args.out / name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "model.safetensors").write_bytes((args.trained / f"{name}.safetensors").read_bytes())
        _write_json(directory / "config.json", config)
        _write_json(directory / "generation_config.json", generation[name])
    write_tokenizer(args.out / "target")
    (args.out / "training.json").write_bytes((args.trained / "training.json").read_bytes())
    for path in sorted(args.out.rglob("*.*")):
        print(f"{path.stat().st_size:9d} {path}")


@torch.no_grad()
def check(args: argparse.Namespace) -> None:
    """The shipped files in transformers and in the models above must agree, in fp32, at lengths around the window."""
    from safetensors.torch import load_file  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma4AssistantForCausalLM  # noqa: PLC0415

    hub_target = AutoModelForCausalLM.from_pretrained(args.out / "target", dtype=torch.float32).eval()
    hub_assistant = Gemma4AssistantForCausalLM.from_pretrained(args.out / "assistant", dtype=torch.float32).eval()
    target, assistant = Target(TargetConfig()), Assistant(AssistantConfig())
    for name, model in (("target", target), ("assistant", assistant)):
        model.load_state_dict(load_file(args.out / name / "model.safetensors"))
    text = Path(__file__).read_text()[:1000]
    ids = AutoTokenizer.from_pretrained(args.out / "target")(text, return_tensors="pt").input_ids[:, :256]
    window, length, device = target.config.sliding_window, ids.shape[1], torch.device("cpu")
    rotary = Rotary(length, device)
    hidden, shared = target(ids, rotary, Visibility(length, window, window, 0, device), torch.float32)
    torch.testing.assert_close(hub_target(ids).logits, target.logits(hidden), atol=2e-3, rtol=1e-3)

    shifted, visibility = shift_keys(shared), Visibility(length, window, window + 1, 1, device)
    fed_back = F.pad(hidden, (0, 0, 1, 0))[:, :-1]
    states: dict[int, Tensor] = {p: hidden[:, p - 1 : p] for p in (1, 2, window, window + 1, window + 2, 200)}
    for step in range(NUM_DRAFTS):
        tokens = F.pad(ids[:, step:], (0, step), value=PAD)
        x, fed_back = assistant.step(target.embed(tokens, torch.float32), fed_back, shifted, rotary, visibility)
        for position, state in states.items():
            embedded = hub_target.get_input_embeddings()(tokens[:, position : position + 1])
            keys_values = {name: tuple(t[:, None, :position] for t in pair) for name, pair in shared.items()}
            out = hub_assistant(
                inputs_embeds=torch.cat([embedded, state], -1),
                position_ids=torch.tensor([[position]]),
                shared_kv_states=keys_values,
                use_cache=False,
            )
            states[position] = out.last_hidden_state
            torch.testing.assert_close(out.last_hidden_state[0, 0], fed_back[0, position], atol=2e-3, rtol=1e-3)
            seen = out.logits[0, 0] > out.logits[0, 0].min()
            torch.testing.assert_close(
                out.logits[0, 0, seen], assistant.logits(x)[0, position, seen], atol=2e-3, rtol=1e-3
            )
            if out.logits[0, 0].argmax() != assistant.draft(x)[0, position]:
                raise AssertionError(f"drafts differ at position {position}, step {step}")
    print(f"target and assistant agree with transformers ({VOCAB_SIZE} logits, {NUM_DRAFTS} steps)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="train|package|check")
    command = commands.add_parser("train", help="train both models")
    command.set_defaults(run=train)
    command.add_argument("--out", type=Path, required=True, help="directory for the weights and training.json")
    command.add_argument("--target", type=Path, help="directory of an earlier run whose target is kept")
    command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--target-seconds", type=float, default=90)
    command.add_argument("--draft-seconds", type=float, default=75)
    command.add_argument("--length", type=int, default=1024, help="tokens of a target training sequence")
    command.add_argument("--draft-length", type=int, default=768, help="tokens of an assistant training sequence")
    command.add_argument("--batch-tokens", type=int, default=48 * 1024, help="tokens of a target training batch")
    command.add_argument("--draft-batch-tokens", type=int, default=24 * 1024, help="the same for the assistant")
    command.add_argument("--own-rows", type=int, default=4096, help="sequences of the target's own text")
    command.add_argument("--own-batch", type=int, default=2048, help="how many of them at once")
    command.add_argument("--eval-prompts", type=int, default=16, help="held-out prompts per file")
    command.add_argument("--eval-tokens", type=int, default=256, help="tokens generated for each")
    command = commands.add_parser("package", help="write the checkpoint directories")
    command.set_defaults(run=package)
    command.add_argument("--trained", type=Path, required=True, help="what `train --out` wrote")
    command.add_argument("--out", type=Path, default=PACKAGE)
    command = commands.add_parser("check", help="compare the checkpoints with transformers")
    command.set_defaults(run=check)
    command.add_argument("--out", type=Path, default=PACKAGE)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
