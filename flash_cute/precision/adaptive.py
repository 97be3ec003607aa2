"""A model whose weights are stored in few bits, allocated under a budget of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from flash_cute import _torch_internals as internals
from flash_cute.core.model_copies import copied
from flash_cute.hardware.devices import checked_device
from flash_cute.precision.fp8_convert import switch_fast_paths_off
from flash_cute.precision.inputs import round_inputs_of, scales_grow
from flash_cute.precision.packed import (
    PackedEmbedding,
    PackedWeight,
    as_bytes,
    as_matrix,
    from_bytes,
)
from flash_cute.precision.plan import (
    Plan,
    base_bytes,
    held_bytes,
    held_tensors,
    is_plain_embedding,
    make_plan,
    packable,
)
from flash_cute.precision.quantize import Layout
from flash_cute.precision.saving import weights_restored_in_backward
from flash_cute.precision.sensitivity import (
    Samples,
    batches,
    entropy,
    error_weights,
    state_preserved,
)
from flash_cute.precision.settings import PrecisionConfig, QuantizationMode


@dataclass(frozen=True)
class LayerPrecision:
    """How one weight is stored.

    - ``blocks``: rows and layout (format, columns that share a scale) of each block of rows.
    - ``bits``: bits a weight, scales included; ``nbytes``: all bytes of it.
    - ``entropy``: of its values, in bits; ``relative_error``: ``|dW| / |W|`` by rounding.
    """

    blocks: tuple[tuple[int, Layout], ...]
    bits: float
    nbytes: int
    entropy: float
    relative_error: float


@dataclass(frozen=True)
class PrecisionStats:
    """The bytes of a module.

    - ``base_bytes``: bytes of the model in ``base_precision``, all parameters and buffers.
    - ``stored_bytes``: bytes of all storages that the module holds, scales and all.
    - ``memory_savings_ratio``: ``1 - stored_bytes / base_bytes``.
    - ``layers``: of each packed weight, by its name in the model that was given.
    """

    base_bytes: int
    stored_bytes: int
    layers: dict[str, LayerPrecision]

    @property
    def memory_savings_ratio(self) -> float:
        return 1 - self.stored_bytes / self.base_bytes if self.base_bytes else 0.0


class UltraPrecisionModule(nn.Module):
    """A copy of ``model`` with packed weights; calls go to it with the same arguments.

    Parameters of two dims or more are rounded, each block of their rows to a format of its own,
    1 to 12 bits, fp8 or ``base_precision``, so that all bytes of the module are at most ``1 -
    target_memory_reduction`` of the model's in ``base_precision``. A weight is restored when its
    layer reads it, freed afterwards, and restored again in backward. ``model`` is neither changed
    nor referenced.

    Packed weights are buffers: they have no gradient, and no optimizer sees them. Inputs and the
    remaining parameters, biases and norms, have gradients as before. Not packed are RNNs, weights
    with parametrizations, layers with tensors that are neither parameters nor buffers (torch's old
    weight_norm, spectral_norm, pruning), weights that are also in a list, and weights of fewer than
    64 numbers.

    - ``config``: PrecisionConfig, by default PrecisionConfig().
    - ``calibration``: a tensor, or a sequence of batches, each a tensor or a tuple of arguments,
      on the device of ``model``. Strategies that need samples and get none generate them, for
      models that begin with Linear, Embedding or TransformerEncoderLayer.
    - ``device``: of the copy, by default ``model``'s.

    ``state_dict`` has the packed form. It can be loaded into a module of the same architecture
    with any other allocation, which it replaces.

    Raises TypeError if ``model`` is not an nn.Module, ValueError if the target cannot be met (the
    message has the largest that can), if weights are not finite, if samples are needed, or if the
    device is not available.

    Bits under a budget follow HAWQ-V3 (Yao et al., 2021, arXiv:2011.10680): a sum of errors, and
    a choice for each layer.

    Example::

        import torch
        from flash_cute.precision import PrecisionConfig, UltraPrecisionModule
        from torch import nn

        model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 16)).half()
        samples = torch.randn(32, 256).half()  # inputs as the model will see them
        small = UltraPrecisionModule(model, PrecisionConfig(), calibration=samples)
        print(f"{small.get_precision_stats().memory_savings_ratio:.0%} saved")
    """

    def __init__(
        self,
        model: nn.Module,
        config: PrecisionConfig | None = None,
        *,
        calibration: Samples | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
        if config is not None and not isinstance(config, PrecisionConfig):
            raise TypeError(f"config must be a PrecisionConfig, not {type(config).__name__}")
        if device is not None:
            checked_device(device)
        self.config = PrecisionConfig() if config is None else replace(config)
        weights = packable(model)
        importance = error_weights(model, weights, self.config, calibration)
        plan = make_plan(model, weights, self.config, importance)
        self._base_bytes = base_bytes(model, self.config.base_precision)
        packed = packed_copy(model, weights, plan)
        self.model, self._packed, self._measured = packed.model, packed.paths, packed.measured
        if self.config.rounds_inputs:
            round_inputs_of(self.model, self.config)
            switch_fast_paths_off(self.model)  # they would bypass the layers, with nested tensors
            if self.config.quantization_mode is QuantizationMode.STATIC and calibration is not None:
                with state_preserved(self.model), scales_grow(self.model), torch.no_grad():
                    for arguments in batches(calibration):
                        self.model(*arguments)
        if device is not None:
            self.to(device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plain = torch.compiler.is_compiling() or internals.transformed()
        if plain or not torch.is_grad_enabled():  # transforms do not support saved tensors' hooks
            return self.model(*args, **kwargs)
        with weights_restored_in_backward():
            return self.model(*args, **kwargs)

    def get_precision_stats(self) -> PrecisionStats:
        """The current bytes and bits, counted on the storages."""
        layers = {}
        for name, path in self._packed.items():
            packed = self.get_submodule(path)
            assert isinstance(packed, PackedWeight)
            size, (bits_of_values, error) = packed.nbytes(), self._measured[name]
            bits = 8 * size / packed.shape.numel()
            blocks = tuple(packed.layouts())
            layers[name] = LayerPrecision(blocks, bits, size, bits_of_values, error)
        return PrecisionStats(self._base_bytes, held_bytes(held_tensors(self)), layers)

    def get_extra_state(self) -> Tensor:
        return as_bytes({"base_bytes": self._base_bytes, "measured": self._measured})

    def set_extra_state(self, state: Tensor) -> None:
        saved = from_bytes(state, "_extra_state", {"base_bytes", "measured"})
        measured = {name: (bits, error) for name, (bits, error) in saved["measured"].items()}
        self._base_bytes, self._measured = saved["base_bytes"], measured


def create_ultra_precision_module(
    model: nn.Module,
    config: PrecisionConfig | None = None,
    device: torch.device | str | None = None,
    *,
    calibration: Samples | None = None,
) -> UltraPrecisionModule:
    """A copy of a model in fewer bytes. See UltraPrecisionModule for arguments and errors.

    Example::

        import torch
        from flash_cute.precision import PrecisionConfig, create_ultra_precision_module
        from torch import nn

        model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 16)).half()
        small = create_ultra_precision_module(model, PrecisionConfig(target_memory_reduction=0.6))
        assert small.get_precision_stats().memory_savings_ratio >= 0.6
        out = small(torch.randn(2, 256).half())
    """
    return UltraPrecisionModule(model, config, calibration=calibration, device=device)


@dataclass
class PackedCopy:
    """A model with packed weights, and the path, entropy and relative error of each."""

    model: nn.Module
    paths: dict[str, str]
    measured: dict[str, tuple[float, float]]


def packed_copy(model: nn.Module, weights: Mapping[str, Tensor], plan: Plan) -> PackedCopy:
    """Copies a model with weights packed as planned. Paths begin with ``model.``."""
    memo: dict[int, Any] = {}
    names: dict[int, str] = {}
    for name, weight in weights.items():  # the copy has an empty parameter for each
        empty = nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)
        memo[id(weight)], names[id(empty)] = empty, name
    holder = nn.ModuleDict({"model": copied(model, memo)})
    packed = {name: PackedWeight(w, plan.blocks[name]) for name, w in weights.items()}
    paths: dict[str, str] = {}
    for path, module in list(holder.named_modules()):
        for key, parameter in list(module.named_parameters("", False, remove_duplicate=False)):
            if id(parameter) in names:
                name = names[id(parameter)]
                place = _install(module, key, packed[name])
                paths.setdefault(name, f"{path}.{place}")
    measured = {n: (entropy(w), _relative_error(packed[n], w)) for n, w in weights.items()}
    return PackedCopy(holder["model"], paths, measured)


def _install(module: nn.Module, key: str, packed: PackedWeight) -> str:
    """Replaces a parameter by a packed weight, and returns its path in the module."""
    if isinstance(module, nn.Embedding) and is_plain_embedding(module):
        PackedEmbedding.take_over(module, packed)
        return "packed"
    delattr(module, key)
    module.register_buffer(key, torch.empty(0))
    parametrize.register_parametrization(module, key, packed, unsafe=True)
    return f"parametrizations.{key}.0"


def _relative_error(packed: PackedWeight, weight: Tensor) -> float:
    right = as_matrix(weight.detach()).float()
    change = as_matrix(packed()).float() - right
    return (change.norm() / right.norm().clamp_min(1e-30)).item()
