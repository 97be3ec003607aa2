"""bwd.out and varlen_bwd.out give gradients of 16-bit inputs in fp32, if all three are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_cute.distributed.local import takes_fp32_gradients
from flash_cute.testing.cases import Case, Inputs, VarlenCase

HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
CASES: dict[str, Case | VarlenCase] = {
    "plain": Case(seqlen_q=130, seqlen_k=70),
    "causal": Case(seqlen_q=70, seqlen_k=130, is_causal=True),
    "all": Case(
        seqlen_q=70, seqlen_k=130, dim=40, is_causal=True, softcap=2.0, alibi="heads", sink=True,
        dropout_p=0.2,
    ),
    "packed": VarlenCase(
        lengths_q=(20, 0, 33), lengths_k=(33, 5, 20), rows_before=2, is_causal=True
    ),
}  # fmt: skip


def call(inputs: Inputs, dtype: torch.dtype) -> tuple[Any, tuple[Tensor, ...], dict[str, Any]]:
    """The op and its arguments, with buffers full of NaN in ``dtype``."""
    ops = torch.ops.flash_cute
    op = ops.varlen_bwd.out if inputs.lengths else ops.bwd.out
    out, lse, _, _ = inputs.forward()
    buffers: dict[str, Any] = {
        f"d{x}": torch.full_like(getattr(inputs, x), torch.nan, dtype=dtype) for x in "qkv"
    }
    if inputs.options["sink"] is not None:
        buffers["dsink"] = torch.empty_like(inputs.options["sink"], dtype=torch.float32)
    saved = (inputs.dout, inputs.q, inputs.k, inputs.v, out, lse)
    return op, saved, inputs.lengths | inputs.options | buffers


def gradients(inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    op, saved, named = call(inputs, dtype)
    op(*saved, **named)
    return {name: named[name] for name in ("dq", "dk", "dv")}


def relative(x: Tensor, true: Tensor) -> float:
    return ((x.double() - true.double()).norm() / true.double().norm()).item()


@HALVES
@pytest.mark.parametrize("name", CASES)
def test_they_are_those_of_16_bits_before_they_are_rounded(make, name, dtype):
    inputs = make(replace(CASES[name], dtype=dtype))
    if not takes_fp32_gradients(inputs.q.device, dtype, inputs.q.shape[-1], inputs.v.shape[-1]):
        with pytest.raises(RuntimeError, match="rounds gradients"):
            gradients(inputs, torch.float32)
        return
    exact, rounded = gradients(inputs, torch.float32), gradients(inputs, dtype)
    for x, fp32 in exact.items():
        assert fp32.dtype == torch.float32 and not torch.equal(fp32, rounded[x].float()), x
        assert relative(rounded[x], fp32) <= torch.finfo(dtype).eps, x
        if fp32.device.type == "cpu":
            assert torch.equal(fp32.to(dtype), rounded[x]), x


@pytest.mark.parametrize("name", CASES)
def test_opcheck(make, name):
    inputs = make(replace(CASES[name], dtype=torch.bfloat16))
    if not takes_fp32_gradients(inputs.q.device, inputs.q.dtype, 64, 64):
        pytest.skip("no kernel of this GPU gives gradients in fp32")
    op, saved, named = call(inputs, torch.float32)
    torch.library.opcheck(op, saved, named)


def test_mixed_gradient_dtypes_raise_with_each_dtype():
    q = torch.zeros(1, 8, 2, 16, dtype=torch.bfloat16)
    lse = torch.zeros(1, 2, 8)
    bwd = torch.ops.flash_cute.bwd.out
    words = "dq torch.float32, dk torch.bfloat16, dv None; expected all three torch.float32, or"
    for mode in (None, FakeTensorMode()):
        tensors = [q, lse] if mode is None else [mode.from_tensor(x) for x in (q, lse)]
        x, statistic = tensors
        mixed = {"dq": torch.empty_like(x, dtype=torch.float32), "dk": torch.empty_like(x)}
        with pytest.raises(TypeError, match=words):
            bwd(x, x, x, x, x, statistic, **mixed)


def test_other_inputs_have_gradients_in_their_dtype():
    q = torch.zeros(1, 8, 2, 16, dtype=torch.float64)
    buffers = {x: torch.empty_like(q, dtype=torch.float32) for x in ("dq", "dk", "dv")}
    with pytest.raises(TypeError, match=r"d[qkv] has dtype torch.float32; expected torch.float64"):
        torch.ops.flash_cute.bwd.out(q, q, q, q, q, q[..., 0].mT.contiguous(), **buffers)
