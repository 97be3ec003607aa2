"""Calls over a key/value cache that several test files make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import flash_cute
from flash_cute.testing import bounds
from flash_cute.testing.kvcache import CacheInputs


def call(inputs: CacheInputs, **extra: Any) -> Any:
    """What the public function answers."""
    arguments = dict(inputs.arguments)
    left, right = arguments.pop("window_size_left"), arguments.pop("window_size_right")
    arguments |= {"causal": arguments.pop("is_causal"), "window_size": (left, right)}
    return flash_cute.flash_attn_with_kvcache(**(arguments | extra))


def check_same(got: CacheInputs, expected: CacheInputs) -> None:
    """Both calls have the same bits as results and in the caches."""
    got, expected = got.fresh(), expected.fresh()
    names = ("out", "softmax_lse")
    for name, a, b in zip(names, got.run(), expected.run(), strict=True):
        bounds.check_same_bits(name, a, b)
    for name in ("k_cache", "v_cache"):
        bounds.check_same_bits(name, got[name], expected[name])


def check_order(steps: Callable[[Callable[[], None]], list[torch.Tensor]]) -> None:
    """Steps on CUDA that depend on each other, `steps(pause)`, have the same bits as results if
    nothing waits for the device between them, in eager and in a graph, as if all of them do."""
    expected = steps(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = steps(lambda: None)
    graph.replay()
    for results in (captured, steps(lambda: None)):
        for a, b in zip(results, expected, strict=True):
            bounds.check_same_bits("results", a, b)
