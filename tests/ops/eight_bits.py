"""Numbers of e4m3 and int8 as bytes, by what their bits say."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
DTYPES = [E4M3, INT8]
LARGEST = {E4M3: 448.0, INT8: 127.0}


def e4m3_of(code: int) -> float:
    """What the bits of a positive e4m3 number say."""
    exponent, mantissa = code >> 3, code & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


NUMBERS = np.array([e4m3_of(code) for code in range(127)])  # 127 is NaN


def codes_of(x: Tensor, descale: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes, as int8, of x / descale: the nearest number, of two the even one."""
    with np.errstate(all="ignore"):
        y = (x.float().cpu().numpy() / descale.cpu().numpy()).astype(float)
    if dtype == INT8:
        rounded = np.clip(np.rint(y), -127, 127)
        return torch.from_numpy(np.nan_to_num(rounded).astype(np.int8))
    size = np.minimum(np.abs(np.nan_to_num(y, nan=0.0)), 448.0)
    above = np.searchsorted(NUMBERS, size).clip(1, 126)
    low, high = size - NUMBERS[above - 1], NUMBERS[above] - size
    is_low = (low < high) | ((low == high) & (above % 2 == 1))
    code = np.where(np.isnan(y), 127, np.where(is_low, above - 1, above))
    code = np.where(np.signbit(y), code + 128, code).astype(np.uint8)
    return torch.from_numpy(code.view(np.int8))


def values_of(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """fp64 of the bytes of a cache."""
    if dtype == INT8:
        return codes.double()
    bits = codes.view(torch.uint8).long()
    table = torch.tensor([*NUMBERS, np.nan]).double()
    return table[bits & 127] * torch.where(bits > 127, -1.0, 1.0).double()


def bits(x: Tensor) -> Tensor:
    return x.view(INT8).cpu()


def new_descale(x: Tensor, dtype: torch.dtype) -> Tensor:
    largest = x.abs().amax(-1).float().cpu().numpy()
    descale = (largest / np.float32(LARGEST[dtype])).astype(np.float32)
    return torch.from_numpy(np.where(descale == 0, np.float32(1), descale))
