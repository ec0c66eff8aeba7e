"""The decoding loop: ragged prompts in, streams of tokens out.

Every pass packs what each running request has to compute next, a chunk of its prompt or its newest token with the
drafts after it, into one forward of the target; verifies all drafts on the device; drafts again; and then reads the
emitted tokens back in one transfer. Without a speculator the same loop is plain decoding: a verify row has no drafts.
On a GPU the forward of a pass without prompts, and drafting, are replays of CUDA graphs captured at the start.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tridraft.kernels._draft_inputs_reference import request_of_row
from tridraft.kernels._op import cdiv
from tridraft.kernels.draft_inputs import compute_slot_mapping
from tridraft.kernels.rejection import rejection_sample
from tridraft.models.hf_target import HFTarget, TargetOutput
from tridraft.models.paged import AttentionBatch
from tridraft.speculator.base import BaseSpeculator
from tridraft.speculator.batch import InputBatch, SamplingState, VerifyResult
from tridraft.speculator.kv_cache import KVCache
from tridraft.speculator.request import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    Chunk,
    Completion,
    FinishReason,
    Request,
    Statistics,
)
from tridraft.speculator.target_graphs import TargetGraphs
from tridraft.speculator.truncation import truncate


@dataclass
class _Running:
    """A request in a slot.

    Attributes:
        index: its place among the requests.
        request: what was asked.
        slot: where it runs.
        stop: tokens that end it.
        limit: the length, prompt included, at which it ends.
        computed: tokens whose keys are in the cache and stay there.
        num_output: tokens emitted.
    """

    index: int
    request: Request
    slot: int
    stop: frozenset[int]
    limit: int
    computed: int = 0
    num_output: int = 0


@dataclass(frozen=True)
class _Row:
    """What one request computes in a pass.

    Attributes:
        running: the request.
        num_tokens: from position `running.computed` on.
        num_drafts: how many of those, at the end, are drafts.
        verifies: it starts at the newest token; otherwise it is a chunk of the prompt.
        samples: it emits tokens: all but a chunk with more prompt after it.
    """

    running: _Running
    num_tokens: int
    num_drafts: int
    verifies: bool
    samples: bool


@dataclass(frozen=True)
class _Packed:
    """A pass on the device.

    Attributes:
        batch: its tokens.
        slots: `[R]` int64, `batch.idx_mapping` for indexing.
        logits_rows: `[N]` int64, the tokens whose logits are wanted.
        logits_start: `[R + 1]` int32, where each row's logits begin.
    """

    batch: InputBatch
    slots: Tensor
    logits_rows: Tensor
    logits_start: Tensor


class _Clock:
    """Times between marks, without waiting for the device when they are set."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        if self._cuda:
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """The time between consecutive marks; on a GPU, once the last has passed."""
        if self._cuda:
            return [start.elapsed_time(end) / 1000 for start, end in pairwise(self._events)]
        return [end - start for start, end in pairwise(self._times)]


