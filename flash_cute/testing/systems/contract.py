"""The contract of every module: state dicts, copies, inputs, modes, leaks, gradients."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flash_cute import _torch_internals as internals
from flash_cute.testing.systems.findings import Findings, same_bits

Call = Callable[[Any], Any]

BAD: dict[str, Any] = {
    "zero": 0, "minus_one": -1, "minus_three": -3, "true": True, "nan": math.nan, "inf": math.inf,
    "half": 1.5, "text": "8", "none": None, "pair": (1, 2), "two": 2.0, "single": (1,),
    "low_pair": (-2, 0), "float_pair": (1.5, 0), "true_pair": (True, 0),
}  # fmt: skip
WHOLE = ("zero", "minus_one", "minus_three", "true", "nan", "half", "text")
PROBABILITY = ("minus_one", "nan", "half", "text", "inf")
WINDOW = ("single", "low_pair", "float_pair", "true_pair", "text", "half")
Refusals = dict[str, tuple[str, ...]]


def saved(state: Any) -> Any:
    """A state dict that was saved, and loaded with ``weights_only``."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def state_dict_holds_all(find: Findings, module: nn.Module, fresh: nn.Module, call: Call) -> None:
    """A new module with other values computes the same bits after it loads the saved state."""
    with find.trying("state_dict"):
        state = saved(module.state_dict())
        missing = dict(module.named_parameters()).keys() - state.keys()
        find.that(not missing, f"state_dict has other names than parameters: {sorted(missing)[:3]}")
        others = [name for name, x in state.items() if not isinstance(x, Tensor)]
        find.that(not others, f"state_dict holds values that are not tensors: {others[:3]}")
        fresh.load_state_dict(state)
        fresh.train(module.training)
        find.equal("after load_state_dict", call(fresh), call(module))


def copies_equal(
    find: Findings, module: nn.Module, call: Call, ways: tuple[str, ...] = ("deepcopy", "pickle")
) -> None:
    """A deep copy and a pickled one compute the same bits, and share no parameter."""
    for name in ways:
        make = copy.deepcopy if name == "deepcopy" else _pickled
        with find.trying(name):
            other = make(module)
            find.that(other.training == module.training, f"{name}: another mode")
            own = {x.data_ptr() for x in module.parameters() if x.numel()}
            shared = [n for n, x in other.named_parameters() if x.numel() and x.data_ptr() in own]
            find.that(not shared, f"{name} shares {shared[:3]}")
            find.equal(name, call(other), call(module))


def _pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def inputs_are_kept(
    find: Findings, inputs: Mapping[str, Tensor | None], call: Callable[[], Any]
) -> Any:
    """Runs the call, and checks that it did not write to inputs."""
    given = {name: x for name, x in inputs.items() if x is not None}
    before = {name: (x.detach().clone(), internals.version(x)) for name, x in given.items()}
    result = call()
    for name, (value, version) in before.items():
        x = given[name]
        kept = internals.version(x) == version and same_bits(x.detach(), value)
        find.that(kept, f"{name} was written")
    return result


def mode_reaches_all(find: Findings, module: nn.Module) -> None:
    """train() and eval() reach every part."""
    was = module.training
    for mode in (not was, was):
        module.train(mode)
        off = [n for n, part in module.named_modules() if part.training != mode]
        find.that(not off, f"train({mode}) does not reach {off[:3]}")


def live_tensors() -> tuple[int, int]:
    """Tensors that Python still holds after a collection, and their bytes."""
    for _ in range(5):  # finalizers may free more, which the next round collects
        if not gc.collect():
            break
    alive = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
    return len(alive), sum(x.numel() * x.element_size() for x in alive)


def nothing_is_left(find: Findings, call: Callable[[], Any]) -> None:
    """Six more calls leave less than one tensor each alive in addition to those after two calls.

    The first two calls fill caches, which do not count.
    """
    for _ in range(2):
        call()
    before = live_tensors()
    for _ in range(6):
        call()
    after = live_tensors()
    grew = after[0] - before[0]
    find.that(grew < 6, f"6 calls left {grew} tensors of {after[1] - before[1]} bytes alive")


def slope_matches(
    find: Findings, call: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor, seed: int
) -> None:
    """With the same random numbers the gradient of x (fp64) is the finite difference of two calls.

    Central differences err by step^2 and rounding / step: 1e-10 and 1e-9 for a step of 1e-5.
    """
    step = 1e-5
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)

    def value(at: Tensor) -> Tensor:
        torch.manual_seed(seed)
        return (call(at) * gradient).sum()

    leaf = x.detach().clone().requires_grad_()
    (grad,) = torch.autograd.grad(value(leaf), leaf)
    with torch.no_grad():
        ahead, behind = value(x + step * direction), value(x - step * direction)
    slope = float((ahead - behind) / (2 * step))
    expected = float((grad * direction).sum())
    size = float((grad.norm() * direction.norm()).clamp(min=1e-3))
    find.close("slope", torch.tensor(expected), torch.tensor(slope), 1e-5 * size + 1e-6)
