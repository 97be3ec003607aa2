"""Finding the compiled library, and asking it what it holds."""

from flash_cute.native.library import (
    can_use_cuda,
    find,
    has_cuda_kernels,
    kernels,
    lab_kernels,
    only,
)

__all__ = ["can_use_cuda", "find", "has_cuda_kernels", "kernels", "lab_kernels", "only"]
