"""The latency of an attention layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from flash_cute.utils.calls import call, device_and_dtype
from flash_cute.utils.timing import time_calls


def benchmark_attention_performance(
    model: nn.Module, input_shape: tuple[int, ...], num_trials: int = 100
) -> dict[str, Any]:
    """Time forwards of ``model`` without gradients, in the mode that it is in.

    Args:
        model: takes one tensor; nn.MultiheadAttention gets it as query, key and value.
        input_shape: the input's shape, (batch, seqlen, width) for attention. Its values are normal,
            in the dtype and on the device of the model's parameters.
        num_trials: calls that are timed one by one, after 3 warm-up calls.

    Returns:
        A dict: ``avg_latency``, ``median_latency``, ``min_latency`` and ``p95_latency`` in
        milliseconds; ``tokens_per_second``, which is batch times seqlen over the median;
        ``num_trials``, ``input_shape``, and ``device`` and ``dtype`` as strings. Times are those of
        CUDA events on CUDA, and of the wall clock on the CPU.

    Raises:
        TypeError: ``model`` is not an nn.Module, ``num_trials`` or a size is not an int.
        ValueError: ``num_trials`` is less than 1, or ``input_shape`` has no sizes or one below 1.

    Example::

        import torch
        from flash_cute.core import AttentionLayer
        from flash_cute.utils.compiler_optimization_assistant import benchmark_attention_performance

        layer = AttentionLayer(64, 4)
        results = benchmark_attention_performance(layer, (2, 100, 64), num_trials=20)
        print(f"Average latency: {results['avg_latency']:.2f}ms")
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; expected an nn.Module")
    if not _is_int(num_trials):
        raise TypeError(f"num_trials is {num_trials!r}; expected an int")
    if num_trials < 1:
        raise ValueError(f"num_trials is {num_trials}; expected at least 1")
    if not isinstance(input_shape, Sequence) or not all(map(_is_int, input_shape)):
        raise TypeError(f"input_shape is {input_shape!r}; expected a tuple of ints")
    shape = tuple(input_shape)
    if not shape or any(size < 1 for size in shape):
        raise ValueError(f"input_shape is {shape}; expected sizes of at least 1")
    device, dtype = device_and_dtype(model)
    generator = torch.Generator(device).manual_seed(0)  # the global one does not change
    x = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    with torch.no_grad():
        timing = time_calls(lambda: call(model, x), num_trials, device)
    tokens = x[..., 0].numel()
    return {
        "avg_latency": timing.mean,
        "median_latency": timing.median,
        "min_latency": timing.least,
        "p95_latency": timing.percentile(0.95),
        "tokens_per_second": tokens / (timing.median / 1e3),
        "num_trials": num_trials,
        "input_shape": shape,
        "device": str(device),
        "dtype": str(dtype),
    }


def _is_int(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)
