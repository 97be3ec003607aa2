"""The validator under the process's settings of matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from flash_cute.core import AttentionLayer
from flash_cute.utils.validation_framework import ComponentValidator


def choices() -> list[str]:
    backends = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn,
                torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv)  # fmt: skip
    return [torch.backends.fp32_precision, *(backend.fp32_precision for backend in backends)]


def set_new(name: str, value: str) -> Callable[[], None]:
    backend, _, op = name.partition(".")
    return lambda: setattr(getattr(getattr(torch.backends, backend), op), "fp32_precision", value)


SETTINGS: dict[str, Callable[[], None]] = {
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "mkldnn": set_new("mkldnn.matmul", "bf16"),
    "mkldnn and cuda": lambda: (
        set_new("mkldnn.matmul", "tf32")(),
        set_new("cuda.matmul", "tf32")(),
    ),
    "all": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
}


@pytest.fixture(params=SETTINGS)
def setting(request: pytest.FixtureRequest) -> Iterator[str]:
    SETTINGS[request.param]()
    yield request.param
    torch.backends.fp32_precision = "none"
    torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True  # "none" leaves cudnn's own settings mixed


@pytest.fixture
def general_setting() -> Iterator[None]:
    yield
    torch.backends.fp32_precision = "none"
    torch.backends.cudnn.allow_tf32 = True


class Rounded(nn.Linear):
    """Multiplies in bf16, whatever is chosen."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight.bfloat16(), self.bias.bfloat16()
        return nn.functional.linear(input.bfloat16(), weight, bias).to(input.dtype)


def test_right_layers_pass_and_wrong_ones_fail_under_any_setting(setting: str, device: str):
    before, validator = choices(), ComponentValidator(device)
    for results in (
        validator.validate_linear_component(nn.Linear(256, 64), 256, 64),
        validator.validate_attention_component(AttentionLayer(64, 4), 64, 4),
    ):
        assert results["passed"], results["failures"]
    assert not validator.validate_linear_component(Rounded(256, 64), 256, 64)["passed"]
    assert choices() == before
    if setting in ("high", "medium"):
        assert torch.get_float32_matmul_precision() == setting


def test_a_more_general_precision_setting_still_applies(general_setting: None):
    torch.backends.fp32_precision = "tf32"
    ComponentValidator("cpu").validate_linear_component(nn.Linear(8, 8), 8, 8)
    torch.backends.fp32_precision = "ieee"
    assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"


def test_right_layers_pass_under_autocast(device: str):
    validator = ComponentValidator(device)
    with torch.autocast(device, torch.bfloat16):
        results = validator.validate_linear_component(nn.Linear(64, 64), 64, 64)
        assert torch.is_autocast_enabled(device)
    assert results["passed"], results["failures"]
