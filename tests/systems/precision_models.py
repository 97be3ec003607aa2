"""Models, bytes and errors for the tests of adaptive precision."""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
from torch import Tensor, nn


def encoder(device: str = "cpu", dtype: torch.dtype = torch.float16) -> nn.Module:
    """Two layers in eval mode, with every kind of weight that an encoder layer has."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 2).to(device, dtype).eval()


def perceptron(device: str = "cpu", width: int = 192, layers: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*parts[:-1]).to(device, torch.float16)


def mixed_entropy(width: int = 128) -> nn.Sequential:
    """Layers of one-bit, Gaussian and three-valued weights in turn; norms keep scales alike."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for number in range(6):
        linear = nn.Linear(width, width, bias=False)
        noise = torch.randn(width, width)
        weight = (noise.sign(), noise, (noise * 0.9).round().clamp(-1, 1))[number % 3]
        linear.weight.data = weight / width**0.5
        parts += [linear, nn.LayerNorm(width, elementwise_affine=False)]
    return nn.Sequential(*parts).half()


def reachable_bytes(root: Any) -> int:
    """Bytes of every tensor's storage that can be reached from an object, each once."""
    seen: set[int] = set()
    storages: dict[int, int] = {}
    stack = [root]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, (type, types.ModuleType, str)):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
            stack.append(item.grad)
        if isinstance(item, dict):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack += list(item)
        elif isinstance(item, types.FunctionType):
            stack += [cell.cell_contents for cell in item.__closure__ or ()]
        elif isinstance(item, types.MethodType):
            stack.append(item.__self__)
        elif hasattr(item, "__dict__"):
            stack.append(vars(item))
    return sum(storages.values())


def model_bytes(model: nn.Module) -> int:
    return sum(t.nbytes for t in [*model.parameters(), *model.buffers()])


def error(got: Tensor, right: Tensor) -> float:
    """|got - right| / |right| in fp64."""
    got, right = got.detach().double(), right.detach().double()
    return ((got - right).norm() / right.norm()).item()


def uniformly_rounded(model: nn.Module, bits: int) -> tuple[nn.Module, float]:
    """An fp64 copy whose weights have ``bits`` whole bits, a scale a row, and what they take at
    least, in bytes, if scales are free. The best of two sets of levels and of eight ranges."""
    rounded = copy.deepcopy(model).double()
    for weight in rounded.parameters():
        best = torch.full((len(weight), 1), torch.inf, dtype=torch.float64)
        chosen = weight.data.clone()
        for middle in (0.0, 0.5):
            least, most = -(2 ** (bits - 1)) + middle, 2 ** (bits - 1) - 1 + middle
            for part in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3):
                step = weight.data.abs().amax(1, keepdim=True) * part / max(most, 0.5)
                levels = ((weight.data / step - middle).round() + middle).clamp(least, most)
                off = (levels * step - weight.data).square().sum(1, keepdim=True)
                chosen = torch.where(off < best, levels * step, chosen)
                best = torch.minimum(off, best)
        weight.data = chosen
    return rounded, sum(w.numel() for w in rounded.parameters()) * bits / 8
