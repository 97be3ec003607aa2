"""The bytes that a step of a model needs: traced without allocating, or measured."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flash_cute import _torch_internals as internals
from flash_cute.core.model_copies import copied
from flash_cute.hardware import allocator
from flash_cute.hardware.inputs import Sample

_TRACED_BATCHES = (4096, 8192)  # so large that activations dominate backward's temporaries
MEASURED_BATCHES = (2, 3)  # normalisation over a batch refuses a single sample
_MEASURED_BYTES = 2**23
MEASURED_FLOPS = 1e11
"""The most operations per thread of steps that are measured: some seconds."""
OPTIMIZER_STATES = 2
"""AdamW keeps two tensors of each trainable parameter's size and dtype."""


@dataclass(frozen=True)
class Cost:
    """Bytes of a step: ``fixed + batch * per_sample``."""

    fixed: float
    per_sample: float
    largest_tensor: float = 0.0
    """Elements per sample in the largest tensor of the step."""
    flops: float = 0.0
    """Additions and multiplications per sample in matrix products."""

    def of_batch(self, batch: int) -> float:
        return self.fixed + batch * self.per_sample


class LiveBytes(internals.DispatchMode):
    """Inside, follows the memory of all tensors that ops make, until they are freed.

    Memory that an op allocates and frees internally is not seen, except in sums over long columns
    on CUDA, such as bias gradients.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.largest_tensor = 0  # elements
        self.flops = 0
        self._events: list[tuple[int, int]] = []  # (storage's number, bytes; < 0 when it is freed)
        self._numbers: dict[int, int] = {}  # of live storages, by their id
        self._known = list(storages_of(known))  # not counted
        for storage in self._known:
            self._numbers[id(storage)] = -1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.flops += internals.flops_of(func, args, kwargs or {}, result)
        for x in tensors_in(result):
            for part in internals.parts_of(x):
                self._add(part)
        if func is torch.ops.aten.sum.dim_IntList and args[0].is_cuda:
            number, size = len(self._events), reduction_buffer(args[0], result)
            self._events += [(number, size), (number, -size)]
        return result

    def _add(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._numbers:
            return
        number = self._numbers[key] = len(self._events)
        self._events.append((number, size))
        self.largest_tensor = max(self.largest_tensor, size // x.element_size())
        weakref.finalize(storage, self._free, key, number, size).atexit = False

    def _free(self, key: int, number: int, size: int) -> None:
        del self._numbers[key]
        self._events.append((number, -size))

    def peak(self, but: Iterable[Tensor] = ()) -> int:
        """The most bytes that were live at once, without those of ``but``."""
        left_out = {self._numbers.get(id(storage)) for storage in storages_of(but)}
        return allocator.peak([event for event in self._events if event[0] not in left_out])


def reduction_buffer(x: Tensor, total: Tensor) -> int:
    """Bytes that torch allocates on CUDA to sum columns of x into ``total`` by several blocks.

    A thread has four columns, a block 32 x 4 threads; there are as many blocks as the GPU runs at
    once, or one for 64 rows.
    """
    if total.numel() == 0 or x.stride(-1) != 1 or total.shape[-1:] != x.shape[-1:]:
        return 0
    columns, rows = total.numel(), x.numel() // total.numel()
    properties: Any = torch.cuda.get_device_properties(x.device)
    blocks = properties.multi_processor_count * (properties.max_threads_per_multi_processor // 128)
    across, rows_a_thread = -(-columns // 128), -(-rows // 4)
    down = min(-(-blocks // across), -(-rows_a_thread // 16))
    return 4 * columns * down * 128 if down > 1 else 0


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def storages_of(tensors: Iterable[Tensor]) -> Iterable[torch.UntypedStorage]:
    """The storages of tensors, and of the parts of sparse tensors, each once."""
    parts = (part for x in tensors for part in internals.parts_of(x.detach()))
    return {id(part.untyped_storage()): part.untyped_storage() for part in parts}.values()


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages; shared ones count once."""
    return sum(storage.nbytes() for storage in storages_of(tensors))


def weights_of(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers."""
    return bytes_of([*model.parameters(), *model.buffers()])


def resident(model: nn.Module, device: torch.device) -> int:
    """Bytes of the parameters and buffers that are already on ``device``."""
    tensors = [*model.parameters(), *model.buffers()]
    return bytes_of(x for x in tensors if x.device == device)


def trainable(model: nn.Module) -> int:
    """Bytes of the parameters that require gradients."""
    return bytes_of(p for p in model.parameters() if p.requires_grad)


def training_bytes(model: nn.Module) -> int:
    """Bytes of gradients and of the optimizer's states. Sparse gradients do not count: they belong
    to a step, as activations do."""
    layers = [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    sparse = bytes_of(m.weight for m in layers if m.sparse and m.weight.requires_grad)
    return (1 + OPTIMIZER_STATES) * trainable(model) - sparse


def dense_gradients(model: nn.Module) -> list[Tensor]:
    """The gradients that are as large as their parameters."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return [x for x in found if x.layout is torch.strided]


@torch.inference_mode(False)
def traced(model: nn.Module, sample: Sample, device: torch.device, training: bool) -> Cost:
    """The cost of a step, from two traces in which no tensor has memory.

    Raises:
        NotImplementedError: the model's control flow depends on values.
    """

    fakes = internals.fake_tensors()

    def empty_like(x: Tensor) -> Tensor:
        with fakes as mode:
            if x.layout is not torch.strided:  # without elements
                return mode.from_tensor(x.detach()).to(device)
            return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device)

    peaks, largest, flops = [], [], []
    for batch in _TRACED_BATCHES:
        run = copy_with(model, empty_like, empty_like)
        with rng_kept(device), _every_op(), fakes:
            with LiveBytes(known=[*run.parameters(), *run.buffers()]) as live:
                _step(run, sample.of_batch(batch, device), training)
            peaks.append(live.peak(but=dense_gradients(run)))
            largest.append(live.largest_tensor)
            flops.append(live.flops)
    line = _linear_cost(_TRACED_BATCHES, peaks)
    fixed = weights_of(model) + line.fixed + (training_bytes(model) if training else 0)
    more = (_linear_cost(_TRACED_BATCHES, found).per_sample for found in (largest, flops))
    return Cost(fixed, line.per_sample, *more)


