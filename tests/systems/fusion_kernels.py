"""Every Triton kernel of fusion against torch: on CUDA, or on the CPU with TRITON_INTERPRET=1.

Run as a script it checks all on the CPU.
"""

from __future__ import annotations

from unittest import mock

import torch
from fusion_models import LAYERS, WIDTH, assert_same, encoder_layer, llama_block, tokens

from benchmarks.llama_block import rotary
from flash_cute.attention.fusion import (
    create_unified_attention_fusion,
    functions,
    kernels_torch,
    kernels_triton,
    kernels_triton_linear,
)


def close(got, wanted) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def check_activations(device: str) -> None:
    for name in kernels_torch.ACTIVATIONS:
        x, residual, grad = torch.randn(3, 5, 4, 333, device=device).unbind()
        for addend in (None, residual):
            arguments = (x, addend, name, 0.0, None)
            close(kernels_triton.activate(*arguments), kernels_torch.activate(*arguments))
        close(
            kernels_triton.activate_backward(grad, x, name, 0.0, None),
            kernels_torch.activate_backward(grad, x, name, 0.0, None),
        )
        x, grad = torch.randn(5, 66, device=device), torch.randn(5, 33, device=device)
        close(kernels_triton.gate(x, name), kernels_torch.gate(x, name))
        close(
            kernels_triton.gate_backward(grad, x, name), kernels_torch.gate_backward(grad, x, name)
        )


def check_norms(device: str) -> None:
    for number in range(16):
        rms, has_bias, keep_sum, transposed = (bool(number & 1 << bit) for bit in range(4))
        x = torch.randn(3, 5, 33, device=device)
        y = torch.randn(5, 3, 33, device=device).transpose(0, 1) if transposed else x.flip(0)
        weight, bias = torch.randn(2, 33, device=device).unbind()
        options = (weight, bias if has_bias else None, 1e-5, rms, 0.0, None, keep_sum, x.dtype)
        wanted = kernels_torch.add_norm(x, y, *options)
        got = kernels_triton.add_norm(x, y, *options)
        close(got[1], wanted[1])
        close(got[3], wanted[3])
        close(got[0], wanted[0]) if keep_sum else None
        assert (got[0] is None) == (not keep_sum)
        grad, grad_sum = torch.randn(2, 3, 5, 33, device=device).unbind()
        saved = (wanted[0], None) if keep_sum else (x, y)
        arguments: tuple = (
            grad, grad_sum if keep_sum else None, *saved, weight, wanted[2], wanted[3], rms, 0.0,
            None, y,
        )  # fmt: skip
        for one, other in zip(
            kernels_triton.add_norm_backward(*arguments),
            kernels_torch.add_norm_backward(*arguments),
            strict=True,
        ):
            close(one, other)


def check_linear_norms(device: str) -> None:
    """The product with its sum and norm, of rows that come in either order, and the same bits as
    apart where dropout keeps all or the same elements."""
    for number in range(16):
        rms, has_bias, keep_sum, transposed = (bool(number & 1 << bit) for bit in range(4))
        x = torch.randn(3, 5, 33, device=device)
        a = torch.randn(5, 3, 90, device=device, dtype=torch.float16).transpose(0, 1)
        a = a if transposed else a.contiguous()
        w = torch.randn(33, 90, device=device, dtype=torch.float16) / 9
        weight, bias, b = torch.randn(3, 33, device=device).unbind()
        b = b.half() if has_bias else None
        options = (weight, bias if has_bias else None, 1e-5, rms, 0.0, None, keep_sum, x.dtype)
        y = torch.nn.functional.linear(a.float(), w.float(), None if b is None else b.float())
        wanted = kernels_torch.add_norm(x, y, *options)
        assert kernels_triton_linear.takes(x, a, w)
        got = kernels_triton_linear.linear_add_norm(x, a, w, b, *options)
        for i in (0, 1, 3):
            if wanted[i] is None:
                assert got[i] is None
            else:
                torch.testing.assert_close(got[i], wanted[i], rtol=2e-3, atol=2e-3)
    p, seed = 0.25, torch.tensor(987654321, device=device)
    dropped = [
        kernels_triton_linear.linear_add_norm(
            x, a, w, None, weight, None, 1e-5, True, p, seed, True, x.dtype
        )[0],
        kernels_triton.add_norm(x, y, weight, None, 1e-5, True, p, seed, True, x.dtype)[0],
    ]
    assert torch.equal(dropped[0] == x, dropped[1] == x)
    assert 0.1 < float((dropped[0] == x).float().mean()) < 0.4


