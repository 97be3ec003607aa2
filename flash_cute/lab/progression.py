"""Measures the progression: the gain of each technique of FlashAttention-2 on this GPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import flash_cute
from flash_cute import lab
from flash_cute.lab.kernel_configs import (
    PROGRESSION_STEPS,
    DType,
    FlashForwardKernelConfig,
    get_kernel_progression_configs,
)
from flash_cute.lab.test.utils import error_statistics, generate_qkv, generate_qkvo
from flash_cute.native import library
from flash_cute.utils.timing import time_calls

PRODUCTION = "flash_cute's sm80 kernel"
FA2 = "flash-attn 2"
TORCH_FA2 = "torch's FlashAttention-2"
_MATMUL = "torch.matmul"
_MATMUL_SIZE = 8192
_CALLS, _ROUNDS = 10, 9
_CHECKED_SEQ_LEN = 768  # a multiple of every block, at least two of each


@dataclass(frozen=True)
class Problem:
    """The sizes to measure; by default 16k tokens of a model with 2048 dims."""

    batch: int = 4
    seq_len: int = 4096
    n_heads: int = 16
    d_head: int = 128


def check_config(config: FlashForwardKernelConfig, seed: int | None = None) -> float:
    """Runs a kernel on new inputs; returns its largest error relative to the rounding bound.

    The output is filled with NaN before, so that missing writes give infinity.
    """
    q, k, v, o = generate_qkvo(2, _CHECKED_SEQ_LEN, 3, config.d_head, config.dtype, "cuda", seed)
    return error_statistics(lab.forward(config, q, k, v, o), q, k, v).of_bound


def measure_progression(
    dtype: DType = DType.BF16,
    problem: Problem | None = None,
    rounds: int = _ROUNDS,
    configs: Sequence[FlashForwardKernelConfig] | None = None,
) -> dict[str, Any]:
    """Checks and measures every step of the progression, or the ``configs`` given, on this GPU.

    All candidates get the same tensors and take turns, in another order each round; times are
    medians over ``rounds`` of the median call. For comparison there are the library's own sm80
    kernel, flash-attn 2 if it is installed, torch's FlashAttention-2, and torch.matmul of
    8192 x 8192 as an upper bound.

    Returns:
        The input of :func:`table` and :func:`plot`, which can be dumped as JSON.

    Raises:
        ValueError: a config is not in this build.
        RuntimeError: there is no GPU, or a kernel's error is above its bound.
    """
    problem = problem or Problem()
    steps = list(configs or get_kernel_progression_configs(dtype))
    titles = PROGRESSION_STEPS if configs is None else [""] * len(steps)
    errors = [check_config(config) for config in steps]
    for config, error in zip(steps, errors, strict=True):
        if error > 1.0:
            raise RuntimeError(f"{config}: {error:.2f} times the error that rounding allows")
    q, k, v = generate_qkv(
        problem.batch, problem.seq_len, problem.n_heads, problem.d_head, dtype, "cuda"
    )
    calls = {config.short_form(): _step(config, q, k, v) for config in steps}
    others = _references(q, k, v)
    others[_MATMUL] = _matmul(q.dtype)
    times = _take_turns(calls | others, rounds)
    flop = steps[0].attn_flop(problem.batch, problem.n_heads, problem.seq_len)
    flops = dict.fromkeys(times, flop) | {_MATMUL: 2 * _MATMUL_SIZE**3}
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "dtype": dtype.value,
        "problem": asdict(problem),
        "references": {name: _rate(times[name], flops[name]) for name in others},
        "steps": [
            {
                "title": title,
                "config": config.short_form(),
                "kernel": config.kernel_name(),
                **_rate(times[config.short_form()], flop),
                **vars(lab.usage(config)),
                "occupancy": _occupancy(config),
                "error_of_bound": round(error, 3),
            }
            for title, config, error in zip(titles, steps, errors, strict=True)
        ],
    }


def _step(config: FlashForwardKernelConfig, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Any]:
    out = torch.empty_like(q)
    return lambda: lab.forward(config, q, k, v, out)


def _references(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Any]]:
    """The other forwards that are available, by name."""
    found: dict[str, Callable[[], Any]] = {TORCH_FA2: _torch_flash(q, k, v)}
    sm80 = f"fwd_sm80_{'fp16' if q.dtype == torch.float16 else 'bf16'}_plain_d{q.shape[-1]}x"
    if any(sm80 in kernel for kernel in library.kernels()):
        found[PRODUCTION] = _by_kernel(sm80, q, k, v)
    if find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_func

        found[FA2] = lambda: flash_attn_func(q, k, v)
    return found


def _torch_flash(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Any]:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))

    def run() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v)

    return run


def _by_kernel(part: str, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Any]:
    def run() -> Any:
        with library.only(part):
            return flash_cute.flash_attn_func(q, k, v)

    return run


def _matmul(dtype: torch.dtype) -> Callable[[], Any]:
    a, b = torch.randn(2, _MATMUL_SIZE, _MATMUL_SIZE, device="cuda").to(dtype)
    return lambda: a @ b


def _take_turns(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each candidate in each round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    with torch.no_grad():
        for _ in range(rounds):
            random.shuffle(names)
            for name in names:
                timing = time_calls(calls[name], _CALLS, torch.device("cuda"))
                times[name].append(timing.median)
    return times


def _rate(times: Sequence[float], flop: int) -> dict[str, float]:
    ms = median(times)
    return {
        "ms": round(ms, 4),
        "tflops": round(flop / ms / 1e9, 1),
        "spread": round((max(times) - min(times)) / ms, 3),
    }


def _occupancy(config: FlashForwardKernelConfig) -> float:
    """The occupancy: active warps relative to an SM's maximum."""
    room = torch.cuda.get_device_properties().max_threads_per_multi_processor
    return round(lab.usage(config).ctas_per_sm * 32 * config.n_warps / room, 3)


