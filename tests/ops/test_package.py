"""Packages of AOTInductor: compiled ahead of time, loaded, and called."""

from __future__ import annotations

import shutil

import pytest
import torch

import flash_cute


class Attention(torch.nn.Module):
    """All results that a call may have; those of other calls are None."""

    def forward(self, q, k, v, sink):
        out = flash_cute.flash_attn_func(q, k, v, causal=True)
        out, lse = flash_cute.flash_attn_func(q + out, k, v, sink=sink, return_lse=True)
        offsets = torch.arange(len(q) + 1, dtype=torch.int32) * q.shape[1]
        packed = (x.flatten(0, 1) for x in (q, k, v))
        of_rows = flash_cute.flash_attn_varlen_func(*packed, offsets, offsets, *q.shape[1:2] * 2)
        return out, lse, of_rows


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_a_package_has_the_bits_of_eager(tmp_path):
    torch._dynamo.reset()
    module, args = Attention(), (*torch.randn(3, 2, 24, 4, 16), torch.randn(4))
    with torch.no_grad():
        exported = torch.export.export(module, args)
        package = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(tmp_path / "attention.pt2")
        )
        loaded = torch._inductor.aoti_load_package(package)
        for given in (args, (*torch.randn(3, 2, 24, 4, 16), torch.randn(4))):
            for got, expected in zip(loaded(*given), module(*given), strict=True):
                assert torch.equal(got, expected)
