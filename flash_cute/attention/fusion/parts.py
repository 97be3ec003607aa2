"""Submodules of a fused block: whether each is still plain, checked at each call.

Only then may its weights be read instead of calling it. Hooks, adapters, quantisation, checkpoint
and sharding wrappers, parametrizations and pruning are all found here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from torch import Tensor, nn

from flash_cute import _torch_internals as internals
from flash_cute.attention.fusion.config import STEPS, FusionConfig, StepOptions

LINEARS = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
_WEIGHTS = (nn.Parameter, Tensor, internals.FakeTensor)
_NUMBERS = (bool, int, float, str)


def is_plain(part: Any, *kinds: type[nn.Module]) -> bool:
    """Whether a call of ``part`` is nothing but the forward of one of these classes, with weights
    that are ordinary tensors. 0.5 us."""
    if type(part) not in kinds or internals.has_hooks(part):
        return False
    state = vars(part)
    if "forward" in state:
        return False
    for weight in state["_parameters"].values():
        if weight is not None and type(weight) not in _WEIGHTS:
            return False
    return True


def are_plain(parts: Iterable[Any], *kinds: type[nn.Module]) -> bool:
    """:func:`is_plain` of all."""
    return all([is_plain(part, *kinds) for part in parts])


def difference(part: Any, *kinds: type[nn.Module]) -> str | None:
    """Why :func:`is_plain` refuses a submodule; None if it is plain."""
    if type(part) not in kinds:
        wanted = " or ".join(sorted({kind.__name__ for kind in kinds[:1]}))
        return f"is {type(part).__name__}, not torch's {wanted}"
    if is_plain(part, *kinds):
        return None
    if internals.has_hooks(part):
        return "has hooks, which would not be called"
    return "has a forward that is not its class's, or weights that are not ordinary tensors"


@dataclass
class Recognised:
    """A module whose computation was recognised by trial, and its state at that time.

    Args:
        module: itself.
        attributes: its attributes, without its children and its mode.
    """

    module: nn.Module
    attributes: dict[str, Any]

    @staticmethod
    def of(module: nn.Module) -> Recognised:
        return Recognised(module, _attributes(module))

    def is_unchanged(self, module: Any) -> bool:
        """Whether ``module`` is the same one and unchanged, apart from its children."""
        if module is not self.module or not is_plain(module, type(self.module)):
            return False
        state = vars(module)
        for name, before in self.attributes.items():
            now = state.get(name, state)
            if now is not before and not (type(before) in _NUMBERS and now == before):
                return False
        return len(state) == len(self.attributes) + len(_MODULE_ATTRIBUTES)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _MODULE_ATTRIBUTES}


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


class FusedBlock:
    """The base of the mixins for fused copies of blocks: a call that the fused form does not
    support goes to the block's own forward."""

    fusion: FusionConfig
    derived_from: ClassVar[tuple[type, type]]

    @property
    def step_options(self) -> StepOptions:
        """How its steps run."""
        return StepOptions(self.fusion.own_kernels, self.fusion.enable_memory_optimization)

    @property
    def fused_steps(self) -> tuple[str, ...]:
        """Names of the steps that are fused while their parts are plain."""
        return STEPS[self.fusion.strategy]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty, type(self).derived_from, vars(self)


def fused_copy(block: nn.Module, mixin: type[FusedBlock], config: FusionConfig) -> Any:
    """A copy of a block with the same submodules, of a class derived from the block's."""
    copy: Any = internals.copy_of(block)
    bases: Any = (mixin, type(block))
    copy.__class__ = fused_class(*bases)
    copy.fusion = config
    return copy


@lru_cache(256)
def fused_class(mixin: Any, base: Any) -> type:
    """The class of fused blocks of a class."""
    names = {"__module__": mixin.__module__, "derived_from": (mixin, base)}
    return type(f"Fused{base.__name__}", (mixin, base), names)


def _empty(mixin: type, base: type) -> Any:
    return object.__new__(fused_class(mixin, base))


def own_method(module: nn.Module) -> str | None:
    """The name of a method that an object's attribute overrides; None if there is none."""
    for name, value in vars(module).items():
        if callable(value) and callable(getattr(type(module), name, None)):
            return name
    return None
