"""A package of AOTInductor in a C++ program, without Python.

The implementations for the CPU are Python, so on the CPU the program can only say that there is
none; on CUDA it gives the values of the eager call.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import flash_cute
from flash_cute.native import library

SOURCE = Path(__file__).with_name("aoti_runner.cpp")
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


class Attention(torch.nn.Module):
    def forward(self, q, k, v):
        return flash_cute.flash_attn_func(q, k, v, causal=True)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    root = Path(torch.__file__).parent
    made = tmp_path_factory.mktemp("aoti") / "runner"
    libraries = ["torch", "torch_cpu", "c10"]
    if torch.version.cuda is not None:
        libraries += ["torch_cuda", "c10_cuda"]
    command = ["g++", "-O0", "-std=c++20", SOURCE, "-o", made, f"-L{root / 'lib'}"]
    command += [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    command += ["-Wl,--no-as-needed", *(f"-l{x}" for x in libraries), "-ldl"]
    command += [
        f"-Wl,-rpath,{root / 'lib'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
    ]
    subprocess.run(command, check=True)
    return made


def test_program(program, device, tmp_path):
    torch._dynamo.reset()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = (torch.arange(2 * 24 * 4 * 16, dtype=torch.float32) / 1000).view(2, 24, 4, 16)
    x = x.to(device, dtype)
    with torch.no_grad():
        exported = torch.export.export(Attention(), (x, x, x))
        package = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(tmp_path / "attention.pt2")
        )
        expected = Attention()(x, x, x).double().sum().item()
    run = subprocess.run([program, library.find(), package, device], capture_output=True, text=True)
    if device == "cpu":
        assert run.returncode == 1 and "flash_cute::fwd" in run.stderr, run
    else:
        assert run.returncode == 0, run.stderr
        assert float(run.stdout) == pytest.approx(expected, abs=2e-3)
