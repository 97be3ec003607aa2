"""Calls over a key/value cache that several test files make."""

from __future__ import annotations

from typing import Any

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