class SpeculativeDecoder:
    """Continues prompts with the target's own text, several tokens a target pass where drafts are accepted.

    A request is admitted when a slot and the blocks for all it may become are free, so that it never has to give
    way later; others wait in order.

    Args:
        target: the model whose text it is.
        speculator: with its draft model loaded for this target; gets its cache here and, on a GPU, captures its graphs.
            None decodes plainly.
        max_num_reqs: requests that run at once; None: the speculator's, or 8.
        max_model_len: the longest request, prompt included, at most what the target can; None: the speculator's, or
            4,096 or what the target can.
        num_blocks: blocks of the cache in each of its groups; None gives every slot a request of full length.
        block_size: tokens a block holds.
        max_num_batched_tokens: tokens of one target pass, longer prompts are computed in chunks; None: the
            speculator's, or 2,048.

    Raises:
        ValueError: a size that the target or the speculator cannot have; the first two must be the speculator's.
    """

    def __init__(
        self,
        target: HFTarget,
        speculator: BaseSpeculator | None = None,
        *,
        max_num_reqs: int | None = None,
        max_model_len: int | None = None,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_num_batched_tokens: int | None = None,
    ) -> None:
        steps = speculator.num_speculative_tokens if speculator else 0
        most = speculator.max_num_batched_tokens if speculator else None
        if max_num_reqs is None:
            max_num_reqs = (speculator and speculator.max_num_reqs) or 8
        if max_model_len is None:
            max_model_len = (speculator and speculator.max_model_len) or min(4096, target.max_position_embeddings)
        if max_num_batched_tokens is None:
            max_num_batched_tokens = most or max(2048, max_num_reqs * (steps + 1))
        if max_model_len > target.max_position_embeddings:
            raise ValueError(
                f"max_model_len: got {max_model_len}, the target ends at {target.max_position_embeddings} tokens"
            )
        if max_num_batched_tokens < max_num_reqs * (steps + 1):
            raise ValueError(
                f"max_num_batched_tokens: got {max_num_batched_tokens}, {max_num_reqs} requests with {steps} drafts "
                f"each need {max_num_reqs * (steps + 1)}"
            )
        if most is not None and most < max_num_batched_tokens:
            raise ValueError(f"max_num_batched_tokens: got {max_num_batched_tokens}, the speculator takes {most}")
        if block_size < 1:
            raise ValueError(f"block_size: got {block_size}, needs at least 1")
        self.target = target
        self.speculator = speculator
        self.max_num_batched_tokens = max_num_batched_tokens
        self.kv = KVCache(
            [*target.kv_specs, *(speculator.kv_specs if speculator else ())],
            num_blocks=max_num_reqs * cdiv(max_model_len, block_size) if num_blocks is None else num_blocks,
            block_size=block_size,
            max_num_reqs=max_num_reqs,
            max_model_len=max_model_len,
            dtype=target.dtype,
            device=target.device,
        )
        if speculator:
            speculator.set_kv_cache(self.kv)
        self._target_graphs: TargetGraphs | None = None
        if target.device.type == "cuda":
            aux_layers = tuple(speculator.aux_layers) if speculator else ()
            self._target_graphs = TargetGraphs(target, self.kv, aux_layers=aux_layers, max_query_len=steps + 1)
            self._target_graphs.capture()
        if speculator:
            speculator.capture()
        self.stats = Statistics()

        device = target.device
        self._steps = steps
        self._sampling = SamplingState(
            temperature=torch.zeros(max_num_reqs, device=device),
            seeds=torch.zeros(max_num_reqs, dtype=torch.int64, device=device),
        )
        self._top_k = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self._top_p = torch.ones(max_num_reqs, device=device)
        # By slot, what a request's next pass may start from: its newest token and the drafts after it.
        self._last_sampled = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self._drafts = torch.zeros(max_num_reqs, steps, dtype=torch.int64, device=device)
        self._next_prefill_tokens = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self._free_slots = list(range(max_num_reqs - 1, -1, -1))
        self._streaming = False

    def generate(
        self, requests: Sequence[Request], on_chunk: Callable[[Chunk], None] | None = None
    ) -> list[Completion]:
        """Run every request to its end.

        Args:
            requests: any number; those that do not fit at once wait.
            on_chunk: called with each pass's new tokens as they come.

        Returns:
            One completion a request, in order. `stats` holds the counts.
        """
        completions = [Completion(list(request.prompt_ids)) for request in requests]
        for chunk in self.stream(requests):
            completion = completions[chunk.index]
            completion.output_ids += chunk.token_ids
            if chunk.num_accepted is not None:
                completion.accepted.append(chunk.num_accepted)
            completion.finish_reason = chunk.finish_reason
            if on_chunk:
                on_chunk(chunk)
        return completions

    def stream(self, requests: Sequence[Request]) -> Iterator[Chunk]:
        """The new tokens of every request as they come, interleaved.

        Closing the iterator, or an exception, frees whatever its requests held.

        Raises:
            ValueError: a request that can never run; nothing has been computed then.
        """
        for index, request in enumerate(requests):
            self._check(index, request)
        return self._run(deque(enumerate(requests)))

    def _check(self, index: int, request: Request) -> None:
        where = f"requests[{index}]"
        length = len(request.prompt_ids)
        if not length:
            raise ValueError(f"{where}.prompt_ids: is empty, needs at least one token")
        for name, ids in (("prompt_ids", request.prompt_ids), ("stop_token_ids", request.stop_token_ids)):
            if ids is not None and not all(hasattr(token, "__index__") for token in ids):
                raise TypeError(f"{where}.{name}: needs integers")
        for token in (min(request.prompt_ids), max(request.prompt_ids)):
            if not 0 <= token < self.target.vocab_size:
                raise ValueError(
                    f"{where}.prompt_ids: got {token}, the target's ids are 0 to {self.target.vocab_size - 1}"
                )
        if length >= self.kv.max_model_len:
            raise ValueError(
                f"{where}.prompt_ids: has {length} tokens, max_model_len {self.kv.max_model_len} leaves no new one"
            )
        for name, value, least in (
            ("max_new_tokens", request.max_new_tokens, 1),
            ("top_k", request.top_k, 0),
            ("seed", request.seed, -(2**63)),
        ):
            if not isinstance(value, int) or not least <= value < 2**63:
                raise ValueError(f"{where}.{name}: got {value!r}, needs an integer of {least} to {2**63 - 1}")
        if request.temperature != 0 and not MIN_TEMPERATURE <= request.temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"{where}.temperature: got {request.temperature}, needs 0 (greedy) or {MIN_TEMPERATURE:g} to "
                f"{MAX_TEMPERATURE:g}"
            )
        if not 0 < request.top_p <= 1:
            raise ValueError(f"{where}.top_p: got {request.top_p}, needs more than 0 and at most 1")
        blocks = self.kv.blocks_for(self._limit(request))
        if blocks > self.kv.num_blocks:
            raise ValueError(f"{where}: may need {blocks} blocks, num_blocks is {self.kv.num_blocks}: raise it")

    def _limit(self, request: Request) -> int:
        return min(len(request.prompt_ids) + request.max_new_tokens, self.kv.max_model_len)

    def _run(self, waiting: deque[tuple[int, Request]]) -> Iterator[Chunk]:
        if self._streaming:
            raise RuntimeError("another stream of this decoder is still open: finish it or close it")
        self._streaming = True
        self.stats = stats = Statistics(drafted=[0] * self._steps, accepted=[0] * self._steps)
        running: list[_Running] = []
        started = time.perf_counter()
        try:
            while waiting or running:
                self._admit(waiting, running)
                rows = self._schedule(running)
                outputs = self._pass(rows)
                stats.total_seconds = time.perf_counter() - started
                for row, emitted in zip(rows, outputs, strict=True):
                    chunk = self._take(row, emitted)
                    if chunk is None:
                        continue
                    if chunk.finish_reason:
                        running.remove(row.running)
                        self._release(row.running)
                    yield chunk
        finally:
            for one in running:
                self._release(one)
            self._streaming = False

    def _admit(self, waiting: deque[tuple[int, Request]], running: list[_Running]) -> None:
        """Move requests into free slots, in order, as long as their blocks are free."""
        while waiting and self._free_slots:
            index, request = waiting[0]
            limit = self._limit(request)
            if self.kv.blocks_for(limit) > self.kv.num_free_blocks:
                break
            waiting.popleft()
            slot = self._free_slots.pop()
            self.kv.reserve(slot, limit)
            self._sampling.temperature[slot] = request.temperature
            self._top_k[slot] = request.top_k
            self._top_p[slot] = request.top_p
            self._sampling.seeds[slot] = request.seed
            stop = self.target.eos_token_ids if request.stop_token_ids is None else request.stop_token_ids
            running.append(_Running(index, request, slot, frozenset(stop), limit))
            self.stats.prompt_tokens += len(request.prompt_ids)

    def _release(self, running: _Running) -> None:
        self.kv.free(running.slot)
        self._free_slots.append(running.slot)

    def _schedule(self, running: list[_Running]) -> list[_Row]:
        """What the next pass computes: every decoding request, then prompts while tokens are left."""
        rows = []
        budget = self.max_num_batched_tokens
        for one in running:
            if one.computed >= len(one.request.prompt_ids):
                # A pass emits one token more than the drafts it accepts, and none is wanted past the limit.
                drafts = min(self._steps, one.limit - one.computed - 2)
                rows.append(_Row(one, drafts + 1, drafts, verifies=True, samples=True))
                budget -= drafts + 1
        for one in running:
            remaining = len(one.request.prompt_ids) - one.computed
            tokens = min(remaining, budget)
            if tokens > 0:
                rows.append(_Row(one, tokens, 0, verifies=False, samples=tokens == remaining))
                budget -= tokens
        return rows

    @torch.no_grad()
    def _pass(self, rows: list[_Row]) -> list[list[int]]:
        """Compute, verify and draft: the tokens each row emitted, read from the device once, at the end."""
        clock = _Clock(self.target.device)
        clock.mark()
        packed = self._pack(rows)
        batch = packed.batch
        output = self._forward(packed)
        logits = output.logits
        if any(row.running.request.top_k or row.running.request.top_p < 1 for row in rows):
            logits = self._truncate(logits, packed)
        verified = rejection_sample(
            logits,
            self._drafts[packed.slots],
            packed.logits_start,
            batch.idx_mapping,
            self._sampling.temperature,
            self._sampling.seeds,
            batch.positions[packed.logits_rows],
            draft_logits=self.speculator.draft_logits if self.speculator else None,
            suppress_ids=self.target.suppress_ids,
        )
        self._last_sampled[packed.slots] = verified.last_sampled
        clock.mark()
        if self.speculator:
            verify = VerifyResult(
                verified.num_sampled, verified.num_rejected, self._last_sampled, self._next_prefill_tokens
            )
            hidden = output.hidden if output.aux_hidden is None else torch.cat(output.aux_hidden, dim=-1)
            self._drafts[packed.slots] = self.speculator.propose(batch, verify, self._sampling, hidden)
        clock.mark()
        emitted = [[token for token in row if token >= 0] for row in verified.output_ids.tolist()]
        verify_seconds, draft_seconds = clock.seconds()
        self.stats.target_passes += 1
        self.stats.verify_seconds += verify_seconds
        self.stats.draft_seconds += draft_seconds
        return emitted

    def _truncate(self, logits: Tensor, packed: _Packed) -> Tensor:
        if self.target.suppress_ids is not None:
            logits = logits.index_fill(1, self.target.suppress_ids, float("-inf"))
        slots = packed.slots[request_of_row(packed.logits_start, logits.shape[0])]
        return truncate(logits, self._sampling.temperature[slots], self._top_k[slots], self._top_p[slots])

    def _forward(self, packed: _Packed) -> TargetOutput:
        """The target's pass; a graph has logits of every token, which is what a pass without prompts asks for."""
        batch = packed.batch
        if self._target_graphs and batch.num_tokens == packed.logits_rows.shape[0]:
            replayed = self._target_graphs.forward(batch)
            if replayed is not None:
                return replayed
        tables = self.kv.block_tables(batch.idx_mapping)
        attention = AttentionBatch(
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_tables=tables,
            slot_mappings=tuple(self._slot_mapping(batch, table) for table in tables),
            max_query_len=batch.max_query_len,
        )
        aux_layers = self.speculator.aux_layers if self.speculator else ()
        return self.target.forward(
            batch.input_ids, batch.positions, self.kv.layers, attention, packed.logits_rows, aux_layers=aux_layers
        )

    def _slot_mapping(self, batch: InputBatch, table: Tensor) -> Tensor:
        return compute_slot_mapping(
            batch.positions,
            batch.query_start_loc,
            table,
            self.kv.block_size,
            max_model_len=self.kv.max_model_len,
        )

    def _pack(self, rows: list[_Row]) -> _Packed:
        """Bring the pass to the device in one copy. Drafts and newest tokens are there already: an id below 0 says
        where, as −1 − (its place in `[max_num_reqs, 1 + K]`).
        """
        ids, positions, starts, seq_lens, slots, following = [], [], [0], [], [], []
        logits_rows, logits_starts = [], [0]
        for row in rows:
            one, prompt = row.running, row.running.request.prompt_ids
            end = one.computed + row.num_tokens
            if row.verifies:
                place = one.slot * (1 + self._steps)
                ids += range(-1 - place, -1 - place - row.num_tokens, -1)
            else:
                ids += prompt[one.computed : end]
            positions += range(one.computed, end)
            starts.append(len(ids))
            seq_lens.append(end)
            slots.append(one.slot)
            following.append(prompt[end] if end < len(prompt) else 0)
            if row.samples:
                logits_rows += range(len(ids) - row.num_drafts - 1, len(ids))
            logits_starts.append(len(logits_rows))
        parts = (ids, positions, starts, seq_lens, slots, following, logits_rows, logits_starts)
        host = torch.tensor([value for part in parts for value in part], dtype=torch.int64)
        device = self.target.device
        if device.type == "cuda":
            host = host.pin_memory()
        views = host.to(device, non_blocking=True).split([len(part) for part in parts])
        coded, position, start, seq_len, slot, follow, logits_row, logits_start = views

        pending = torch.cat((self._last_sampled[:, None], self._drafts), dim=1).flatten()
        input_ids = torch.where(coded < 0, pending[(-1 - coded).clamp(min=0)], coded)
        self._next_prefill_tokens[slot] = follow
        batch = InputBatch(
            input_ids=input_ids,
            positions=position,
            query_start_loc=start.int(),
            seq_lens=seq_len.int(),
            idx_mapping=slot.int(),
            num_reqs=len(rows),
            num_tokens=len(ids),
            max_query_len=max(row.num_tokens for row in rows),
        )
        return _Packed(batch, slot, logits_row, logits_start.int())

    def _take(self, row: _Row, emitted: list[int]) -> Chunk | None:
        """Account for what a row emitted, and drop what comes after a stop token."""
        one, stats = row.running, self.stats
        one.computed += len(emitted) if row.verifies else row.num_tokens
        if not emitted:
            return None
        reason: FinishReason | None = None
        kept = emitted
        stop = next((place for place, token in enumerate(emitted) if token in one.stop), None)
        if stop is not None:
            kept, reason = emitted[: stop + 1], "stop"
        one.num_output += len(kept)
        if not reason and len(one.request.prompt_ids) + one.num_output == one.limit:
            reason = "length"
        stats.output_tokens += len(kept)
        if not row.verifies:
            return Chunk(one.index, kept, None, reason)
        accepted = min(len(emitted) - 1, len(kept))
        stats.verify_rows += 1
        stats.verify_tokens += len(kept)
        for place in range(row.num_drafts):
            stats.drafted[place] += 1
            stats.accepted[place] += place < accepted
        return Chunk(one.index, kept, accepted, reason)
