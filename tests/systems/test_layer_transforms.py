"""Layers under torch's transforms: dynamic sizes, torch.func, checkpoints, numeric gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_cute import check
from flash_cute.attention import AttentionConfig, FP8AttentionConfig, create_attention
from flash_cute.core import AttentionLayer

D, HEADS = 64, 4
SIZES = [(2, 30), (3, 41), (5, 7), (4, 100)]
LAYERS: dict[str, Callable[..., nn.Module]] = {
    "AttentionLayer": lambda **kind: AttentionLayer(D, HEADS, 0.0, **kind),
    "grouped": lambda **kind: create_attention(
        AttentionConfig(D, HEADS, "causal", num_kv_heads=2, **kind)
    ),
    "fp8": lambda **kind: create_attention(FP8AttentionConfig(D, HEADS, **kind)),
}


def inputs(device: str, batch: int = 2, seqlen: int = 30) -> tuple[Tensor, Tensor]:
    torch.manual_seed(batch)
    x = torch.randn(batch, seqlen, D, device=device)
    return x, torch.rand(batch, seqlen, device=device) < 0.5


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_dynamic_sizes_are_one_graph(device, name, masked):
    layer = LAYERS[name](device=device)
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for batch, seqlen in SIZES:
        args = inputs(device, batch, seqlen)[: 1 + masked]
        torch.testing.assert_close(compiled(*args), layer(*args))
    assert len(graphs) == 1


@pytest.mark.parametrize("name", LAYERS)
def test_exports_with_dynamic_sizes(device, name):
    layer = LAYERS[name](device=device)
    sizes = {i: torch.export.Dim(x, min=2, max=4096) for i, x in enumerate(("batch", "seqlen"))}
    exported = torch.export.export(layer, inputs(device), dynamic_shapes=(sizes, sizes)).module()
    args = inputs(device, 3, 41)
    torch.testing.assert_close(exported(*args), layer(*args))


@pytest.mark.parametrize("name", ["AttentionLayer", "grouped"])
def test_gradients_of_samples(device, name):
    layer = LAYERS[name](device=device)
    parameters = {key: x.detach() for key, x in layer.named_parameters()}
    x, keep = inputs(device)

    def loss(parameters: dict[str, Tensor], x: Tensor, keep: Tensor) -> Tensor:
        out = torch.func.functional_call(layer, parameters, (x[None], keep[None]))
        return out.square().sum()

    grads = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, keep)
    for i in range(len(x)):
        layer.zero_grad()
        layer(x[i : i + 1], keep[i : i + 1]).square().sum().backward()
        for key, y in layer.named_parameters():
            torch.testing.assert_close(grads[key][i], y.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("masked", [False, True])
def test_checkpoints_replay_dropout(device, masked):
    layer = AttentionLayer(D, HEADS, dropout=0.3, device=device)
    args = inputs(device)[: 1 + masked]
    x = args[0].requires_grad_()
    grads = []
    for call in (layer, lambda *args: checkpoint(layer, *args, use_reentrant=False)):
        torch.manual_seed(0)
        grads.append(torch.autograd.grad(call(*args).square().sum(), x)[0])
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize("name", ["AttentionLayer", "grouped"])
def test_numeric_gradients(name):
    layer = LAYERS[name](dtype=torch.float64)
    x = torch.randn(2, 4, D, dtype=torch.float64).requires_grad_()
    keep = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]])
    assert torch.autograd.gradcheck(lambda x: layer(x, keep), x, fast_mode=True)
    key = torch.randn(2, 3, D, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, key: layer(x, key=key), (x, key), fast_mode=True)


def test_deterministic_algorithms_and_checks_have_nothing_to_say(device):
    layer = create_attention(AttentionConfig(D, HEADS, deterministic=True, device=device))
    x, keep = inputs(device)
    torch.use_deterministic_algorithms(True)
    try:
        with check.switched():
            out = layer(x.requires_grad_(), keep)
            out.square().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert x.grad is not None and x.grad.isfinite().all()


def test_module_moves_and_casts(device):
    layer = LAYERS["grouped"]()
    x, keep = inputs("cpu")
    expected = layer(x, keep)
    moved = layer.to(device)
    torch.testing.assert_close(moved(x.to(device), keep.to(device)).cpu(), expected)
    assert moved.bfloat16()(x.to(device).bfloat16()).dtype == torch.bfloat16
