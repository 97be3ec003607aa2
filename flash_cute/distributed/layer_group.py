"""The process group that layers share their tokens over, and its ContextParallels."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from flash_cute import _torch_internals as internals
from flash_cute.distributed import groups, registry
from flash_cute.distributed.arguments import check_group
from flash_cute.distributed.context import ContextParallel
from flash_cute.distributed.plan import Plan


class LayerGroup:
    """The ranks that share a layer's tokens, and their ContextParallels. Layers of one group share
    it, by :func:`layer_group`, so that a graph of one is a graph of all; what is saved and
    loaded knows all ranks of torch.distributed alone.

    Attributes:
        id: by which a graph finds it.
        contexts: by size and strategy.
    """

    def __init__(self, group: Any, is_lost: bool) -> None:
        self._is_lost = is_lost
        self.id = registry.register(self, group)
        self.contexts: dict[tuple[int, str], ContextParallel] = {}

    @property
    def value(self) -> Any:
        """The group; None is all ranks of torch.distributed, if it is initialised.

        Raises:
            RuntimeError: the layer was loaded, and its group was not all ranks.
        """
        if self._is_lost:
            raise RuntimeError(
                "the layer was made for a group of ranks, which is not saved with it: set its "
                "group, or None for all ranks of torch.distributed"
            )
        return registry.held_by(self.id)

    def __deepcopy__(self, memo: Any) -> LayerGroup:
        return self

    def __reduce__(self) -> Any:
        return layer_group, (None, self._is_lost or registry.held_by(self.id) is not None)

    def is_of(self, group: Any, is_lost: bool) -> bool:
        """Whether layers of this group share it."""
        return self._is_lost == is_lost and registry.held_by(self.id) is group


def layer_group(group: Any, is_lost: bool = False) -> LayerGroup:
    """The one of a group, as long as a layer has it. All ranks, by whichever name, are None."""
    if group is not None:
        check_group("group", group, "a ProcessGroup of this process, or None: all ranks")
        if group is dist.group.WORLD:
            group = None
    same = (x for x in registry.living(LayerGroup) if x.is_of(group, is_lost))
    return next(same, None) or LayerGroup(group, is_lost)


@internals.constant_in_graphs
def name_of(group_id: str, size: int, strategy: str) -> str:
    """The name of a layer's ContextParallel."""
    return context(registry.find(group_id), size, strategy).name


@internals.constant_in_graphs
def equal_plan(
    group_id: str, size: int, strategy: str, rows: int, causal: bool, window: tuple[int, int]
) -> Plan:
    """The plan of ranks with ``rows`` tokens each, without communication."""
    cp = context(registry.find(group_id), size, strategy)
    sizes = [rows] * size
    return cp.plan_alone(sum(sizes), causal=causal, window_size=window, sizes=sizes)


def context(of_layer: LayerGroup, size: int, strategy: str) -> ContextParallel:
    """The ContextParallel of ``size`` consecutive ranks of a layer's group: made once, and again
    if torch.distributed was restarted."""
    whole = dist.group.WORLD if of_layer.value is None else of_layer.value
    part = groups.part_of(whole, size)
    cp = of_layer.contexts.get((size, strategy))
    if cp is None or cp.group is not part:
        cp = ContextParallel(part, strategy=strategy, layout="contiguous")
        of_layer.contexts[size, strategy] = cp
    return cp
