"""Attention of (B, H, N, D) in fp64, and inputs for it."""

from __future__ import annotations

import math

import torch

LIMITS = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}


def inputs(device, shape=(2, 3, 70, 24), dtype=torch.float32, count=3):
    generator = torch.Generator().manual_seed(hash(shape) % 1000)
    return [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(count)]


def reference(q, k, v):
    """(O, l, m) in fp64 of (B, H, N, D)."""
    q, k, v = (x.double().cpu() for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    m = scores.amax(-1)
    return scores.softmax(-1) @ v, (scores - m[..., None]).exp().sum(-1), m


def assert_close(got, expected, dtype, times=1.0):
    limit = times * LIMITS[dtype] * max(1.0, expected.abs().max().item())
    assert (got.double().cpu() - expected).abs().max().item() <= limit