@torch.inference_mode(False)
def measured(model: nn.Module, sample: Sample, device: torch.device, training: bool) -> Cost:
    """The cost of a step on CUDA, from the peaks of two and of three samples; weights are shared
    with the model, not copied, if they are on ``device``. torch's statistics of peaks are reset."""
    peaks = []
    with rng_kept(device):
        for batch in MEASURED_BATCHES:
            gc.collect()  # else a step might free garbage, which lowers its peak
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            run = copy_with(
                model, lambda p: p.detach().to(device), lambda b: b.detach().to(device, copy=True)
            )
            _step(run, sample.of_batch(batch, device), training)
            del run
            torch.cuda.synchronize(device)
            peaks.append(torch.cuda.max_memory_allocated(device) - before)
    line = _linear_cost(MEASURED_BATCHES, peaks)
    states = OPTIMIZER_STATES * trainable(model) if training else 0
    return Cost(line.fixed + resident(model, device) + states, line.per_sample)


def batches_to_measure(cost: Cost, budget: float) -> tuple[int, int] | None:
    """Two batches of some MiB by the traced cost that fit even if ops allocate four times as much
    internally, and that run fast; None if not even the smallest do."""
    first = int(_MEASURED_BYTES // max(cost.per_sample, 1.0))
    first = min(max(first, MEASURED_BATCHES[0]), _TRACED_BATCHES[0])
    batches = first, first + (first + 1) // 2
    for found in (batches, MEASURED_BATCHES):
        if cost.of_batch(4 * found[1]) <= budget and not is_long(cost, found):
            return found
    return None


def is_long(cost: Cost, batches: tuple[int, int]) -> bool:
    """Whether steps of these batches take too long for an estimate."""
    return cost.flops * sum(batches) > MEASURED_FLOPS * torch.get_num_threads()


@torch.inference_mode(False)
def measured_on_cpu(
    model: nn.Module, sample: Sample, batches: tuple[int, int], training: bool
) -> Cost:
    """The cost of a step on the CPU, from the allocations of steps of two batches, which are
    extrapolated if both steps have the same ones. Weights are shared with the model, as by
    :func:`measured`."""
    cpu = torch.device("cpu")

    def step(batch: int) -> Iterable[Tensor]:
        run = copy_with(
            model, lambda p: p.detach().to(cpu), lambda b: b.detach().to(cpu, copy=True)
        )
        _step(run, sample.of_batch(batch, cpu), training)
        # Of these all are counted below.
        return [*run.parameters(), *run.buffers(), *dense_gradients(run)]

    with rng_kept(cpu), torch.compiler.set_stance("force_eager"):
        first, second = (allocator.recorded(lambda n=n: step(n)) for n in batches)  # type: ignore[misc]
    large = [allocator.extrapolated((first, second), batches, n) for n in _TRACED_BATCHES]
    if large[0] is None or large[1] is None:
        line = _linear_cost(batches, [allocator.peak(first), allocator.peak(second)])
    else:
        line = _linear_cost(_TRACED_BATCHES, [allocator.peak(large[0]), allocator.peak(large[1])])
    fixed = weights_of(model) + line.fixed + (training_bytes(model) if training else 0)
    return Cost(fixed, line.per_sample)


def _linear_cost(batches: tuple[int, int], peaks: list[int]) -> Cost:
    per_sample = (peaks[1] - peaks[0]) / (batches[1] - batches[0])
    return Cost(max(0.0, peaks[0] - per_sample * batches[0]), per_sample)


def copy_with(
    model: nn.Module,
    of_parameter: Callable[[Tensor], Tensor],
    of_buffer: Callable[[Tensor], Tensor],
) -> nn.Module:
    """A copy of a model whose parameters and buffers are those that the functions return.

    The model does not change with the copy, as long as that writes to no parameter.
    """
    memo: dict[int, Any] = {id(b): of_buffer(b) for b in model.buffers()}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(of_parameter(p), requires_grad=p.requires_grad)
    return copied(model, memo)


def _step(model: nn.Module, inputs: tuple[Tensor, ...], training: bool) -> None:
    """Forward, and backward from the mean of the output's squares."""
    model.train(training)
    try:
        with torch.set_grad_enabled(training):
            losses = [x.square().mean() for x in tensors_in(model(*inputs)) if x.requires_grad]
    except internals.NEEDS_VALUES as error:
        raise NotImplementedError(
            f"{type(model).__name__} cannot be traced: its control flow depends on values: {error}"
        ) from error
    if losses:
        torch.autograd.backward(losses)


@contextmanager
def _every_op() -> Iterator[None]:
    """Inside, torch's encoder layers run op by op, since their fused op hides its memory, and so do
    compiled models, which a trace would leave uncompiled for good."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def rng_kept(device: torch.device) -> Iterator[None]:
    """Restores the random generators afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
