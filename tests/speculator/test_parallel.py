"""Ranks: data parallel, the same forwards everywhere, whatever each has to do; tensor parallel, the whole's winners."""

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("_parallel_worker.py")


def run_ranks(world: int, tmp_path: Path, device: str) -> list[Any]:
    """What each of `world` processes found; fails with the first that fails."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    outputs = [tmp_path / f"{rank}.pickle" for rank in range(world)]
    processes = [
        subprocess.Popen(
            [sys.executable, WORKER, str(rank), str(world), str(port), str(output), device],
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            text=True,
        )
        for rank, output in enumerate(outputs)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
    return [pickle.loads(output.read_bytes()) for output in outputs]


def test_ranks_agree(tmp_path):
    """C16: ranks with 0, 1 and 2 requests make the same forwards of the same size, and draft as they do alone.

    And three ranks with a third of the draft vocabulary each draft what one with all of it does.
    """
    ranks = run_ranks(3, tmp_path, "cpu")
    for rank, found in enumerate(ranks):
        together, alone = found["together"], found["alone"]
        assert together["forwards"] == [8, 2, 2] * 3
        assert together["drafts"] == alone["drafts"]
        assert together["slots"] == alone["slots"]
        assert [len(drafts) for drafts in together["drafts"]] == [(rank + number) % 3 for number in range(3)]
        assert found["shards"]["drafts"] == found["whole"]["drafts"]
        assert (found["shards"]["rows"], found["whole"]["rows"]) == ([21, 21, 22][rank], 64)


@pytest.mark.gpu(count=2)
def test_two_gpus_replay_the_same_graphs(tmp_path):
    for found in run_ranks(2, tmp_path, "cuda"):
        assert found["together"]["replays"] == [(4, 1, 4, 3), (8, 2, 4, 3), (8, 2, 4, 3)]
        assert found["together"]["drafts"] == found["alone"]["drafts"]
        assert found["shards"]["drafts"] == found["whole"]["drafts"]
