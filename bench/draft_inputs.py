"""Draft inputs: one launch each, so what counts is the latency of a graph node."""

from functools import partial
from typing import Any

import torch
from _harness import Benchmark, Case, main
from torch import Tensor

from tridraft.kernels.draft_inputs import (
    compute_slot_mapping,
    prepare_decode_inputs,
    prepare_prefill_inputs,
    update_draft_inputs,
)

MAX_MODEL_LEN = 131072
BLOCK_SIZE = 16


def hidden_states(rows: int, size: int, device: torch.device) -> Tensor:
    """Random rows in the 16-bit type of a GPU."""
    return torch.randn(rows, size, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)


def requests(num_reqs: int, rows: int, device: torch.device) -> dict[str, Tensor]:
    """`num_reqs` verified requests of `rows` rows each."""
    starts = torch.arange(0, rows * num_reqs + 1, rows, device=device, dtype=torch.int32)
    idx_mapping = torch.arange(num_reqs, device=device, dtype=torch.int32)
    num_rejected = torch.randint(0, rows, (num_reqs,), device=device, dtype=torch.int32)
    return {"query_start_loc": starts, "idx_mapping": idx_mapping, "num_rejected": num_rejected}


def block_table(num_reqs: int, device: torch.device) -> Tensor:
    """Blocks for every position."""
    return torch.randint(0, 2**20, (num_reqs, MAX_MODEL_LEN // BLOCK_SIZE), device=device, dtype=torch.int32)


def update_case(num_reqs: int, hidden_size: int, *, advance: bool) -> Case:
    """Between two draft steps: token and hidden state, and for a drafter that owns KV position, length and slot."""

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        tokens, positions = (torch.randint(0, 65536, (num_reqs,), device=device) for _ in range(2))
        hidden, out_hidden = (hidden_states(num_reqs, hidden_size, device) for _ in range(2))
        idx_mapping = torch.arange(num_reqs, device=device)
        seq_lens, slots = positions.int() + 1, torch.zeros_like(positions)
        ids, table = torch.zeros_like(tokens), block_table(num_reqs, device)
        return tokens, hidden, idx_mapping, ids, positions, seq_lens, out_hidden, table, slots

    def run(impl: Any, tokens: Tensor, hidden: Tensor, idx_mapping: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ids, positions, seq_lens, out_hidden, table, slots = outputs
        slot = {"block_table": table, "block_size": BLOCK_SIZE, "slot_mapping": slots} if advance else {}
        update_draft_inputs(
            tokens,
            hidden,
            idx_mapping,
            advance_positions=advance,
            max_model_len=MAX_MODEL_LEN,
            input_ids=ids,
            positions=positions,
            seq_lens=seq_lens,
            out_hidden=out_hidden,
            impl=impl,
            **slot,  # type: ignore[arg-type]
        )
        return ids, positions, seq_lens, out_hidden, slots

    return Case(
        name=f"update_draft_inputs R={num_reqs} H={hidden_size} {'advancing' if advance else 'constant'}",
        inputs=inputs,
        reference=partial(run, "eager"),
        providers={"tridraft": partial(run, "auto"), "eager": partial(run, "eager")},
        bytes=num_reqs * (4 * hidden_size + 64),
        headline=num_reqs == 32 and advance,
    )


def decode_case(num_reqs: int, hidden_size: int, num_drafts: int = 3) -> Case:
    """From a verify batch to one row a request."""

    def inputs(device: torch.device) -> tuple[Any, ...]:
        rows = num_drafts + 1
        batch = requests(num_reqs, rows, device)
        hidden = hidden_states(num_reqs * rows, hidden_size, device)
        slots = torch.arange(num_reqs, device=device)
        state = {"last_sampled": slots + 5, "next_prefill_tokens": slots, "num_sampled": rows - batch["num_rejected"]}
        outputs = {
            "input_ids": torch.zeros_like(slots),
            "positions": torch.zeros_like(slots),
            "out_seq_lens": torch.zeros_like(slots, dtype=torch.int32),
            "out_hidden": hidden_states(num_reqs, hidden_size, device),
        }
        return hidden, torch.full_like(slots, 9000), batch, state, outputs

    def run(impl: Any, hidden: Tensor, seq_lens: Tensor, batch: Any, state: Any, outputs: Any) -> tuple[Tensor, ...]:
        prepare_decode_inputs(
            hidden,
            seq_lens=seq_lens,
            **batch,
            **state,
            advance_positions=False,
            max_model_len=MAX_MODEL_LEN,
            impl=impl,
            **outputs,
        )
        return tuple(outputs.values())

    return Case(
        name=f"prepare_decode_inputs R={num_reqs} H={hidden_size}",
        inputs=inputs,
        reference=partial(run, "eager"),
        providers={"tridraft": partial(run, "auto"), "eager": partial(run, "eager")},
        bytes=num_reqs * (4 * hidden_size + 64),
    )


def prefill_case(num_reqs: int, rows: int) -> Case:
    """Draft step 0 of a drafter that owns KV: shifted ids, positions and slots of every target row."""

    def inputs(device: torch.device) -> tuple[Any, ...]:
        batch = requests(num_reqs, rows, device)
        num_tokens, slots = num_reqs * rows, torch.arange(num_reqs, device=device)
        ids, positions = torch.randint(0, 65536, (num_tokens,), device=device), torch.arange(num_tokens, device=device)
        state = {"last_sampled": slots + 5, "next_prefill_tokens": slots, "num_sampled": rows - batch["num_rejected"]}
        outputs = {
            "input_ids": torch.zeros_like(ids),
            "positions": torch.zeros_like(ids),
            "last_token_indices": torch.zeros_like(slots),
        }
        return ids, positions, batch, state, outputs, block_table(num_reqs, device)

    def run(impl: Any, ids: Tensor, positions: Tensor, batch: Any, state: Any, outputs: Any, table: Tensor) -> Any:
        prepare_prefill_inputs(ids, positions, **batch, **state, **outputs, impl=impl)
        slots = compute_slot_mapping(
            positions, block_table=table, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN, impl=impl, **batch
        )
        return (*outputs.values(), slots)

    return Case(
        name=f"prepare_prefill_inputs + slots R={num_reqs} rows={rows}",
        inputs=inputs,
        reference=partial(run, "eager"),
        providers={"tridraft": partial(run, "auto"), "eager": partial(run, "eager")},
        bytes=num_reqs * rows * 44,
    )


def cases() -> list[Case]:
    """Decode batches, a verify batch and a prompt."""
    updates = [update_case(r, h, advance=a) for a in (True, False) for r, h in ((1, 1536), (32, 1536), (256, 5376))]
    decodes = [decode_case(num_reqs, hidden_size) for num_reqs, hidden_size in ((1, 1536), (32, 1536), (256, 5376))]
    return updates + decodes + [prefill_case(1, 4), prefill_case(256, 4), prefill_case(1, 8192)]


BENCHMARK = Benchmark("draft_inputs", cases=cases, smoke=lambda: update_case(3, 64, advance=True))

if __name__ == "__main__":
    main(BENCHMARK)
