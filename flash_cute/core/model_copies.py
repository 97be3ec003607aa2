"""Deep copies of models; torch refuses them if a module keeps a result of its last forward."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

T = TypeVar("T")
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def copied(model: T, memo: dict[int, Any] | None = None) -> T:
    """``copy.deepcopy(model, memo)``, which copies stored results (in attributes, lists, buffers or
    other objects) as values, without their autograd graph."""
    with _ResultsAsValues():
        return copy.deepcopy(model, memo)


class _ResultsAsValues(TorchFunctionMode):
    """Inside, tensors can be deep-copied that torch refuses: results, compressed layouts."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        if func in (Tensor.__deepcopy__, Tensor.clone) and args[0].layout in _COMPRESSED:
            return args[0].detach().clone().requires_grad_(args[0].requires_grad)
        return func(*args, **(kwargs or {}))