def check_layouts(device: str) -> None:
    """Two dimensions, rows that do not lie in one piece, and a y that repeats itself."""
    weight, flat = torch.randn(33, device=device), torch.randn(5, 33, device=device)
    for y in (flat, torch.randn(33, 5, device=device).t(), flat[:1].expand(5, 33)):
        for x in (flat.flip(0), torch.randn(33, 5, device=device).t()):
            options = (weight, None, 1e-5, True, 0.0, None, False, x.dtype)
            wanted = kernels_torch.add_norm(x, y, *options)
            got = kernels_triton.add_norm(x, y, *options)
            close(got[1], wanted[1])
            arguments = (flat, None, x, y, weight, *wanted[2:], True, 0.0, None, y)
            for one, other in zip(
                kernels_triton.add_norm_backward(*arguments),
                kernels_torch.add_norm_backward(*arguments),
                strict=True,
            ):
                close(one, other)


def check_rotary(device: str) -> None:
    qkv = torch.randn(2, 3, 8, 10, device=device)
    for batch in (1, 2):
        cos, sin = torch.randn(2, batch, 3, 10, device=device).unbind()
        close(kernels_triton.rotate(qkv, cos, sin, 6), kernels_torch.rotate(qkv, cos, sin, 6))
        grads = torch.randn(2, 3, 8, 10, device=device).split((4, 2, 2), dim=2)
        close(
            kernels_triton.rotate_backward(*grads, cos, sin),
            kernels_torch.rotate_backward(*grads, cos, sin),
        )


def check_dropout(device: str) -> None:
    """A share p of the elements, the same in forward and backward, unlike its neighbours'."""
    p, seed = 0.25, torch.tensor(-1234567890123456789, device=device)
    x = torch.ones(16, 4096, device=device)
    first = kernels_triton.activate(x, None, "identity", p, seed)
    second = kernels_triton.activate(x, None, "identity", p, seed + 1)
    assert abs(float((first == 0).float().mean()) - p) < 0.01
    assert abs(float(((first == 0) & (second == 0)).float().mean()) - p * p) < 0.01
    close(kernels_triton.activate_backward(x, x, "identity", p, seed), first)
    zeros, ones, weight = torch.zeros(1, 64, 1000), torch.ones(1, 64, 1000), torch.ones(1000)
    zeros, ones, weight = zeros.to(device), ones.to(device), weight.to(device)
    outs = [
        kernels_triton.add_norm(zeros, ones, weight, None, 1e-5, False, p, seed, keep, ones.dtype)
        for keep in (True, False)
    ]
    total, out, mean, rstd = outs[0]
    assert total is not None
    close(outs[1][1], out)
    kept = (total[0] != 0).float() - (1 - p)
    assert abs(float(kept.mean())) < 0.01
    for shifted in (kept[:, 1:] * kept[:, :-1], kept[1:, :-1] * kept[:-1, 1:]):
        assert abs(float(shifted.mean())) < 0.005
    grad = torch.randn_like(ones)
    arguments = (grad, None, total, None, weight, mean, rstd, False, p, seed, ones)
    dx, dy, _, _ = kernels_triton.add_norm_backward(*arguments)
    close(dy, dx * total)


def check_layers(device: str) -> None:
    """Whole blocks by these kernels equal torch's."""
    with mock.patch.object(functions, "kernels_for", lambda x: kernels_triton):
        for kind in ("as_documented", "batch_first", "without_bias"):
            layer = encoder_layer(device, **LAYERS[kind])
            assert_same(layer, create_unified_attention_fusion(layer), tokens(layer, device))
        block = llama_block(device)
        position = rotary(7, block.self_attn.head_dim, device)
        x = torch.randn(2, 7, WIDTH, device=device)
        fused = create_unified_attention_fusion(block)
        assert_same(block, fused, x, position_embeddings=position)


CHECKS = (
    check_activations,
    check_norms,
    check_linear_norms,
    check_layouts,
    check_rotary,
    check_dropout,
    check_layers,
)

if __name__ == "__main__":
    for check in CHECKS:
        torch.manual_seed(0)
        check("cpu")
