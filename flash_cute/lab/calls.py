"""Calls of the laboratory's kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import flash_cute.ops  # noqa: F401  registers the fakes
from flash_cute import _torch_internals as internals
from flash_cute.call.validate import ops as validate_ops
from flash_cute.lab.kernel_configs import FlashForwardKernelConfig
from flash_cute.native import library

_OPS = torch.ops.flash_cute
_BUILT = frozenset(library.lab_kernels())
_VECTOR = 8  # elements in 16 bytes


@dataclass(frozen=True)
class KernelUsage:
    """The resources of a kernel on the current GPU."""

    registers: int  # a thread
    local_bytes: int  # a thread: spilled registers
    smem_bytes: int  # a CTA
    ctas_per_sm: int  # that run at once


def forward(
    kernel_cfg: FlashForwardKernelConfig, q: Tensor, k: Tensor, v: Tensor, o: Tensor | None = None
) -> Tensor:
    """softmax(q k^T / sqrt(d_head)) v by the kernel of ``kernel_cfg``; no mask, no gradient.

    Args:
        kernel_cfg: a config that this build has:
            :func:`flash_cute.lab.kernel_configs.get_kernels_to_build` lists them.
        q, k, v: (batch, seq_len, n_heads, d_head) on one CUDA device, of one shape and of the
            config's dtype, fp16 or bf16. seq_len is a multiple of B_r and of B_c. Views are
            allowed if the last dimension is contiguous and rows begin on 16-byte boundaries.
        o: written and returned if given; of q's shape, dtype and device.

    Returns:
        ``o``, or a new contiguous tensor of q's shape and dtype.

    Raises:
        TypeError: an argument is not a config or a tensor, or has another dtype.
        ValueError: shapes, strides or devices do not fit, the GPU is older than Ampere (compute
            capability 8.0), or the config is not in this build.
        NotImplementedError: a gradient is required; ``flash_cute.flash_attn_func`` has one.

    A call that is refused writes nothing. The algorithm is FlashAttention-2 (arXiv 2307.08691).

    Example::

        import torch
        from flash_cute import lab

        config = lab.kernel_configs.get_kernel_progression_configs()[-1]
        q, k, v = torch.randn(3, 2, 1024, 16, 128, device="cuda", dtype=torch.bfloat16)
        out = lab.forward(config, q, k, v)
    """
    check_call(kernel_cfg, q, k, v, o)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if o is None else o
    _OPS.lab_forward(kernel_cfg.kernel_name(), q, k, v, out=out)
    return out


def forward_timed(
    kernel_cfg: FlashForwardKernelConfig, q: Tensor, k: Tensor, v: Tensor, o: Tensor | None = None
) -> tuple[Tensor, float]:
    """:func:`forward`, and the kernel's time in milliseconds.

    Two CUDA events are recorded right before and after the kernel, on the current stream; the call
    waits for the second. A new kernel is loaded before the first event. A single time includes the
    launch latency, some microseconds, and the GPU's clock is lower than under load: repeat the call
    and take the median.

    Raises:
        RuntimeError: inside of a CUDA graph's capture, where waiting is not possible.
        TypeError, ValueError, NotImplementedError: as :func:`forward`.

    Example::

        import torch
        from flash_cute import lab

        config = lab.kernel_configs.get_kernel_progression_configs()[-1]
        q, k, v = torch.randn(3, 2, 1024, 16, 128, device="cuda", dtype=torch.bfloat16)
        out, milliseconds = lab.forward_timed(config, q, k, v)
    """
    check_call(kernel_cfg, q, k, v, o)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("forward_timed waits for the GPU: capture forward in CUDA graphs")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if o is None else o
    return out, _OPS.lab_forward_timed(kernel_cfg.kernel_name(), q, k, v, out=out)


def usage(kernel_cfg: FlashForwardKernelConfig) -> KernelUsage:
    """The resources of the kernel of ``kernel_cfg`` on the current CUDA device.

    Raises:
        TypeError: it is not a config. ValueError: it is not in this build.

    Example::

        from flash_cute import lab

        config = lab.kernel_configs.get_kernel_progression_configs()[-1]
        print(lab.usage(config).registers)
    """
    _check_config(kernel_cfg)
    _check_built(kernel_cfg)
    registers, local_bytes, ctas = _OPS.lab_usage(kernel_cfg.kernel_name())
    return KernelUsage(registers, local_bytes, kernel_cfg.smem_bytes, ctas)


def check_call(
    kernel_cfg: FlashForwardKernelConfig, q: Tensor, k: Tensor, v: Tensor, o: Tensor | None
) -> None:
    """The checks of :func:`forward`."""
    _check_config(kernel_cfg)
    given = {"q": q, "k": k, "v": v} | ({} if o is None else {"o": o})
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; expected a tensor")
    for name, x in given.items():
        if not x.is_cuda:
            raise ValueError(
                f"{name} is on {x.device}; the laboratory's kernels are CUDA's: move it to a GPU, "
                "or call flash_cute.flash_attn_func"
            )
    check_dtypes(kernel_cfg, given)
    check_shapes(kernel_cfg, given)
    check_memory(given)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise NotImplementedError(
            "the laboratory's kernels have no backward: call under torch.no_grad(), or use "
            "flash_cute.flash_attn_func"
        )
    if not internals.is_fake(q):
        check_gpu(q.device)
    _check_built(kernel_cfg)


def _check_config(kernel_cfg: FlashForwardKernelConfig) -> None:
    if not isinstance(kernel_cfg, FlashForwardKernelConfig):
        raise TypeError(
            f"kernel_cfg is a {type(kernel_cfg).__name__}; expected a FlashForwardKernelConfig of "
            "flash_cute.lab.kernel_configs"
        )


def check_dtypes(kernel_cfg: FlashForwardKernelConfig, given: dict[str, Tensor]) -> None:
    """Checks that all dtypes are the config's."""
    for name, x in given.items():
        if x.dtype not in (torch.float16, torch.bfloat16):
            raise TypeError(f"{name} is {x.dtype}; the laboratory has fp16 and bf16: cast it")
    expected = kernel_cfg.dtype.to_torch_dtype()
    for name, x in given.items():
        if x.dtype != expected:
            raise TypeError(
                f"{name} is {x.dtype}, and kernel_cfg's dtype is {kernel_cfg.dtype.name}: cast it, "
                "or take a config of its dtype"
            )


