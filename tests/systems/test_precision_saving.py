"""What UltraPrecisionModule keeps for backward: no cycles, the right weight, changes noticed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_cute.precision import PrecisionConfig, create_ultra_precision_module
from flash_cute.precision.saving import weights_restored_in_backward


class OwnExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * ctx.saved_tensors[0]


def part_in_place(x: Tensor) -> Tensor:
    y = x * 2
    y[0].sigmoid_()
    return y


SAVE_THEIR_OUTPUT: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "exp": torch.exp,
    "sqrt": lambda x: (x * x + 1).sqrt(),
    "own function": OwnExp.apply,
    "a view of it": lambda x: x.exp().view(-1)[1:],
    "in place": lambda x: (x * 2).relu_(),
    "in place on a view": part_in_place,
    "norm": lambda x: x.norm(dim=-1),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.T + torch.eye(4)),
    "sparse": lambda x: torch.sparse.mm(torch.eye(4).to_sparse(), x),
}


@pytest.mark.parametrize("function", SAVE_THEIR_OUTPUT.values(), ids=SAVE_THEIR_OUTPUT)
def test_results_die_with_their_last_user(function: Callable[[Tensor], Tensor]):
    """At once, without the garbage collector, which does not see cycles through autograd."""
    x = torch.randn(4, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(function(x).square().sum(), x)
    gc.disable()
    try:
        with weights_restored_in_backward():
            y = function(x)
        (grad,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
        result, storage = weakref.ref(y), weakref.ref(y.untyped_storage())
        del y
        assert result() is None and storage() is None
    finally:
        gc.enable()
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("layer", [nn.ReLU, nn.Sigmoid, nn.Tanh, lambda: nn.Softmax(-1)])
def test_a_module_in_grad_mode_keeps_nothing_after_its_calls(layer: Callable[[], nn.Module]):
    net = nn.Sequential(nn.Linear(64, 128), layer(), nn.Linear(128, 64))
    small = create_ultra_precision_module(net, PrecisionConfig(target_memory_reduction=0.3))
    kept: list[weakref.ref[torch.UntypedStorage]] = []
    small.model[1].register_forward_hook(
        lambda _, args, out: kept.append(weakref.ref(out.untyped_storage()))
    )
    for _ in range(3):
        small(torch.randn(5, 64, requires_grad=True))
    assert len(kept) == 3 and all(storage() is None for storage in kept)


def test_second_derivatives_of_saved_results():
    x = torch.randn(7, dtype=torch.float64, requires_grad=True)

    def second(y: Tensor) -> Tensor:
        (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.autograd.grad(dx.sum(), x)[0]

    with weights_restored_in_backward():
        y = torch.tanh(x)
    torch.testing.assert_close(second(y), -2 * torch.tanh(x) / torch.cosh(x).square())


class Masked(nn.Module):
    """Writes into the weight that it has read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        if not weight.is_leaf or not weight.requires_grad:
            weight.mul_(torch.arange(64) % 2)
        return F.linear(x, weight)


def test_a_restored_weight_cannot_be_written():
    """Backward restores it anew, and would not see what was written."""
    small = create_ultra_precision_module(
        Masked(), PrecisionConfig(target_memory_reduction=0.3), calibration=torch.randn(3, 64)
    )
    x = torch.randn(3, 64, requires_grad=True)
    with pytest.raises(RuntimeError, match="restored from packed codes at each access"):
        small(x)


def test_tensors_without_memory():
    """All of them have one address; so they cannot be told by it."""
    net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    small = create_ultra_precision_module(net, PrecisionConfig(target_memory_reduction=0.3))
    x = torch.randn(5, 64, device="meta", requires_grad=True)
    small.to("meta")(x).sum().backward()
    assert x.grad is not None and x.grad.shape == (5, 64)
