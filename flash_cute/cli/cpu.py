"""Which of two implementations the CPU runs for a call, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flash_cute.kernels import Problem

PLAIN = "ATen's flash kernel for the CPU, as torch's scaled_dot_product_attention"


def window(problem: Problem) -> tuple[int, int]:
    """How many keys before and after its own a query sees; negative: all."""
    left, right = problem.window_size
    return left, 0 if problem.causal else right


def reasons(problem: Problem) -> list[str]:
    """Why a call is not plain: the conditions of :func:`flash_cute.cpu.plain.causal_of`."""
    from flash_cute.cpu.plain import MAX_HEAD_DIM

    rows = problem.seqlen_q
    keys = rows if problem.seqlen_k is None else problem.seqlen_k
    dim_v = problem.head_dim_v or problem.head_dim
    left, right = window(problem)
    found = [name for name in ("softcap", "alibi", "dropout") if getattr(problem, name)]
    if computes_e4m3(problem):
        found.append("q, k and v of e4m3")
    if problem.lists:
        found.append("lists of tiles (sparse)")
    if dim_v != problem.head_dim:
        found.append(f"head dim {dim_v} of v, {problem.head_dim} of q and k")
    if problem.head_dim > MAX_HEAD_DIM:
        found.append(f"head dim {problem.head_dim}, above {MAX_HEAD_DIM}")
    if problem.batch == 0 or rows == 0 or keys == 0:
        found.append("no query or no key")
    if 0 <= left < keys - 1:
        found.append(f"a window of {left} keys before each query's own")
    if 0 <= right < rows - 1 and not (right == 0 and rows == keys):
        kind = "a causal mask" if right == 0 else f"a window of {right} keys after each query's own"
        found.append(f"{kind} over {rows} queries and {keys} keys")
    return found


def computes_e4m3(problem: Problem) -> bool:
    """Whether the op of e4m3 inputs computes it."""
    import torch

    return problem.dtype == torch.float8_e4m3fn and not problem.is_widened


def path(problem: Problem) -> str:
    """What runs the call."""
    from flash_cute.cpu.tiles import KEY_BLOCK, QUERY_BLOCK
    from flash_cute.sparse.lists import TILE

    if computes_e4m3(problem):
        rows = f"{QUERY_BLOCK} queries x {KEY_BLOCK} keys"
        return f"tiles of {rows}, in products of torch, weights rounded to e4m3"
    if problem.lists:
        return f"the tiles of {TILE} queries x {TILE} keys that lists name, in products of torch"
    tiles = f"tiles of {QUERY_BLOCK} queries x {KEY_BLOCK} keys, in products of torch"
    return tiles if reasons(problem) else PLAIN
