"""One rank of `test_parallel.py`: three rounds of drafting, data parallel with 0, 1 or 2 requests in each, then tensor
parallel with the same requests in all ranks.
"""

import faulthandler
import gc
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from _tiny_heads import save_random_eagle3, tiny_target
from tridraft.models.hf_target import HFTarget
from tridraft.speculator.batch import InputBatch, SamplingState, VerifyResult
from tridraft.speculator.config import SpeculatorConfig
from tridraft.speculator.factory import init_speculator
from tridraft.speculator.kv_cache import KVCache

STEPS, SLOTS, LENGTH = 3, 2, 64


def speculator_of(target: HFTarget, directory: Path, **groups: Any) -> Any:
    """An EAGLE-3 speculator with an empty cache, in which every slot has its blocks."""
    config = SpeculatorConfig(
        "eagle3",
        directory,
        num_speculative_tokens=STEPS,
        max_num_reqs=SLOTS,
        max_model_len=LENGTH,
        max_num_batched_tokens=128,
        **groups,
    )
    speculator: Any = init_speculator(config)
    speculator.load_model(target)
    kv = KVCache(
        [*target.kv_specs, *speculator.kv_specs],
        num_blocks=8,
        block_size=16,
        max_num_reqs=SLOTS,
        max_model_len=LENGTH,
        dtype=target.dtype,
        device=target.device,
    )
    for slot in range(SLOTS):
        kv.reserve(slot, LENGTH)
    speculator.set_kv_cache(kv)
    speculator.capture()
    return speculator


def round_of(target: HFTarget, number: int, reqs: int, seed: int) -> tuple[Any, ...]:
    """Verify passes of 4 tokens a request, after prompts whose lengths are the rank's own."""
    generator = torch.Generator().manual_seed(seed)
    tokens = reqs * (STEPS + 1)
    start = [number * 10 + seed + row for row in range(reqs)]

    def ints(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=target.device)

    batch = InputBatch(
        input_ids=torch.randint(128, (tokens,), generator=generator).to(target.device),
        positions=ints([first + i for first in start for i in range(STEPS + 1)], torch.int64),
        query_start_loc=ints(range(0, tokens + 1, STEPS + 1)),
        seq_lens=ints([first + STEPS + 1 for first in start]),
        idx_mapping=ints(range(reqs)),
        num_reqs=reqs,
        num_tokens=tokens,
        max_query_len=STEPS + 1 if reqs else 0,
    )
    last = torch.randint(128, (SLOTS,), generator=generator).to(target.device)
    verify = VerifyResult(ints([1] * reqs), ints([number % (STEPS + 1)] * reqs), last, torch.zeros_like(last))
    hidden = torch.randn(tokens, 3 * target.hidden_size, generator=generator).to(target.device, target.dtype)
    zeros = torch.zeros(SLOTS, device=target.device)
    return batch, verify, SamplingState(zeros, zeros.long()), hidden


def logged(log: list[Any], entry: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with an entry in the log for each call."""

    def call(*args: Any, **options: Any) -> Any:
        log.append(entry(*args))
        return function(*args, **options)

    return call


def main() -> None:
    rank, world, port, output, device = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(200, exit=True)  # before the test gives up: where a rank waits for another
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, rank=rank, world_size=world)
    target = HFTarget(tiny_target(device=device))
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        directory = save_random_eagle3(Path(folder), target.model.config)
        world_group = torch.distributed.group.WORLD
        for name, groups in (
            ("together", {"data_parallel_group": world_group}),
            ("alone", {}),
            ("shards", {"tensor_parallel_group": world_group}),
            ("whole", {}),
        ):
            speculator = speculator_of(target, directory, **groups)
            forwards: list[int] = []
            replays: list[Any] = []
            graphs = speculator.verify_graphs
            speculator.run_model = logged(forwards, lambda ids, *_: ids.shape[0], speculator.run_model)
            graphs.replay = logged(replays, tuple, graphs.replay)
            first, seed = (rank, rank) if name in ("together", "alone") else (1, 5)
            rounds = (round_of(target, number, (first + number) % 3, seed) for number in range(3))
            drafts = [speculator.propose(*arguments).tolist() for arguments in rounds]
            slots = int(speculator.layers[0].k_cache.flatten(2).any(-1).sum())
            found[name] = {"drafts": drafts, "slots": slots, "forwards": forwards, "replays": replays}
            found[name]["rows"] = len(speculator.model.lm_head_weight)
            del speculator, graphs
    Path(output).write_bytes(pickle.dumps(found))
    gc.collect()  # a communicator ends once no graph holds its collectives any more
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
