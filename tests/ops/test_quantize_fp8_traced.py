"""quantize_fp8 in graphs, mapped, on tensors without values, and under autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp8_oracle import E4M3, inputs, offsets
from torch import Tensor

from flash_cute import flash_attn_func, flash_attn_varlen_func, quantize_fp8

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "smooth": {"smooth_k": True, "hadamard": True},
    "fine": {"qk_scaling": "row", "v_scaling": "channel", "power_of_two": True},
    "coarse": {"qk_scaling": "tensor", "v_scaling": "tensor"},
}


@pytest.mark.parametrize(
    ("name", "is_packed"), [("smooth", False), ("fine", True), ("coarse", True)]
)
def test_compiled_as_one_graph(device, name, is_packed):
    torch._dynamo.reset()
    angles = torch.rand(100, 16, device=device)

    def call(q: Tensor, k: Tensor, v: Tensor, *cu: Tensor) -> tuple[Any, ...]:
        lengths = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), cu, strict=False))
        x = quantize_fp8(q, k, v, rotary_cos=angles.cos(), rotary_sin=angles.sin(), **lengths,
                         **OPTIONS[name])  # fmt: skip
        if cu:
            out = flash_attn_varlen_func(
                x.q, x.k, x.v, *cu, 60, 60, **x.descales(), return_lse=True
            )
        else:
            out = flash_attn_func(x.q, x.k, x.v, **x.descales(), return_lse=True)
        return out[0], x.corrected_lse(out[1])

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (20, 33):
        if is_packed:
            args = [*inputs(device, lead=((n,), (n + 4,))), offsets(device, n - 5, 5),
                    offsets(device, n - 4, 8)]  # fmt: skip
        else:
            args = inputs(device, lead=((2, n), (2, n + 4)))
        for got, expected in zip(compiled(*args), call(*args), strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", OPTIONS)
def test_mapped(device, name):
    samples = [torch.stack(x) for x in zip(*(inputs(device) for _ in range(3)), strict=True)]

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        x = quantize_fp8(q, k, v, **OPTIONS[name])
        return tuple(y.float() for y in x if y is not None)

    expected = [torch.stack(x) for x in zip(*map(call, *samples), strict=True)]
    for got, alone in zip(torch.func.vmap(call)(*samples), expected, strict=True):
        torch.testing.assert_close(got, alone)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("is_packed", [False, True])
def test_needs_no_values_on_the_host(name, is_packed):
    """Tensors without values do."""
    lead = ((20,), (26,)) if is_packed else ((2, 20), (2, 26))
    q, k, v = (x.to("meta") for x in inputs("cpu", lead=lead))
    cos = torch.empty(30, 8, device="meta")
    options = dict(OPTIONS[name], rotary_cos=cos, rotary_sin=cos)
    if is_packed:
        cu = torch.empty(3, dtype=torch.int32, device="meta")
        options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    x = quantize_fp8(q, k, v, **options)
    assert x.q.shape == q.shape and x.k.shape == k.shape and x.v.dtype == E4M3


def test_exported_with_lengths_of_any_size():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            x = quantize_fp8(q, k, v, qk_scaling="row")
            return flash_attn_func(x.q, x.k, x.v, **x.descales())

    q, k, v = torch.randn(2, 12, 4, 16), *torch.randn(2, 2, 17, 2, 16)
    of_q, of_k = {1: torch.export.Dim("a")}, {1: torch.export.Dim("b")}
    exported = torch.export.export(Attention(), (q, k, v), dynamic_shapes=(of_q, of_k, of_k))
    others = torch.randn(2, 30, 4, 16), *torch.randn(2, 2, 9, 2, 16)
    torch.testing.assert_close(exported.module()(*others), Attention()(*others))


def test_autocast_changes_nothing(device):
    q, k, v = inputs(device)
    expected = quantize_fp8(q, k, v, smooth_k=True, hadamard=True)
    with torch.autocast(device, torch.bfloat16):
        got = quantize_fp8(q, k, v, smooth_k=True, hadamard=True)
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == y.dtype and torch.equal(x.float(), y.float())
