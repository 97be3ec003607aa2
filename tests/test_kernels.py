"""Every 16-bit kernel against the oracle, also those that this GPU would not choose."""

from __future__ import annotations

import re

import pytest
import torch

from flash_cute import library
from flash_cute.testing.cases import Case, make_inputs
from flash_cute.testing.verify import verify

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
KERNELS = [kernel for kernel in library.kernels() if "_tf32" not in kernel]
RICH = {"softcap": 20.0, "alibi": "batch", "dropout_p": 0.2}


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel(cuda, kernel):
    match = re.fullmatch(r"(fwd|bwd)_sm\d+_(\w+)_(plain|rich)_d(\d+)x(\d+)_.*", kernel)
    assert match is not None
    op, dtype, tier, dim, dim_v = match.groups()
    case = Case(
        heads=4, heads_k=2, seqlen_q=200, seqlen_k=333, is_causal=True, dim=int(dim),
        dim_v=int(dim_v), dtype=DTYPES[dtype], **(RICH if tier == "rich" else {}),
    )  # fmt: skip
    inputs = make_inputs(case, cuda)
    with library.only(kernel, "bwd_" if op == "fwd" else "fwd_"):
        for deterministic in (False, True):
            verify(inputs, deterministic=deterministic)


def test_no_kernel_of_that_name():
    with pytest.raises(ValueError, match="no kernel's id contains"), library.only("fwd_sm75"):
        pass


def test_other_kernels_refuse(cuda):
    q = torch.randn(1, 8, 1, 128, device=cuda, dtype=torch.bfloat16)
    with library.only("fp16"), pytest.raises(RuntimeError, match=r"set aside by use_kernels\(\)"):
        torch.ops.flash_cute.fwd(q, q, q)
    torch.ops.flash_cute.fwd(q, q, q)
