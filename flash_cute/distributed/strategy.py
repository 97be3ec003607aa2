"""``Strategy``: how ranks compute attention over tokens that are split between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flash_cute.distributed.comm import Group
from flash_cute.distributed.costs import Links, Sizes
from flash_cute.distributed.layouts import Runs
from flash_cute.distributed.local import Saved
from flash_cute.distributed.plan import Plan
from flash_cute.ops.typed import FwdCall


class Strategy(ABC):
    """A strategy; :mod:`flash_cute.distributed.strategies` lists all by their names.

    Attributes:
        name: of plans and contexts.
        is_2d: whether it needs a mesh of two dimensions.
        balances: whether a rank's work depends on which tokens it has. The layout "auto" then
            gives all ranks equal work.
        takes_dropout: whether dropout is supported, with a mask that does not depend on the ranks.
    """

    name: ClassVar[str]
    is_2d: ClassVar[bool] = False
    balances: ClassVar[bool] = True
    takes_dropout: ClassVar[bool] = False

    def inner(self, ranks: int, mesh: DeviceMesh | None) -> int:
        """How many ranks exchange tokens for heads before attention."""
        return 1

    def expected_time(self, sizes: Sizes, ranks: int, links: Links) -> float | None:
        """Seconds of forward and backward of one layer; None if "auto" never chooses it."""
        return None

    @abstractmethod
    def keys(self, plan: Plan) -> tuple[Runs, ...]:
        """The keys that a rank's queries attend to, in parts that arrive one after the other."""

    @abstractmethod
    def forward(self, plan: Plan, rank: int, group: Group, call: FwdCall) -> tuple[Tensor, Tensor]:
        """out and lse of this rank's queries; ``rank`` of ``group``, whose ranks share tokens."""

    @abstractmethod
    def backward(
        self, plan: Plan, rank: int, group: Group, call: FwdCall, saved: Saved
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv of this rank's tokens, in the dtype of sums."""
