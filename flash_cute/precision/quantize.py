"""Rounding of a matrix's rows to few bits, and codes of any width packed into bytes.

An ``INTb`` value is ``step * (code - zero)``, code from 0 to 2^b - 1. ``zero`` is either in the
middle of the codes, so that levels are symmetric, or 2^(b-1), so that 0 is a level. A step is
shared by a row, or by ``group`` columns of it, and is stored in fp16, divided by a power of two; or
in bf16, if the steps of a block exceed the range of fp16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_cute.precision.settings import PrecisionFormat

FP8_MAX = 448.0
LEAST_STEP = 2.0**-11  # relative to a block's largest step: smaller ones lose bits in fp16
# Ranges to try, relative to the largest value: with few bits clipping lowers the error.
SHRINKS = {1: (1, 0.5, 0.3), 2: (1, 0.7, 0.5), 3: (1, 0.8, 0.65), 4: (1, 0.9, 0.8), 5: (1, 0.9)}


@dataclass(frozen=True)
class Layout:
    """How rows are stored: a format, and how many columns share a step (0: all)."""

    format: PrecisionFormat
    group: int = 0

    def nbytes(self, rows: int, cols: int) -> int:
        """Exact bytes of ``rows`` x ``cols`` weights, scales included."""
        if self.format.dtype is not None and self.format.bits > 8:
            return rows * cols * self.format.bits // 8
        steps = cols // self.group if self.group else 1
        return rows * (packed_width(self.format.bits, cols) + 2 * steps)


@dataclass(frozen=True)
class Rounded:
    """Rounded rows, as they are stored.

    - ``codes``: uint8 (rows, bytes) packed, or (rows, cols) of a float dtype.
    - ``steps``: fp16 or bf16 (rows, groups), times 2^exponent; empty for float dtypes.
    """

    layout: Layout
    codes: Tensor
    steps: Tensor
    zero: float = 0.0
    exponent: int = 0


def fields(bits: int) -> list[int]:
    """The number of bits as a sum of powers of two, the largest first: 5 is 4 + 1."""
    return [field for field in (8, 4, 2, 1) if bits & field]


def packed_width(bits: int, cols: int) -> int:
    """Bytes of ``cols`` packed codes: each field starts at a new byte."""
    return sum(-(-cols * field // 8) for field in fields(bits))


def pack(codes: Tensor, bits: int) -> Tensor:
    """(rows, cols) int codes below 2^bits as uint8 (rows, packed_width).

    A byte holds f bits each of 8/f columns. Their distance is the row's number of such bytes.
    """
    parts = []
    for field in fields(bits):
        codes, values = codes >> field, codes & (2**field - 1)
        share = 8 // field
        width = -(-values.shape[1] // share)
        values = torch.nn.functional.pad(values, (0, share * width - values.shape[1]))
        shifts = torch.arange(0, 8, field, device=codes.device)[:, None]
        parts.append((values.unflatten(1, (share, width)) << shifts).sum(1).to(torch.uint8))
    return torch.cat(parts, 1)


def unpack(packed: Tensor, bits: int, cols: int) -> Tensor:
    """The codes that were packed: (rows, cols), uint8 up to 8 bits, else int16."""
    codes: Tensor | None = None
    done = start = 0
    for field in fields(bits):
        width = -(-cols * field // 8)
        part = packed[:, start : start + width]
        if field < 8:
            shifts = torch.arange(0, 8, field, device=packed.device, dtype=torch.uint8)[:, None]
            part = (part[:, None] >> shifts).bitwise_and_(2**field - 1).flatten(1)[:, :cols]
        if bits > 8:
            part = part.to(torch.int16)
        codes = part if codes is None else codes | (part << done)
        done, start = done + field, start + width
    assert codes is not None
    return codes


def round_rows(weight: Tensor, layout: Layout) -> Rounded:
    """Rounds (rows, cols) of any float dtype. A few steps are tried, each improved by least
    squares, and those with the least squared error are used. ``layout.group`` must divide cols."""
    form = layout.format
    no_steps = torch.empty(0, dtype=torch.float16, device=weight.device)
    if form.dtype is not None and form.bits > 8:
        return Rounded(layout, weight.to(form.dtype, copy=True), no_steps)
    rows, cols = weight.shape
    groups = weight.float().reshape(-1, layout.group or cols)
    peaks = groups.abs().amax(1)
    peak, dtype = peaks.amax().item(), _step_dtype(peaks)
    if form is PrecisionFormat.FP8_E4M3:
        exponent = _exponent(peak / FP8_MAX)
        steps = _stored(groups.abs().amax(1, keepdim=True) / FP8_MAX, exponent, dtype)
        scaled = (groups / _divisor(steps, exponent)).clamp(-FP8_MAX, FP8_MAX)
        codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
        return Rounded(layout, codes.reshape(rows, cols), steps.reshape(rows, -1), 0.0, exponent)
    exponent = _exponent(peak / 2 ** (form.bits - 1))
    zeros = {(2**form.bits - 1) / 2, float(2 ** (form.bits - 1))}
    fits = {zero: _best_steps(groups, form.bits, zero, exponent, dtype) for zero in sorted(zeros)}
    zero = min(fits, key=lambda zero: fits[zero][1])
    steps = fits[zero][0]
    codes = _codes(groups, _divisor(steps, exponent), zero, form.bits).to(torch.int16)
    packed = pack(codes.reshape(rows, cols), form.bits)
    return Rounded(layout, packed, steps.reshape(rows, -1), zero, exponent)


def restore(rounded: Rounded, cols: int, dtype: torch.dtype) -> Tensor:
    """The weights of rounded rows: (rows, cols) in ``dtype``, computed in fp32."""
    form = rounded.layout.format
    if form.dtype is not None and form.bits > 8:
        return rounded.codes.to(dtype)
    if form is PrecisionFormat.FP8_E4M3:
        values = rounded.codes.view(torch.float8_e4m3fn).float()
    else:
        values = unpack(rounded.codes, form.bits, cols).float().sub_(rounded.zero)
    steps = rounded.steps.float() * 2.0**rounded.exponent
    grouped = values.unflatten(1, (steps.shape[1], -1))
    return grouped.mul_(steps[:, :, None]).flatten(1).to(dtype)


def _exponent(step: float) -> int:
    """The power of two by which stored steps are divided: the largest is then about 1."""
    return max(math.frexp(step)[1], -120)


def _step_dtype(peaks: Tensor) -> torch.dtype:
    """bf16 if some steps would be subnormal or 0 in fp16 when the largest is about 1."""
    least = torch.where(peaks > 0, peaks, torch.inf).amin()
    return torch.bfloat16 if bool(least < peaks.amax() * LEAST_STEP) else torch.float16


def _stored(steps: Tensor, exponent: int, dtype: torch.dtype) -> Tensor:
    """The steps as they are stored; rounded up in bf16, since too small a step clips values."""
    over = steps.double() * 2.0**-exponent
    return (over * (1 + 2**-8) if dtype is torch.bfloat16 else over).to(dtype)


def _divisor(steps: Tensor, exponent: int) -> Tensor:
    """Stored steps in fp32, with 1 instead of 0 for groups that are all 0."""
    values = steps.float() * 2.0**exponent
    return torch.where(values == 0, 1.0, values)


def _codes(groups: Tensor, divisor: Tensor, zero: float, bits: int) -> Tensor:
    return (groups / divisor).add_(zero).round_().clamp_(0, 2**bits - 1)


def _first_steps(groups: Tensor, bits: int, zero: float) -> Iterator[Tensor]:
    """Steps to try, (groups, 1): for the range of the largest value, and for narrower ones."""
    place = groups.abs().argmax(1, keepdim=True)
    largest = groups.gather(1, place)
    if zero == 2 ** (bits - 1):
        full = [-largest / zero] + ([largest / (zero - 1)] if bits > 1 else [])
    else:
        full = [largest.abs() / zero]
    for steps in full:
        for shrink in SHRINKS.get(bits, (1,)):
            yield steps * shrink


def _best_steps(
    groups: Tensor, bits: int, zero: float, exponent: int, dtype: torch.dtype
) -> tuple[Tensor, float]:
    """The stored steps with the least squared error of each group, and the sum of these errors."""
    best = torch.zeros(len(groups), 1, dtype=dtype, device=groups.device)
    least = torch.full((len(groups), 1), torch.inf, device=groups.device)
    peaks = groups.abs().amax(1, keepdim=True)
    units = torch.where(peaks == 0, 1.0, peaks)  # so that squares of small numbers are not 0
    for steps in _first_steps(groups, bits, zero):
        levels = _codes(groups, torch.where(steps == 0, 1.0, steps), zero, bits) - zero
        squares = levels.square().sum(1, keepdim=True)
        better = (groups * levels).sum(1, keepdim=True) / squares.clamp_min(0.25)
        for stored in (_stored(steps, exponent, dtype), _stored(better, exponent, dtype)):
            divisor = _divisor(stored, exponent)
            levels = _codes(groups, divisor, zero, bits) - zero
            error = ((levels * divisor - groups) / units).square().sum(1, keepdim=True)
            best = torch.where(error < least, stored, best)
            least = torch.minimum(error, least)
    return best, (least.double() * units.double().square()).sum().item()
