"""Models that keep results of their last forward are converted, packed, estimated and validated."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_cute.core.model_copies import copied
from flash_cute.hardware import HardwareAbstractionLayer
from flash_cute.precision import (
    FP8LinearLayer,
    PrecisionConfig,
    analyze_precision_opportunities,
    convert_model_to_fp8,
    create_ultra_precision_module,
)
from flash_cute.utils.validation_framework import ComponentValidator


class Keeps(nn.Module):
    """Keeps its last result, in one way or another."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(64, 64), how
        self.kept: Any = SimpleNamespace() if how == "object" else []
        self.register_buffer("last", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        if self.how == "attribute":
            self.kept = out
        elif self.how == "object":
            self.kept.out = {"out": out}
        elif self.how == "buffer":
            self.last = out
        else:
            self.kept = [(out, {"twice": 2 * out})]
        return out * 1


HOW = ["attribute", "object", "buffer", "list"]
SAMPLE = torch.randn(5, 64)
USES: dict[str, Callable[[nn.Module], object]] = {
    "convert": lambda m: convert_model_to_fp8(m, inplace=False),
    "pack": lambda m: create_ultra_precision_module(
        m, PrecisionConfig(target_memory_reduction=0.0)
    ),
    "analyze": lambda m: analyze_precision_opportunities(m, SAMPLE, "cpu"),
    "estimate": lambda m: HardwareAbstractionLayer([]).estimate_memory_usage(m, 4),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("how", HOW)
def test_a_model_that_keeps_a_result_can_be_fused(how: str, use: str):
    model = Keeps(how)
    out = model(SAMPLE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = USES[use](model)
    if use == "convert":
        assert isinstance(made.linear, FP8LinearLayer) and type(model.linear) is nn.Linear
    out.sum().backward()  # the graph of the model's own result is whole
    assert model.linear.weight.grad is not None


@pytest.mark.parametrize("how", HOW)
def test_a_layer_that_keeps_a_result_is_validated(how: str):
    model = Keeps(how)
    model(SAMPLE)
    results = ComponentValidator().validate_linear_component(model, 64, 64)
    assert results["passed"] is True, results["failures"]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_copies_share_nothing_but_are_alike_inside():
    model = Keeps("attribute")
    result = model(SAMPLE)
    model.several = [model.kept, {"of": model.kept}]
    model.register_buffer("csr", torch.eye(4).to_sparse_csr())
    model.sparse = nn.Parameter(torch.eye(4).to_sparse_csr())
    made = copied(model)
    assert made.kept is made.several[0] is made.several[1]["of"] and made.kept.grad_fn is None
    assert made.linear.weight is not model.linear.weight and made.linear.weight.requires_grad
    before = result.detach().clone()
    made.kept.zero_()
    made.csr.values().zero_()
    assert torch.equal(result, before) and torch.equal(model.csr.to_dense(), torch.eye(4))
    assert isinstance(made.sparse, nn.Parameter) and made.sparse.requires_grad
    assert torch.equal(made.sparse.to_dense(), torch.eye(4))
