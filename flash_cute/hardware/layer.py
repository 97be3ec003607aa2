"""Moves models to a device, and estimates their memory and batch sizes."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import List, Optional  # noqa: UP035  (names of the documented signature)

import torch
from torch import Tensor, nn

from flash_cute import _torch_internals as internals
from flash_cute.hardware import memory
from flash_cute.hardware.devices import available_memory, checked, detect_available_devices
from flash_cute.hardware.inputs import Sample, sample_of

MEMORY_SHARE = 0.9
"""The share of the available memory for a batch; the rest is for fragmentation."""

MOST_ELEMENTS = 2**31 - 1
"""The most elements of one tensor: many kernels count them in 32 bits."""

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by dimensions of a weight
_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d)


class HardwareAbstractionLayer:
    """Moves models to a device, and says which batch sizes fit there.

    Args:
        target_devices: devices to use, the first of which models are moved to. None: CUDA's first
            device if there is one, else the CPU. An empty list: the CPU.

    Raises:
        TypeError: ``target_devices`` is not a list of devices.
        ValueError: a device is not available.

    Attributes:
        target_devices: list of torch.device.
        device: the first of them.
        report: what the last ``optimize_for_hardware`` did, a line each.

    Example::

        import torch
        from flash_cute.hardware import HardwareAbstractionLayer

        hal = HardwareAbstractionLayer()
        model = hal.optimize_for_hardware(torch.nn.Linear(512, 512))
        batch_size = hal.get_optimal_batch_size(model)
    """

    def __init__(self, target_devices: Optional[List[torch.device]] = None) -> None:  # noqa: UP006, UP045
        if target_devices is None:
            target_devices = detect_available_devices()["cuda"]
        self.target_devices = checked(target_devices) or [torch.device("cpu")]
        self.device = self.target_devices[0]
        self.report: list[str] = []

    def optimize_for_hardware(self, model: nn.Module) -> nn.Module:
        """Move ``model`` to ``device``, with the weight layouts that are fastest there.

        On CUDA and on the CPU alike, in place:

        - parameters and buffers move to the device;
        - weights of nn.Conv2d and nn.Conv3d become channels-last, the layout of tensor cores and of
          oneDNN's kernels; outputs of these layers are channels-last then.

        Dtypes, values, Parameter objects, ``state_dict`` and training mode stay as they are, so
        existing optimizers still work. Outputs are equal up to the order of sums: within 1e-5 of
        the largest one in fp32. Global switches of torch do not change: TF32 remains the caller's
        choice (``torch.backends.cuda.matmul.fp32_precision``).

        Returns:
            ``model`` itself.

        Raises:
            TypeError: ``model`` is not an nn.Module.
            ValueError: it has parameters without values (on meta).
        """
        _check_model(model)
        self.report = []
        if any(x.device != self.device for x in [*model.parameters(), *model.buffers()]):
            model.to(self.device)
            self.report.append(f"moved to {self.device}")
        for name, layer in model.named_modules():
            weight = dict(layer.named_parameters("", False, remove_duplicate=False)).get("weight")
            if weight is None or not isinstance(layer, _CONVOLUTIONS):
                continue
            layout = _CHANNELS_LAST[weight.dim()]
            if not weight.is_contiguous(memory_format=layout):
                weight.data = weight.data.contiguous(memory_format=layout)
                self.report.append(f"{name or 'model'}: weight is channels-last")
        return model

    def get_optimal_batch_size(
        self,
        model: nn.Module,
        sample_input: Tensor | tuple[Tensor, ...] | None = None,
        *,
        training: bool = True,
    ) -> int:
        """The largest batch whose step fits into the free memory of ``device``.

        The memory of a step is :meth:`estimate_memory_usage`'s. On CUDA steps of two and of three
        samples are also run and measured, and the larger figure counts; but not for a model with
        nn.Embedding and no sample, since an index out of range would end CUDA's context. Only
        memory limits the batch: millions of samples of a small model may fit. Speed often levels
        off at some hundred samples; neither it nor convergence is considered.

        Args:
            model: stays unchanged: parameters, buffers, gradients, mode, random state.
            sample_input: as for :meth:`estimate_memory_usage`.
            training: whether the step is one of training, with AdamW, or of inference.

        Returns:
            A positive int: at most 0.9 of the available memory, at most 2**31 - 1 elements in any
            one tensor, and a multiple of 8 from 8 on.

        Raises:
            MemoryError: not even one sample fits.
            TypeError, ValueError, NotImplementedError: as :meth:`estimate_memory_usage`.
        """
        sample = self._sample(model, sample_input)
        cost = self._cost(model, sample, training)
        fixed, per_sample = cost.fixed, cost.per_sample
        there = memory.resident(model, self.device)
        budget = MEMORY_SHARE * available_memory(self.device)
        runs = sample_input is not None or not _has_indices(model)
        runs &= cost.of_batch(memory.MEASURED_BATCHES[-1]) - there <= budget
        if self.device.type == "cuda" and runs:
            real = memory.measured(model, sample, self.device, training)
            fixed, per_sample = max(fixed, real.fixed), max(per_sample, real.per_sample)
        fixed -= there
        batch = min(
            int((budget - fixed) // max(per_sample, 1.0)),
            int(MOST_ELEMENTS // max(cost.largest_tensor, 1.0)),
        )
        of_optimizer = memory.trainable(model) if training else 0  # after activations are freed
        least = fixed + max(per_sample, of_optimizer)
        if batch < 1 or least > budget:
            raise MemoryError(
                f"one sample of {type(model).__name__} needs {least:.0f} bytes "
                f"more on {self.device}, where {budget:.0f} are available"
            )
        return batch - batch % 8 if batch >= 8 else batch

    def estimate_memory_usage(
        self,
        model: nn.Module,
        batch_size: int,
        sample_input: Tensor | tuple[Tensor, ...] | None = None,
        training: bool = True,
    ) -> float:
        """The memory that a step of ``model`` needs on ``device``, in bytes.

        It is ``fixed + batch_size * per_sample``. Fixed are weights and buffers, and in training
        the gradients and twice their bytes of AdamW's state, for parameters that require gradients.
        The rest is the peak of forward and backward: the input, activations saved for backward, and
        a loss, the mean of the squares of all outputs. On the CPU it is measured: a copy of the
        model that shares the weights runs steps of two batches, of some MiB, and the peak follows
        from torch's allocations, also those inside of ops; without memory for that it is traced,
        with a warning. On CUDA it is traced without allocating. Not included: CUDA's context and
        allocations inside of ops there, memory that libraries do not take from torch's allocator,
        and temporaries of an optimizer that is not ``fused``.

        Args:
            model: any nn.Module; it may be on another device.
            batch_size: samples in a batch, at least 1.
            sample_input: a tensor (batch, ...), or a tuple of them, one for each argument; only its
                first sample is used. None: generated for the first layer, if that is nn.Linear,
                nn.Embedding, nn.TransformerEncoderLayer, or attention with ``num_heads`` and
                ``d_model`` or ``embed_dim``; sequences then have 512 tokens.
            training: forward and backward in training mode with AdamW, or forward in evaluation
                mode without gradients.

        Returns:
            Bytes, as a float.

        Raises:
            TypeError: wrong types.
            ValueError: ``batch_size`` is less than 1, the layers do not determine the input, or the
                model does not accept it.
            NotImplementedError: control flow depends on values, so that it cannot be traced.

        Warns:
            RuntimeWarning: on the CPU there is no memory to run three samples, they would take long
                (``memory.MEASURED_FLOPS``), or a profiler of torch is on: the estimate then lacks
                allocations inside of ops, which are large in recurrent and convolution layers and
                in attention with dropout.

        Example::

            import torch
            from flash_cute.hardware import HardwareAbstractionLayer

            hal = HardwareAbstractionLayer()
            bytes_needed = hal.estimate_memory_usage(torch.nn.Linear(512, 512), 64)
        """
        if not isinstance(batch_size, int) or isinstance(batch_size, bool):
            raise TypeError(f"batch_size is {batch_size!r}; expected an int")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; expected at least 1")
        sample = self._sample(model, sample_input)
        return float(self._cost(model, sample, training).of_batch(batch_size))

    def _sample(self, model: nn.Module, given: Tensor | tuple[Tensor, ...] | None) -> Sample:
        _check_model(model)
        return sample_of(model, given)

    def _cost(self, model: nn.Module, sample: Sample, training: bool) -> memory.Cost:
        """The traced cost, or on the CPU that measured by steps of a few samples."""
        if not isinstance(training, bool):
            raise TypeError(f"training is {training!r}; expected a bool")
        try:
            cost = memory.traced(model, sample, self.device, training)
            if self.device.type != "cpu":
                return cost
            there = memory.resident(model, self.device)
            budget = MEMORY_SHARE * available_memory(self.device) + there
            batches = memory.batches_to_measure(cost, budget)
            reason = f"there is no room to run {memory.MEASURED_BATCHES[-1]} samples safely"
            if memory.is_long(cost, memory.MEASURED_BATCHES):
                reason = f"a sample takes {cost.flops:.2g} operations, too many for an estimate"
            if internals.is_profiled():
                reason = "a profiler of torch is on, which measuring would end"
            elif batches is not None:
                real = memory.measured_on_cpu(model, sample, batches, training)
                return replace(real, largest_tensor=cost.largest_tensor)
        except NotImplementedError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            shapes = ", ".join(str(tuple(x.shape)) for x in sample.tensors)
            raise ValueError(
                f"{type(model).__name__} does not take an input of shape {shapes}; pass a "
                f"sample_input that it takes: {error}"
            ) from error
        warnings.warn(
            f"{type(model).__name__} cannot be run to measure it, as {reason}: the estimate lacks "
            "memory that its ops allocate internally",
            RuntimeWarning,
            stacklevel=3,
        )
        return cost


def _has_indices(model: nn.Module) -> bool:
    return any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for m in model.modules())


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; expected an nn.Module")
    for name, p in model.named_parameters():
        if p.is_meta or isinstance(p, nn.UninitializedParameter):
            raise ValueError(f"parameter {name} has no values; initialize it (to_empty, a call)")
