"""DTensors in the public functions: two processes over gloo, exact in every placement."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("dtensor_ranks.py")
CHECKS = ("dense", "heads_that_do_not_divide", "varlen", "refusals", "compiled")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_two_processes():
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM],
            env=os.environ | shared | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=150)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output
        assert [f"ok {name}" in output for name in CHECKS] == [True] * len(CHECKS), output