def rival(result: Mapping[str, Any]) -> str:
    """The FlashAttention-2 that steps are compared with: flash-attn's own, else torch's."""
    return FA2 if FA2 in result["references"] else TORCH_FA2


def table(result: Mapping[str, Any]) -> str:
    """The steps in Markdown, with their rates relative to the other forwards in the same run."""
    references = {name: result["references"][name]["tflops"] for name in result["references"]}
    compared = [name for name in (PRODUCTION, rival(result), _MATMUL) if name in references]
    header = [
        "step", "TFLOP/s", "over the step before", *(f"of {name}" for name in compared),
        "registers", "shared memory", "CTAs an SM", "occupancy",
    ]  # fmt: skip
    lines = [header, ["---"] * len(header)]
    before = None
    for number, step in enumerate(result["steps"], 1):
        spilled = f" + {step['local_bytes']} B spilled" if step["local_bytes"] else ""
        lines.append([
            f"{number}. {step['title'] or step['config']}",
            f"{step['tflops']:.0f}",
            "" if before is None else f"{step['tflops'] / before - 1:+.0%}",
            *(f"{step['tflops'] / references[name]:.0%}" for name in compared),
            f"{step['registers']}{spilled}",
            f"{step['smem_bytes'] // 1024} KiB",
            str(step["ctas_per_sm"]),
            f"{step['occupancy']:.0%}",
        ])  # fmt: skip
        before = step["tflops"]
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in references.items())
    sizes = result["problem"]
    case = (
        f"{result['gpu']}, torch {result['torch']}; {result['dtype']}, batch {sizes['batch']}, "
        f"seq_len {sizes['seq_len']}, {sizes['n_heads']} heads, d_head {sizes['d_head']}. "
        f"TFLOP/s in the same run: {rates}."
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{case}\n"


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Bars of the steps' rates, and lines for the others'; the file's ending chooses the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ModuleNotFoundError("a plot needs matplotlib: pip install matplotlib") from None
    steps, references = result["steps"], result["references"]
    figure = Figure(figsize=(8, 1.2 + 0.36 * len(steps)), layout="constrained")
    axes = figure.add_subplot()
    rates = [step["tflops"] for step in steps]
    axes.barh(range(len(steps)), rates, color="#4c72b0")
    for place, rate in enumerate(rates):
        axes.text(rate, place, f" {rate:.0f}", va="center", fontsize=8)
    titles = [f"{i}. {step['title'] or step['config']}" for i, step in enumerate(steps, 1)]
    axes.set_yticks(range(len(steps)), titles, fontsize=8)
    axes.invert_yaxis()
    for name, style in ((PRODUCTION, "-"), (rival(result), "--")):
        if name in references:
            axes.axvline(references[name]["tflops"], color="#555", linestyle=style, label=name)
    axes.set_xlabel(f"TFLOP/s, {result['dtype']}, {result['gpu']}", fontsize=8)
    axes.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
