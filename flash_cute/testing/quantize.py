"""Random calls of quantize_e4m3, and checks of their results: in fp64 on the CPU, and of CUDA's
kernels, whose bits are the CPU's."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_cute.call.fp8 import of_rows
from flash_cute.ops.typed import OPS
from flash_cute.testing.e4m3 import wide

SCALINGS = ("head", "tensor", "row", "channel")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST = 448.0
SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 65504.0, 1e-7, 3e38, -3e38, 1e-40)


class Call(NamedTuple):
    x: Tensor
    cu_seqlens: Tensor | None = None
    scaling: str = "head"
    heads_k: int | None = None
    power_of_two: bool = False
    hadamard: bool = False
    subtract_mean: bool = False


def on_cuda(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """On the GPU, of x with its strides there."""
    x, cu = call.x, call.cu_seqlens
    there = x.cuda()
    if there.stride() != x.stride():
        room = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
        there = room.copy_(x)
    return OPS.quantize_e4m3(*call._replace(x=there, cu_seqlens=None if cu is None else cu.cuda()))


def bits(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.cpu().view(torch.uint8 if x.itemsize == 1 else torch.int32)


def check_bits(call: Call) -> None:
    """On CUDA: values and descales are those of the CPU, of x without the mean of the GPU."""
    values, descale, mean = on_cuda(call)
    x = call.x.float()
    if mean is not None:
        exact = OPS.quantize_e4m3(*call)[2]
        assert exact is not None and mean.shape == exact.shape
        finite = torch.where(x.isfinite(), x.abs(), 0)
        largest = finite.max().item() if x.numel() > 0 else 0.0
        torch.testing.assert_close(mean.cpu(), exact, rtol=1e-4, atol=2.0**-17 * largest)
        x = x - of_rows(mean.cpu(), x, call.cu_seqlens) if len(mean) > 0 else x
    plain = call._replace(x=x, subtract_mean=False)
    expected, expected_descale, _ = OPS.quantize_e4m3(*plain)
    assert values.shape == expected.shape and values.is_contiguous()
    assert descale.shape == expected_descale.shape and descale.is_contiguous()
    told = f"{call.x.shape} {call.x.dtype} {call.x.stride()} {call[1:]}"
    assert torch.equal(bits(descale), bits(expected_descale)), told
    assert torch.equal(bits(values), bits(expected)), told


def drawn(seed: int) -> Call:
    """A random call: dense or packed, with empty sequences and rows of none, of any strides."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    scaling, dtype, hadamard = draw.choice(SCALINGS), draw.choice(DTYPES), draw.random() < 0.4
    if hadamard:
        dim = 2 ** draw.randint(0, 11)
    else:
        dim = draw.choice(
            [draw.randint(1, 300), 64, 80, 96, 128, 192, 256, draw.randint(257, 1100)]
        )
    heads_k = draw.choice([1, 2, 3, 5]) if dim < 600 else 2
    group = 1 if scaling == "channel" or dim >= 600 else draw.choice([1, 1, 2, 3, 4])
    longest = draw.choice([20, 40, 300]) if dim <= 256 else 20
    cu: Tensor | None = None
    lead: tuple[int, ...] = (
        draw.choice([0, 1, 1, 2, 3]),
        draw.choice([0, 1, draw.randint(1, longest)]),
    )
    if draw.random() < 0.5:
        lengths = [draw.choice([0, 1, draw.randint(0, longest)]) for _ in range(draw.randint(0, 9))]
        offsets = [draw.choice([0, 0, 7])]
        for length in lengths:
            offsets.append(offsets[-1] + length)
        cu, lead = torch.tensor(offsets, dtype=torch.int32), (offsets[-1] + draw.choice([0, 3]),)
    shape = (*lead, heads_k * group, dim)
    size = 10 ** draw.uniform(-30 if draw.random() < 0.1 and dtype.itemsize > 2 else -3, 3)

    def numbers(*shape: int) -> Tensor:
        of_rows = torch.randn(*shape[:-1], 1, generator=generator).exp()
        x = torch.randn(shape, generator=generator) * of_rows + draw.choice([0, 0, 3])
        return (x * size).to(dtype)

    match draw.randrange(5):
        case 0:
            x = numbers(*shape)
        case 1:
            x = numbers(*shape[:-1], dim + draw.choice([1, 8]))[..., :dim]
        case 2:
            x = numbers(*shape[:-1], dim + 3)[..., 3:]
        case 3:
            x = numbers(*shape[:-1], 2 * dim)[..., ::2]
        case _:
            x = numbers(*lead[:-1], shape[-2], lead[-1], dim).transpose(-2, -3)
    if x.numel() > 0 and draw.random() < 0.4:
        for _ in range(draw.choice([1, 3, 20])):
            x[tuple(map(draw.randrange, x.shape))] = draw.choice(SPECIAL)
    if draw.random() < 0.1:
        x[..., 0, :] = -0.0
    named_heads = None if scaling == "channel" else heads_k
    flags = (draw.random() < 0.4, hadamard, draw.random() < 0.4)
    return Call(x, cu, scaling, named_heads, *flags)


