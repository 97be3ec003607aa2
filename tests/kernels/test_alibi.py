"""ALiBi where keys are far away: scores of thousands, of which only differences matter."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from flash_cute import ops, reference
from flash_cute.native import library
from flash_cute.testing import bounds
from flash_cute.testing.kernels import forward_families

HEADS = 4


class Far(NamedTuple):
    """A dense call with as many queries and keys, one slope for all heads."""

    seqlen_q: int
    seqlen_k: int
    dim: int
    slope: float
    dtype: torch.dtype
    causal: bool = False
    softmax_scale: float | None = None


FP16, BF16 = torch.float16, torch.bfloat16
FAR = {
    "d256": Far(20000, 16, 256, 0.3, FP16),
    "d64": Far(20000, 16, 64, 0.3, FP16),
    "k64": Far(20000, 64, 128, 0.3, FP16),
    "steep": Far(65536, 128, 128, 0.7, FP16),
    "steep_bf16": Far(65536, 128, 128, 0.7, BF16),
    "growing": Far(3000, 200, 64, -0.3, FP16),
    "few_queries": Far(16, 20000, 128, 0.3, FP16),
    "near": Far(1000, 1000, 128, 0.05, FP16),
    "causal": Far(2000, 2500, 64, 0.5, FP16, causal=True),
    "negative_scale": Far(5000, 100, 128, 0.3, FP16, softmax_scale=-0.1),
}


def tensors(far: Far, device: str) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(7)

    def normal(seqlen: int) -> torch.Tensor:
        x = torch.randn(1, seqlen, HEADS, far.dim, generator=generator)
        return x.to(device, far.dtype)

    return normal(far.seqlen_q), normal(far.seqlen_k), normal(far.seqlen_k)


def oracle(far: Far, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype):
    """out, and P|V|, in a dtype, on the tensors' device; rows in blocks."""
    slopes = torch.full((HEADS,), far.slope, device=q.device)
    both = torch.cat((v, v.abs()), -1).to(dtype)
    options = {"alibi_slopes": slopes, "is_causal": far.causal}
    options["softmax_scale"] = far.softmax_scale
    results = []
    step = 4096
    for first in range(0, far.seqlen_q, step):
        rows = q[:, first : first + step].to(dtype)
        # Bottom-right alignment: the last query of a block stands where it stands among all.
        behind = far.seqlen_q - min(first + step, far.seqlen_q)
        results.append(chain(rows, k.to(dtype), both, behind, **options))
    return torch.cat(results, 1).chunk(2, -1)


def chain(q, k, v, behind, alibi_slopes, is_causal, softmax_scale):
    """The unfused chain; query i of n is at key seqlen_k - behind - n + i."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    stand = k.shape[1] - behind - q.shape[1] + torch.arange(q.shape[1], device=q.device)
    distance = stand[:, None] - torch.arange(k.shape[1], device=q.device)
    scores = scores - alibi_slopes.to(q.dtype)[:, None, None] * distance.abs().to(q.dtype)
    if is_causal:
        scores = scores.masked_fill(distance < 0, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def errors(out: torch.Tensor, expected: torch.Tensor, of_abs_v: torch.Tensor) -> float:
    """The largest error, as a fraction of the contract's bound."""
    unit = bounds.ROUNDING_UNIT[out.dtype]
    bound = unit * expected.abs() + 2 * unit * of_abs_v + bounds.smallest(out.dtype)
    return float(((out.double() - expected).abs() / bound).max())


@pytest.mark.parametrize("name", FAR)
def test_far_keys(device, name):
    """Within the contract's bound where an fp32 chain is, and no worse than the older family."""
    far = FAR[name]
    if device == "cpu":  # a Python path, to which distances are nothing special
        far = far._replace(seqlen_q=min(far.seqlen_q, 500), seqlen_k=min(far.seqlen_k, 500))
    q, k, v = tensors(far, device)
    expected, of_abs_v = oracle(far, q, k, v, torch.float64)
    slopes = torch.full((HEADS,), far.slope, device=device)
    named = {"softmax_scale": far.softmax_scale, "is_causal": far.causal, "alibi_slopes": slopes}
    got = {"": errors(ops.fwd(q, k, v, **named)[0], expected, of_abs_v)}
    for family in forward_families(q.device) if q.is_cuda else ():
        with library.only(family):
            got[family] = errors(ops.fwd(q, k, v, **named)[0], expected, of_abs_v)
    unfused = errors(oracle(far, q, k, v, torch.float32)[0].to(far.dtype), expected, of_abs_v)
    print(name, got, f"fp32 chain {unfused:.2f}")
    most = max(1.0, 1.2 * unfused, 1.2 * got.get("fwd_sm80_", 0.0))
    assert max(got.values()) <= most, (got, unfused)


def test_oracle_is_the_reference():
    far = FAR["causal"]._replace(seqlen_q=300, seqlen_k=200)
    q, k, v = (x.double() for x in tensors(far, "cpu"))
    expected = reference.attention(
        q, k, v, is_causal=True, alibi_slopes=torch.full((HEADS,), far.slope)
    )[0]  # fmt: skip
    got = oracle(far, q, k, v, torch.float64)[0]
    seen = expected.abs().sum((2, 3)) > 0  # rows that see a key
    assert torch.allclose(got[seen], expected[seen], rtol=1e-9, atol=1e-12)
