"""Inputs of the laboratory's kernels, and the comparison of results with the fp64 reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flash_cute import reference
from flash_cute.lab.kernel_configs import DType

_ROUNDING_UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
_SMALLEST = {torch.float16: 2.0**-24, torch.bfloat16: 0.0}  # above 0; bf16 has fp32's range


def generate_qkv(
    batch_size: int,
    seq_len: int,
    n_heads: int,
    d_head: int,
    dtype: torch.dtype | DType = torch.bfloat16,
    device: torch.device | str | None = None,
    seed: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Standard normal q, k and v, (batch_size, seq_len, n_heads, d_head), contiguous.

    Args:
        batch_size, seq_len, n_heads, d_head: sizes, 0 or more.
        dtype: fp16 or bf16.
        device: by default the GPU, or the CPU if there is none.
        seed: of a new generator. By default the device's generator is used.

    Raises:
        TypeError: another dtype.
    """
    dtype = dtype.to_torch_dtype() if isinstance(dtype, DType) else dtype
    if dtype not in _ROUNDING_UNIT:
        raise TypeError(f"dtype is {dtype}; the laboratory has torch.float16 and torch.bfloat16")
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    shape = (batch_size, seq_len, n_heads, d_head)
    q, k, v = (
        torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
        for _ in range(3)
    )
    return q, k, v


def generate_qkvo(
    batch_size: int,
    seq_len: int,
    n_heads: int,
    d_head: int,
    dtype: torch.dtype | DType = torch.bfloat16,
    device: torch.device | str | None = None,
    seed: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`generate_qkv`, and an output of the same shape filled with NaN, which shows missing
    writes."""
    q, k, v = generate_qkv(batch_size, seq_len, n_heads, d_head, dtype, device, seed)
    return q, k, v, torch.full_like(q, torch.nan)


@dataclass(frozen=True)
class ErrorStatistics:
    """The error of an output against the fp64 reference.

    ``of_bound`` is the largest ratio of an element's error to its bound, u |o| + 2u P|V|: the
    rounding of P and of the output, with the dtype's rounding unit u (2^-11 for fp16, 2^-8 for
    bf16). In fp16 weights below 2^-24 of a row's largest may be lost, too. NaN anywhere makes it
    infinite.
    """

    max_abs: float
    mean_abs: float
    rms: float
    relative: float  # norm of the error / norm of the reference
    of_bound: float
    worst: tuple[int, ...]  # index of the element with the largest share of its bound

    @property
    def within_bound(self) -> bool:
        return self.of_bound <= 1.0


def reference_forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output in fp64, with the whole matrix of scores in memory."""
    return reference.attention(q, k, v).out


def error_statistics(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> ErrorStatistics:
    """Compares ``out`` with the fp64 reference of q, k and v, one sequence at a time.

    Raises:
        ValueError: ``out`` has another shape than q, or no elements.
    """
    if out.shape != q.shape or out.numel() == 0:
        raise ValueError(
            f"out has shape {tuple(out.shape)}, and q {tuple(q.shape)}: they must be equal, and "
            "not empty"
        )
    pairs = [_expected_and_bound(*(x[b : b + 1] for x in (q, k, v))) for b in range(len(q))]
    expected, bound = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    error = (out.double() - expected).abs()
    shares = (error / bound).nan_to_num(nan=torch.inf)
    index = int(shares.argmax())
    worst = tuple(int(i) for i in torch.unravel_index(torch.tensor(index, device="cpu"), out.shape))
    return ErrorStatistics(
        max_abs=float(error.max()),
        mean_abs=float(error.mean()),
        rms=float(error.square().mean().sqrt()),
        relative=float(error.norm() / expected.norm()),
        of_bound=float(shares.flatten()[index]),
        worst=worst,
    )


def _expected_and_bound(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the largest error that rounding allows each of its elements."""
    both = torch.cat((v, v.abs()), -1)
    out, lse, row_max, _ = reference.attention(q, k, both)
    expected, of_abs_v = out.chunk(2, -1)
    unit, smallest = _ROUNDING_UNIT[q.dtype], _SMALLEST[q.dtype]
    largest_weight = (row_max - lse).exp().transpose(-1, -2)[..., None]
    lost = smallest * largest_weight * v.double().abs().sum(1, keepdim=True)
    return expected, unit * expected.abs() + 2 * unit * of_abs_v + lost