def check_shapes(kernel_cfg: FlashForwardKernelConfig, given: dict[str, Tensor]) -> None:
    """Checks that all shapes are equal, and multiples of the config's blocks."""
    q = given["q"]
    if q.dim() != 4:
        raise ValueError(
            f"q has shape {tuple(q.shape)}; expected (batch, seq_len, n_heads, d_head)"
        )
    for name, x in given.items():
        if x.shape != q.shape:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, and q {tuple(q.shape)}: they must be equal"
            )
    _, seq_len, _, d_head = q.shape
    if d_head != kernel_cfg.d_head:
        raise ValueError(f"q has d_head {d_head}, and kernel_cfg is for {kernel_cfg.d_head}")
    for name in ("B_r", "B_c"):
        block = getattr(kernel_cfg, name)
        if block < 1:
            raise ValueError(f"kernel_cfg's {name} is {block}; expected at least 1")
        if seq_len % block != 0:
            raise ValueError(
                f"seq_len is {seq_len}, no multiple of kernel_cfg's {name}, {block}: "
                f"{seq_len // block * block} and {(seq_len // block + 1) * block} are"
            )


def check_memory(given: dict[str, Tensor]) -> None:
    """Checks devices, alignment of rows, and that the output shares no memory."""
    q = given["q"]
    for name, x in given.items():
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, and q on {q.device}: move it there")
        if x.numel() == 0:
            continue
        steps = [x.stride(i) for i in range(3) if x.shape[i] > 1]
        if x.stride(3) != 1 or any(step % _VECTOR for step in (*steps, x.storage_offset())):
            raise ValueError(
                f"{name} has strides {x.stride()} from element {x.storage_offset()} on; its last "
                "dimension must be contiguous and its rows begin on 16-byte boundaries: "
                f"{name}.contiguous()"
            )
    if "o" in given:
        validate_ops.check_not_expanded("o", given["o"])
        if not internals.is_fake(q):
            validate_ops.check_no_aliasing({"o": given["o"]}, given)


def check_gpu(device: torch.device) -> None:
    """Checks that the GPU is Ampere or newer."""
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        raise ValueError(
            f"{device} has compute capability {capability[0]}.{capability[1]}; the laboratory's "
            "kernels need 8.0 (Ampere) or higher"
        )


def _check_built(kernel_cfg: FlashForwardKernelConfig) -> None:
    if kernel_cfg.kernel_name() in _BUILT:
        return
    problems = "; ".join(kernel_cfg.problems())
    why = f"cannot be built: {problems}" if problems else "is not in this build"
    if not _BUILT:
        why += " (a build without CUDA kernels: FLASH_CUTE_BUILD=cuda makes them)"
    raise ValueError(
        f"kernel_cfg {kernel_cfg} {why}. get_kernels_to_build() of flash_cute.lab.kernel_configs "
        "lists those of a build; with FLASH_CUTE_LAB=all it has those of "
        "get_autotuning_kernel_configs() too"
    )
