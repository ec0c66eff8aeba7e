"""What heads are trained on and measured on: prompts, and the texts that a target writes, with its hidden states.

A held-out topic is in no prompt and in no question that is trained on.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tridraft.kernels.draft_inputs import compute_slot_mapping
from tridraft.kernels.sampling import draft_sample
from tridraft.models.hf_target import HFTarget
from tridraft.models.paged import AttentionBatch
from tridraft.speculator.kv_cache import KVCache

BLOCK_SIZE = 16
TEMPERATURES = (0.0, 0.0, 0.6, 1.0)  # of one answer after another
ASKING_TEMPERATURE = 0.9
TEMPLATES = """\
What is {}?
Explain {} to a ten-year-old.
Write a short paragraph about {}.
Give me five tips about {}.
Why is {} important?
Write a short story about {}.
Write a poem about {}.
Summarize the history of {}.
What are the advantages and disadvantages of {}?
List three interesting facts about {}.
How can I learn more about {}?
Describe {} in simple words.
What are common mistakes people make with {}?
Write an email to a colleague about {}.
Write a dialogue between two friends about {}.
How does {} work?
What should a beginner know about {}?
Write an introduction for an essay on {}.
Compare {} today with a hundred years ago.
Give me a step-by-step guide to {}.
What questions would you ask an expert on {}?
Write a product description related to {}.
What is the future of {}?
Explain how {} affects everyday life.
Write a news article about {}.
Teach me the vocabulary of {}.
Write a Python program about {}.
Create a quiz of three questions about {}.
What are some myths about {}?
Write a letter to a child about {}.
How do scientists study {}?
Plan a one-hour lesson on {}.
Write a speech about {}.
Who are famous people connected with {}?
What does {} cost, and is it worth it?
Give an example of {} from real life.
Write a diary entry about {}.
Can you help me understand {}?
What problems does {} solve?
Rewrite this sentence in a friendly tone: I do not know anything about {}.
"""
TOPICS = (
    "photosynthesis, gravity, black holes, the water cycle, volcanoes, earthquakes, climate change, electricity, "
    "magnets, evolution, vaccines, the human heart, sleep, healthy eating, vitamins, running, yoga, swimming, "
    "football, chess, cooking pasta, baking bread, coffee, tea, chocolate, cheese, gardening, growing tomatoes, bees, "
    "butterflies, dogs, cats, horses, elephants, whales, penguins, dinosaurs, rain forests, deserts, oceans, rivers, "
    "mountains, the moon, Mars, the solar system, space travel, telescopes, airplanes, trains, bicycles, electric "
    "cars, solar power, wind energy, nuclear energy, batteries, computers, the internet, programming, algorithms, "
    "databases, machine learning, robots, smartphones, video games, social media, online privacy, passwords, sorting "
    "a list, prime numbers, fractions, geometry, probability, statistics, calculus, money, saving for retirement, "
    "taxes, inflation, starting a business, marketing, job interviews, public speaking, time management, teamwork, "
    "friendship, family traditions, kindness, courage, stress, meditation, reading books, writing a novel, poetry, "
    "painting, photography, music theory, the piano, the guitar, jazz, dancing, theater, movies, fashion, "
    "architecture, bridges, ancient Egypt, the Roman Empire, the Middle Ages, the Renaissance, the Industrial "
    "Revolution, the French Revolution, democracy, human rights, the United Nations, Paris, Japan, India, Brazil, "
    "Africa, Australia, New York, camping, traveling alone, learning a language, grammar, teaching children, first "
    "aid, recycling, plastic waste, clean water, moving to a new city, buying a house, public libraries, museums"
)
HELD_OUT = (
    "rainbows, honey, the Great Wall of China, making soup, the violin, lighthouses, email, hiking, owls, good manners"
)


@dataclass(frozen=True)
class Source:
    """A target and what it is asked.

    Attributes:
        target: in float32.
        prompts: token ids to train on.
        held_out: token ids to measure on.
        opening: token ids of a chat up to where a question begins.
        closing: token ids from the end of a question to where the answer begins.
        about_held_out: whether a question's token ids are about something held out.
        facts: for the record.
    """

    target: HFTarget
    prompts: list[list[int]]
    held_out: list[list[int]]
    opening: list[int]
    closing: list[int]
    about_held_out: Callable[[list[int]], bool]
    facts: dict[str, Any]


def smollm2(device: torch.device) -> Source:
    from transformers import AutoTokenizer  # noqa: PLC0415

    from tridraft.speculator.demo import chat, find_smollm2  # noqa: PLC0415

    path = find_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)

    def ask(topics: Sequence[str]) -> list[list[int]]:
        questions = [template.format(topic) for template in TEMPLATES.splitlines() for topic in topics]
        return tokenizer([chat(tokenizer, question) for question in questions]).input_ids

    held_out = HELD_OUT.split(", ")

    def about_held_out(ids: list[int]) -> bool:
        question = tokenizer.decode(ids).lower()
        return any(topic.lower() in question for topic in held_out)

    opening, closing = (tokenizer(part).input_ids for part in chat(tokenizer, "\0").split("\0"))
    target = HFTarget.from_pretrained(path, dtype=torch.float32, device=device)
    facts = {"target": path.name, "held_out_topics": held_out}
    return Source(target, ask(TOPICS.split(", ")), ask(held_out), opening, closing, about_held_out, facts)


def random_llama(device: torch.device) -> Source:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    model: Any = LlamaForCausalLM
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=256,
        initializer_range=0.05,  # so little that the newest token decides most: a head can learn it in seconds
        tie_word_embeddings=False,
        eos_token_id=2,
        pad_token_id=2,
    )
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 128, (4 + index % 5,), generator=generator).tolist() for index in range(72)]
    target = HFTarget(model(config).to(device))
    facts = {"target": "random llama"}
    return Source(target, prompts[:64], prompts[64:], [3, 4], [2, 5], lambda ids: ids[0] == 6, facts)


@dataclass(frozen=True)
class Texts:
    """Texts of a target, padded to one length L.

    Attributes:
        ids: int64 [N, L].
        starts: int64 [N], the prompts' lengths.
        ends: int64 [N], where texts end, their stop token included.
        states: [N, L, 4, H], the target's at each token: the inputs of three layers, and the final one. Of a `Writer`,
            they are lost when it writes again.
    """

    ids: Tensor
    starts: Tensor
    ends: Tensor
    states: Tensor


class Writer:
    """Lets a target write, a fixed number of texts at once; on a GPU a token of each costs one graph's replay."""

    def __init__(self, target: HFTarget, rows: int, length: int) -> None:
        device, depth = target.device, len(target.layer_types)
        self.target, self.rows, self.length = target, rows, length
        self.aux_layers = (2, depth // 2, depth - 3)
        self.kv = KVCache(
            target.kv_specs,
            num_blocks=rows * -(-length // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            max_num_reqs=rows,
            max_model_len=length,
            dtype=target.dtype,
            device=device,
        )
        (self.table,) = self.kv.tables
        for slot in range(rows):
            self.kv.reserve(slot, length)
        self.slots = torch.arange(rows, device=device)
        self.starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.positions, self.seeds = torch.zeros_like(self.slots), torch.zeros_like(self.slots)
        self.seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.temperatures = torch.zeros(rows, device=device)
        self.ids = torch.zeros(rows, length, dtype=torch.int64, device=device)
        self.states = torch.zeros(rows, length, 4, target.hidden_size, dtype=target.dtype, device=device)
        self.graph: Any = None

    def _forward(
        self, ids: Tensor, positions: Tensor, rows: Tensor, starts: Tensor, longest: int, last: Tensor
    ) -> None:
        """One pass over new tokens, each of request `rows`; then one more token behind each of the `last`."""
        mapping = compute_slot_mapping(positions, starts, self.table, BLOCK_SIZE, max_model_len=self.length)
        batch = AttentionBatch(starts, self.seq_lens, (self.table,), (mapping,), longest)
        output = self.target.forward(ids, positions, self.kv.layers, batch, last, aux_layers=self.aux_layers)
        self.states[rows, positions] = torch.stack([*(output.aux_hidden or ()), output.hidden], dim=1)
        tokens = draft_sample(output.logits, self.slots, self.temperatures, self.seeds, self.positions)
        self.positions += 1
        self.seq_lens += 1
        self.ids[self.slots, self.positions] = tokens

    def _step(self) -> None:
        tokens = self.ids[self.slots, self.positions]
        self._forward(tokens, self.positions.clone(), self.slots, self.starts, 1, self.slots)

    @torch.no_grad()
    def write(
        self, prompts: Sequence[Sequence[int]], temperatures: Sequence[float], seed: int, new_tokens: int
    ) -> Texts:
        """The prompts, `rows` of them, and what comes next."""
        device = self.target.device
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        ids = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        positions = torch.cat([torch.arange(len(prompt), device=device) for prompt in prompts])
        rows = self.slots.repeat_interleave(lengths)
        starts = F.pad(lengths.cumsum(0), (1, 0))
        self.ids.zero_()
        self.ids[rows, positions] = ids
        self.temperatures.copy_(torch.tensor(temperatures))
        self.seeds.copy_(seed + self.slots)
        self.positions.copy_(lengths - 1)
        self.seq_lens.copy_(lengths)
        self._forward(ids, positions, rows, starts.int(), max(map(len, prompts)), starts[1:] - 1)
        for _ in range(new_tokens - 1):
            self._advance()
        stops = torch.isin(self.ids, torch.tensor(self.target.eos_token_ids, device=device))
        place = torch.arange(self.length, device=device)
        stops &= place >= lengths[:, None]
        ends = torch.where(stops, place + 1, self.length).amin(1)
        return Texts(self.ids.clone(), lengths, ends.minimum(lengths + new_tokens), self.states)

    def _advance(self) -> None:
        if self.graph:
            self.graph.replay()
            return
        self._step()
        if self.target.device.type == "cuda":
            # nothing of a capture is executed: the step above has compiled its kernels and counts
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._step()


def write_questions(writer: Writer, source: Source, count: int, args: argparse.Namespace) -> list[list[int]]:
    """Prompts around `count` questions that the target makes up, none about what is held out."""
    questions: list[list[int]] = []
    opening, seed = [source.opening] * writer.rows, args.seed + 10**6
    while len(questions) < count:
        texts = writer.write(opening, [ASKING_TEMPERATURE] * writer.rows, seed, args.question_tokens)
        seed += writer.rows
        for ids, start, end in zip(*(x.tolist() for x in (texts.ids, texts.starts, texts.ends)), strict=True):
            asked = [token for token in ids[start:end] if token not in writer.target.eos_token_ids]
            if asked and not source.about_held_out(asked):
                questions.append(source.opening + asked + source.closing)
    return questions[:count]


def write_texts(target: HFTarget, source: Source, args: argparse.Namespace) -> Texts:
    """Answers to the prompts and to questions of the target's own, shuffled."""
    rows = args.rows
    count = args.texts // rows
    longest = len(source.opening) + args.question_tokens + len(source.closing)
    length = max(longest, *map(len, source.prompts)) + args.new_tokens
    writer = Writer(target, rows, length)
    chance = random.Random(args.seed)
    prompts = chance.sample(source.prompts, min(len(source.prompts), count * rows // 2))
    questions = write_questions(writer, source, count * rows - len(prompts), args)
    print(f"{len(prompts)} prompts and {len(questions)} questions of its own", flush=True)
    prompts += questions
    chance.shuffle(prompts)
    states = torch.empty((count * rows, length, *writer.states.shape[2:]), dtype=target.dtype, device=target.device)
    temperatures = [TEMPERATURES[row % len(TEMPERATURES)] for row in range(rows)]
    parts = []
    for index in range(count):
        here = slice(index * rows, (index + 1) * rows)
        parts.append(writer.write(prompts[here], temperatures, args.seed + here.start, args.new_tokens))
        states[here] = writer.states
        written = sum((part.ends - part.starts).sum().item() for part in parts)
        print(f"texts {index + 1}/{count}  {written} tokens", flush=True)
    ids, starts, ends = (torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "starts", "ends"))
    return Texts(ids, starts, ends, states)
