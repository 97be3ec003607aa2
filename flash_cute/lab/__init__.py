"""The kernel laboratory: FlashAttention-2's forward with each technique on or off.

:func:`forward` and :func:`forward_timed` run the kernel of a
:class:`~flash_cute.lab.kernel_configs.FlashForwardKernelConfig`, and
:mod:`flash_cute.lab.kernel_configs` lists those that there are. ``python -m flash_cute.lab`` checks
and measures them.
"""

from flash_cute.lab import kernel_configs
from flash_cute.lab.calls import KernelUsage, forward, forward_timed, usage
from flash_cute.lab.kernel_configs import DType, FlashForwardKernelConfig

__all__ = [
    "DType",
    "FlashForwardKernelConfig",
    "KernelUsage",
    "forward",
    "forward_timed",
    "kernel_configs",
    "usage",
]