def check_values(call: Call) -> float:
    """On the CPU: what values and descales stand for is x in fp64, less the mean, times the
    Hadamard matrix with signs; and the largest value that shares a descale is 448, or with powers
    of two more than 216. Numbers above 1e37 may overflow, and are not looked at.

    Returns:
        The largest error, as a fraction of its bound.
    """
    values, descale, mean = OPS.quantize_e4m3(*call)
    assert values.is_contiguous() and descale.is_contiguous()
    x = call.x.double()
    finite = torch.where(x.isfinite(), x, 0.0)
    if finite.numel() > 0 and finite.abs().max() > 1e37:
        return 0.0
    units = wide(torch.ones_like(values), descale, call.cu_seqlens)
    stood_for, codes = values.double() * units, values.double().nan_to_num(0.0).abs()
    worst, of_all = 0.0, [torch.zeros(3, 1, dtype=torch.float64)]
    for b, rows in enumerate(_sequences(call)):
        y = x[rows]
        if mean is not None:
            sums = finite[rows].sum(0), finite[rows].abs().sum(0)
            exact, size = (total / max(1, len(y)) for total in sums)
            worst = max(worst, _largest((mean[b] - exact).abs() / (2.0**-16 * size + 1e-37)))
            y = y - mean[b].double()
        size = torch.where(y.isfinite(), y, 0.0).norm(dim=-1, keepdim=True)
        lost = 2.0**-20 * size  # of fp32's sums over a row
        if call.hadamard:
            y = y @ _spreading(y.shape[-1])
        seen = y.isfinite()
        assert torch.equal(values[rows].double().isnan(), ~seen)
        bound = 2.0**-4 * y.abs() + 2.0**-10 * units[rows] + lost
        worst = max(worst, _largest(((stood_for[rows] - y).abs() / bound)[seen]))
        y, lost = torch.where(seen, y.abs(), 0.0), lost.expand(y.shape)
        tops = torch.stack([_tops(call, descale, z) for z in (codes[rows], y, lost)])
        if call.scaling == "tensor":
            of_all.append(tops)
        else:
            _check_tops(tops, descale[rows if call.scaling == "row" else b], call.power_of_two)
    if call.scaling == "tensor":
        _check_tops(torch.cat(of_all, 1).amax(1, keepdim=True), descale, call.power_of_two)
    assert worst <= 1, f"up to {worst} times the bound"
    return worst


def _tops(call: Call, descale: Tensor, of_sequence: Tensor) -> Tensor:
    """The largest of (rows, heads, dim) that share a descale."""
    if call.scaling == "row":
        return of_sequence.amax(-1, keepdim=True)
    of_channels = torch.cat((of_sequence, of_sequence.new_zeros(1, *of_sequence.shape[1:]))).amax(0)
    if call.scaling == "channel":
        return of_channels
    of_heads = of_channels.amax(-1)
    if call.scaling == "head":
        return of_heads.unflatten(0, (descale.shape[1], -1)).amax(1)
    return of_heads.amax(0, keepdim=True)


def _sequences(call: Call) -> list[Any]:
    """The rows of each sequence, as indices of x."""
    if call.cu_seqlens is None:
        return list(range(len(call.x)))
    return [slice(*span) for span in itertools.pairwise(call.cu_seqlens.tolist())]


def _check_tops(tops: Tensor, descales: Tensor, power_of_two: bool) -> None:
    """Descales are the largest size of what shares them / 448, or the least power of two above,
    and 1 of zeros; none is below the least normal number of fp32. `tops`: the largest values,
    sizes, and how far these are off."""
    codes, sizes, lost = tops.unbind()
    most, lost = descales.double() * LARGEST, lost + 2.0**-20 * sizes
    if power_of_two:
        right = (torch.frexp(descales)[0] == 0.5) & (sizes - lost <= most) & (codes > 216)
        right &= most / 2 <= sizes + lost
    else:
        right = ((most - sizes).abs() <= lost) & (codes == LARGEST)
    right |= ((codes == 0) & (descales == 1)) | (descales < 2.0**-124)
    assert right.all(), f"descales {descales} of sizes up to {sizes}, values up to {codes}"


def _largest(ratios: Tensor) -> float:
    return ratios.max().item() if ratios.numel() > 0 else 0.0


def _spreading(dim: int) -> Tensor:
    """The Hadamard matrix with the signs of Rudin and Shapiro before it, orthonormal, in fp64."""
    bits_of = [[(i >> bit) & 1 for bit in range(dim.bit_length())] for i in range(dim)]
    table = torch.tensor(bits_of, dtype=torch.float64)
    signs = 1 - 2 * ((table[:, 1:] * table[:, :-1]).sum(1) % 2)
    return signs[:, None] * (1 - 2 * (table @ table.T % 2)) * dim**-0.5
