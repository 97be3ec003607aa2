"""The Triton kernels of fusion against torch: on CUDA, and interpreted on the CPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("fusion_kernels.py")


def test_kernels_interpreted():
    """In a process of its own: Triton decides when it is imported."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    run = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, env=environment, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    "name", ["activations", "norms", "linear_norms", "layouts", "rotary", "dropout", "layers"]
)
def test_kernels(name, cuda):
    pytest.importorskip("triton")
    fusion_kernels = importlib.import_module("fusion_kernels")
    torch.manual_seed(0)
    getattr(fusion_kernels, f"check_{name}")(cuda)
