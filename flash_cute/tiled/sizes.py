"""Sizes of tiles and of memory, for :mod:`flash_cute.tiled`."""

from __future__ import annotations

import torch

from flash_cute import kernels
from flash_cute.call import validate

DEFAULT_BLOCK = 32  # of Bc and Br
MOST_SIZE = 2**29 - 1  # limit of the library's problems


def get_optimal_block_sizes(
    sequence_length: int, head_dim: int, use_half: bool = False
) -> tuple[int, int]:
    """(Bc, Br) of the forward kernel that the library prefers.

    The choice is :func:`flash_cute.kernels.plan`'s for the current GPU, or an H100 if there is
    none, with enough heads to fill it. Sizes are at most N if the same kernel is still nearest, as
    in float32, which has one kernel for all lengths of a head dim. Head dims above 256, which CUDA
    does not support, get the sizes of 256.

    Args:
        sequence_length: N.
        head_dim: D.
        use_half: of float16 tensors; else of float32.

    Raises:
        TypeError, ValueError: a number is not an int >= 1, or above 2^29 - 1.

    Example::

        from flash_cute import get_optimal_block_sizes

        bc, br = get_optimal_block_sizes(1024, 128)
    """
    check_sizes(sequence_length=sequence_length, head_dim=head_dim)
    _check_limit(sequence_length=sequence_length)
    validate.flag("use_half", use_half)
    problem = kernels.Problem(
        dtype=torch.float16 if use_half else torch.float32,
        heads=128,
        seqlen_q=sequence_length,
        head_dim=min(head_dim, validate.CUDA_MAX_HEAD_DIM),
    )
    kernel = kernels.plan(problem).kernel
    rows, columns = min(kernel.block_m, sequence_length), min(kernel.block_n, sequence_length)
    if kernels.nearest(problem, rows, columns) != kernel.id:
        return kernel.block_n, kernel.block_m
    return columns, rows


def estimate_memory_usage(
    batch_size: int, num_heads: int, seq_len: int, head_dim: int, use_half: bool = False
) -> dict[str, float]:
    """Bytes on the GPU of a forward call and its tensors.

    Args:
        batch_size, num_heads, seq_len, head_dim: B, H, N and D.
        use_half: of float16 tensors; else of float32.

    Returns:
        ``input_memory`` (Q, K and V), ``internal_memory`` (the log-sum-exps, and partial results if
        keys are split), ``output_memory`` (O) and ``total_memory``, their sum, in bytes;
        ``total_memory_mb`` in units of 2^20 bytes. ``torch.cuda.max_memory_allocated()`` grows by
        the total.

    Raises:
        TypeError, ValueError: a number is not an int >= 1, or above 2^29 - 1.

    Example::

        from flash_cute import estimate_memory_usage

        estimate_memory_usage(8, 16, 1024, 64, use_half=True)["total_memory_mb"]  # 64.5
    """
    check_sizes(batch_size=batch_size, num_heads=num_heads, seq_len=seq_len, head_dim=head_dim)
    _check_limit(batch_size=batch_size, num_heads=num_heads, seq_len=seq_len)
    validate.flag("use_half", use_half)
    dtype = torch.float16 if use_half else torch.float32
    rows = batch_size * num_heads * seq_len
    tensor = rows * head_dim * dtype.itemsize
    problem = kernels.Problem(
        dtype=dtype,
        batch=batch_size,
        heads=num_heads,
        seqlen_q=seq_len,
        head_dim=min(head_dim, validate.CUDA_MAX_HEAD_DIM),
    )
    with kernels.only(kernels.nearest(problem, DEFAULT_BLOCK, DEFAULT_BLOCK)):
        parts = kernels.plan(problem).workspace_bytes
    internal = rows * torch.float32.itemsize + parts
    total = 4 * tensor + internal
    return {
        "input_memory": 3 * tensor,
        "internal_memory": internal,
        "output_memory": tensor,
        "total_memory": total,
        "total_memory_mb": total / 2**20,
    }


def check_sizes(**sizes: int) -> None:
    """Refuses everything but ints >= 1."""
    for name, size in sizes.items():
        validate.count(name, size, 1)


def _check_limit(**sizes: int) -> None:
    for name, size in sizes.items():
        if size > MOST_SIZE:
            raise ValueError(f"{name} is {size}; at most {MOST_SIZE} is supported")


def check_shared_memory(bc: int, br: int, head_dim: int, element: int, there: int) -> None:
    """Refuses a pair whose tiles, Br rows of Q and Bc of K and of V, exceed shared memory."""
    row = head_dim * element
    needed = row * (br + 2 * bc)
    if needed <= there:
        return
    rows = there // row  # of Q, K and V together
    largest_bc = max(1, min(bc, rows * bc // (br + 2 * bc), (rows - 1) // 2))
    raise ValueError(
        f"Bc={bc}, Br={br} needs {needed} bytes of shared memory for tiles of Q, K and V with head "
        f"dim {head_dim}, and the GPU has {there} per CTA; the largest pair of this shape is "
        f"Bc={largest_bc}, Br={min(br, rows - 2 * largest_bc)}"
    )
