"""The small layers of flash_cute.core: OptimizedLinear and FusedGELU."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flash_cute.core import FusedGELU, OptimizedLinear
from flash_cute.testing.systems import contract, oracle
from flash_cute.testing.systems.findings import Findings, compare, with_gradients


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer, and the shape and strides of its input."""

    seed: int = 0
    kind: str = "linear"
    also: str = ""
    dtype: str = "float64"
    shape: tuple[int, ...] = (2, 3)
    width: int = 6
    outputs: int = 5
    bias: bool = True
    strides: str = "contiguous"
    level: str = "balanced"
    approximate: str = "none"
    argument: str = ""
    value: str = ""


def draw(pick: random.Random) -> Case:
    fields: dict[str, Any] = {
        "seed": pick.randrange(2**31), "kind": pick.choice(("linear", "linear", "gelu")),
        "also": pick.choice(("", "state", "copies", "leak", "refusal")),
        "dtype": pick.choice(("float64", "float32", "bfloat16", "float16")),
        "shape": tuple(pick.choice((0, 1, 2, 5)) for _ in range(pick.randint(0, 3))),
        "width": pick.choice((1, 6, 16)), "outputs": pick.choice((1, 5, 16)),
        "bias": pick.random() < 0.6, "strides": pick.choice(("contiguous", "transposed", "sliced")),
        "level": pick.choice(("conservative", "balanced", "aggressive")),
        "approximate": pick.choice(("none", "tanh")),
    }  # fmt: skip
    if fields["also"] == "refusal":
        fields["argument"] = pick.choice(tuple(REFUSED))
        fields["value"] = pick.choice(REFUSED[fields["argument"]])
    return Case(**fields)


REFUSED: contract.Refusals = {
    "optimization_level": ("text", "minus_one", "none"),
    "approximate": ("text", "minus_one", "none"),
    "in_features": ("minus_one", "half", "text", "true", "nan"),
    "out_features": ("minus_one", "half", "text", "true", "nan"),
}


def _check_refusal(find: Findings, case: Case) -> None:
    name, value = case.argument, contract.BAD[case.value]

    def make_bad() -> Any:
        if name == "approximate":
            return FusedGELU(value)
        return OptimizedLinear(**({"in_features": 4, "out_features": 4} | {name: value}))

    find.refused(make_bad, f"{name}={value!r}", name)


def make(case: Case, device: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if case.kind == "gelu":
        return FusedGELU(case.approximate)
    kind: dict[str, Any] = {"device": device, "dtype": getattr(torch, case.dtype)}
    return OptimizedLinear(case.width, case.outputs, case.bias, case.level, **kind)


def input_of(case: Case, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(case.seed)
    x = torch.randn(*case.shape, case.width, generator=generator)
    x = x.to(device, getattr(torch, case.dtype))
    if case.strides == "transposed" and x.dim() > 2:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    return torch.cat((x, x), -1)[..., : case.width] if case.strides == "sliced" else x


def check(case: Case, device: str) -> Findings:
    find = Findings()
    if case.also == "refusal":
        _check_refusal(find, case)
        return find
    layer, x = make(case, device, case.seed), input_of(case, device)
    inputs = {"x": x, **dict(layer.named_parameters())}

    def product(x: Tensor, **given: Tensor) -> Tensor:
        return torch.func.functional_call(layer, given, (x,))

    def true(x: Tensor, weight: Any = None, bias: Any = None) -> Tensor:
        if weight is None:
            return oracle.gelu(x, case.approximate)
        return oracle.linear(x, weight, bias)

    shape = contract.inputs_are_kept(find, inputs, lambda: layer(x)).shape
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(case.seed + 1))
    got = with_gradients(product, inputs, gradient.to(device))
    dtype = getattr(torch, case.dtype)
    find.that(got["out"].dtype == dtype, f"out has dtype {got['out'].dtype}; expected {dtype}")
    in_bf16 = case.kind == "linear" and case.level == "aggressive" and case.dtype == "float32"
    kind = torch.bfloat16 if in_bf16 else dtype
    compare(find, got, true, inputs, gradient.to(device), kind)
    if case.also == "state":
        fresh = make(case, device, case.seed + 7)
        contract.state_dict_holds_all(find, layer, fresh, lambda m: m(x))
    elif case.also == "copies":
        contract.copies_equal(find, layer, lambda m: m(x))
    elif case.also == "leak":
        contract.nothing_is_left(find, lambda: layer(x.requires_grad_()).sum())
    return find
