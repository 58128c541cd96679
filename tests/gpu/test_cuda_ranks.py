"""Two ranks on two GPUs over NCCL: merging, warming up, agreeing, capturing and tuning together."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parents[1] / "support" / "cuda_ranks.py"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: a rank each, over NCCL")
def test_two_gpus_merge_warm_up_agree_capture_and_tune_together(tmp_path: Path) -> None:
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), "2", str(port), str(tmp_path), "cuda"],
            # Multicast through the switch is not to be had on every host.
            env={**os.environ, "NCCL_NVLS_ENABLE": "0"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        ended = [rank.communicate(timeout=150) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, said) in zip(ranks, ended, strict=True):
        print(said[-1500:])
        assert rank.returncode == 0, said[-4000:]
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in ended)
    assert first == second
    assert first["merge"] == "84 merges equal to the bit"
    assert first["capture"] == "captured, 7 replays equal to the bit"
