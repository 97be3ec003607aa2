"""The ops behind flash_attention_forward: graphs, torch.func, second derivatives, FLOPs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from flash_cute import FlashAttention, flash_attention_forward
from flash_cute.tiled import ops as tiled_ops


def tensors(*shape, dtype=torch.float64, count=3):
    generator = torch.Generator().manual_seed(len(shape) + shape[-2])
    return [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(count)]


def exact(q, k, v):
    weights = torch.softmax(q.double() @ k.double().mT / q.shape[-1] ** 0.5, -1)
    return weights @ v.double()


def loss(x):
    return flash_attention_forward(x, x, x, 3, 4).sum()


@pytest.mark.parametrize("return_stats", [False, True])
def test_opcheck(device, return_stats):
    leaves = [x.to(device).requires_grad_() for x in tensors(2, 2, 20, 8, dtype=torch.float32)]
    torch.library.opcheck(tiled_ops.fwd, (*leaves, 3, 4, return_stats))
    q, k, v = (x.detach() for x in leaves)
    out, lse, *_ = tiled_ops.fwd(q, k, v, 3, 4, return_stats)
    torch.library.opcheck(tiled_ops.bwd, (torch.randn_like(out), q, k, v, out, lse, 3, 4))


def test_use_half_reaches_a_graph(device):
    """Inductor drops casts to fp16 and back that stand side by side."""
    q, k, v = (x.to(device) for x in tensors(1, 2, 64, 32, dtype=torch.float32))
    out = torch.compile(FlashAttention(use_half=True))(q, k, v)
    error = (out.double() - exact(q, k, v)).abs().max()
    assert out.dtype == torch.float32 and 2e-5 < error < 2e-3


def test_one_graph_of_all_lengths(device):
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiled = torch.compile(FlashAttention(), dynamic=True, fullgraph=True, backend=counter)
    for seqlen in (5, 300, 17, 64):
        q, k, v = (x.to(device) for x in tensors(1, 2, seqlen, 16, dtype=torch.float32))
        torch.testing.assert_close(compiled(q, k, v), FlashAttention()(q, k, v))
    assert counter.frame_count == 1 and counter.op_count < 50  # whatever the number of tiles


def test_export_of_lengths_that_change():
    length = torch.export.Dim("length", min=2)
    sample = tuple(tensors(1, 2, 9, 8))
    exported = torch.export.export(
        FlashAttention(), sample, dynamic_shapes=[{2: length}] * 3
    ).module()
    longer = tensors(1, 2, 31, 8)
    torch.testing.assert_close(exported(*longer), exact(*longer))


def test_transforms():
    x, y = tensors(3, 1, 2, 6, 4, count=2)
    leaf = x[0].clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(x[0]), expected)
    each = torch.vmap(torch.func.grad(loss))(x)
    torch.testing.assert_close(each, torch.stack([torch.func.grad(loss)(z) for z in x]))
    mapped = torch.vmap(flash_attention_forward, (0, None, 1))(x, y[0], y.transpose(0, 1))
    torch.testing.assert_close(mapped, torch.stack([exact(x[i], y[0], y[i]) for i in range(3)]))
    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(loss, (x[0],), (x[0],))


@pytest.mark.parametrize("of", [lambda out: out.sum(), lambda out: out.square().sum()])
def test_gradients_of_gradients_are_refused(of):
    """Also where the gradient that comes in requires none: of a sum."""
    (x,) = tensors(1, 2, 6, 4, count=1)
    x.requires_grad_()
    value = of(flash_attention_forward(x, x, x))
    (grad,) = torch.autograd.grad(value, x, create_graph=True)
    with pytest.raises(NotImplementedError, match="not differentiable again"):
        (value + grad.square().sum()).backward()


def test_flops_are_those_of_the_products():
    x = tensors(2, 3, 50, 8)[0].requires_grad_()
    with FlopCounterMode(display=False) as counter:
        loss(x).backward()
    assert counter.get_total_flops() == (2 + 5) * 2 * 2 * 3 * 50 * 50 * 8


def test_autocast_is_off_inside():
    """Products of what is fp32 stay so."""
    q, k, v = tensors(1, 2, 40, 16, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, *_ = tiled_ops.fwd(q, k, v, 8, 8, False)
    assert (out.double() - exact(q, k, v)).abs().max() < 1e-5
