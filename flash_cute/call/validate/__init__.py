"""The checks of a call's arguments, made once before anything is computed (on the CPU the op
repeats them).

Wrong types and dtypes raise ``TypeError``, wrong shapes, values and devices ``ValueError``, and
what this build or device does not support ``NotImplementedError``. A message names the argument,
what was given, what is supported, and what to do. The checks may cost the host a microsecond or two
a call, so they are plain comparisons.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.native.library import has_cuda_kernels

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CUDA_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CUDA_SINK_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CUDA_MAX_HEAD_DIM = 256

INT64_MAX = 2**63 - 1
FP32_MAX = torch.finfo(torch.float32).max
FP32_TINY = torch.finfo(torch.float32).tiny


def dense(q: Tensor, k: Tensor, v: Tensor, *, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    """q (batch, seqlen_q, heads, dim), k (batch, seqlen_k, heads_k, dim), v as k with dim_v."""
    same_kind(q, k, v, dtypes=dtypes)
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        name, x = next((n, x) for n, x in _named(q, k, v) if x.dim() != 4)
        raise ValueError(
            f"{name} has {x.dim()} dimensions, shape {tuple(x.shape)}; "
            "expected (batch, seqlen, heads, dim); packed sequences go to a varlen function"
        )
    batch, _, heads, dim = q.shape
    batch_k, seqlen_k, heads_k, dim_k = k.shape
    batch_v, seqlen_v, heads_v, dim_v = v.shape
    if batch_k != batch or batch_v != batch:
        raise ValueError(f"batch sizes differ: q has {batch}, k {batch_k}, v {batch_v}")
    if seqlen_v != seqlen_k:
        raise ValueError(f"k and v differ in seqlen: k has {seqlen_k}, v {seqlen_v}")
    _heads_and_dims(q, k, v, heads, heads_k, heads_v, dim, dim_k, dim_v)


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    name_of_table: str = "block_table",
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> None:
    """q (total_q, heads, dim), k (total_k, heads_k, dim), v as k with dim_v.

    With ``block_table`` k and v are (num_blocks, page_size, heads_k, dim). ``cu_seqlens_q`` and
    ``cu_seqlens_k`` are int32 (batch + 1).
    """
    same_kind(q, k, v, dtypes=dtypes)
    rank = 3 if block_table is None else 4
    layout = "(total_k, heads_k, dim)" if rank == 3 else "(num_blocks, page_size, heads_k, dim)"
    if q.dim() != 3:
        raise ValueError(f"q has shape {tuple(q.shape)}; expected (total_q, heads, dim)")
    if k.dim() != rank or v.dim() != rank:
        name, x = ("k", k) if k.dim() != rank else ("v", v)
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {layout}")
    if k.shape[:-2] != v.shape[:-2]:
        raise ValueError(f"k and v differ in {layout}: {tuple(k.shape)} and {tuple(v.shape)}")
    _heads_and_dims(
        q, k, v, q.shape[1], k.shape[-2], v.shape[-2], q.shape[2], k.shape[-1], v.shape[-1]
    )
    batch = _sequences(OF_Q, q, cu_seqlens_q, max_seqlen_q, seqused_q)
    if _sequences(OF_K, q, cu_seqlens_k, max_seqlen_k, seqused_k) != batch:
        raise ValueError(
            f"cu_seqlens_k has {len(cu_seqlens_k)} entries; cu_seqlens_q asks for {batch + 1}"
        )
    if block_table is not None:
        check_block_table(block_table, q, batch, name_of_table)


def varlen_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, seqused: Tensor | None
) -> None:
    """:func:`varlen` for q, k and v of one packed tensor, (total, heads, dim) each."""
    same_kind(q, k, v)
    _heads_and_dims(q, k, v, *(x.shape[1] for x in (q, k, v)), *(x.shape[2] for x in (q, k, v)))
    _sequences(OF_BOTH, q, cu_seqlens, max_seqlen, seqused)


def length(name: str, x: int) -> None:
    """Checks a max_seqlen."""
    if type(x) is not int and (isinstance(x, bool) or not isinstance(x, (int, torch.SymInt))):
        raise TypeError(f"{name} is {kind_of(x)}; expected an int (use .item() once)")
    if not (allowed(x >= 0) and allowed(x <= INT64_MAX)):
        raise ValueError(f"{name} is {shown(x)}; expected the longest sequence's length")


def allowed(right: bool | torch.SymBool) -> bool:
    """``right``, or True if it depends on data: a compiled graph checks it when it runs."""
    return internals.assume(right) if torch.compiler.is_compiling() else bool(right)


def shown(x: float | torch.SymInt) -> str:
    """``x`` for a message; symbolic numbers of a graph cannot be printed."""
    return "a number of the graph" if internals.is_symbolic(x) else f"{x}"


def whole_sequences() -> None:
    """Refuses calls inside of torch's context_parallel, where q, k and v are a rank's tokens."""
    if internals.in_context_parallel():
        raise NotImplementedError(
            "inside of torch.distributed's context_parallel flash_cute would attend to this rank's "
            "tokens alone; call flash_cute.distributed.cp_attention outside of it, or "
            "torch.nn.functional.scaled_dot_product_attention"
        )


def cuda(q: Tensor, v: Tensor, sink: Tensor | None = None) -> None:
    """Refuses dtypes and head dims without CUDA kernels."""
    cuda_build_and_sink(q, sink)
    if q.dtype not in CUDA_DTYPES:
        raise NotImplementedError(
            f"dtype {q.dtype} is not supported on CUDA yet; supported: "
            f"{listed(CUDA_DTYPES)}; cast q, k and v, or run on the CPU"
        )
    if q.shape[-1] > CUDA_MAX_HEAD_DIM or v.shape[-1] > CUDA_MAX_HEAD_DIM:
        name, x = ("q", q) if q.shape[-1] > CUDA_MAX_HEAD_DIM else ("v", v)
        raise NotImplementedError(
            f"{name}'s head dim {x.shape[-1]} is not supported on CUDA yet; the largest is "
            f"{CUDA_MAX_HEAD_DIM}; run on the CPU"
        )


def cuda_build_and_sink(q: Tensor, sink: Tensor | None) -> None:
    """Refuses a build without CUDA kernels, unless tensors are fake, and other dtypes of sinks."""
    if not has_cuda_kernels() and not internals.is_fake(q):
        raise NotImplementedError(
            "q is on CUDA, and this build of flash_cute holds no CUDA kernels: "
            "build with nvcc (FLASH_CUTE_BUILD=cuda make build), or move the tensors to the CPU"
        )
    if sink is not None and sink.dtype not in CUDA_SINK_DTYPES:
        raise NotImplementedError(
            f"sink has dtype {sink.dtype}, which is not supported on CUDA; supported: "
            f"{listed(CUDA_SINK_DTYPES)}; cast it"
        )


def tensor(name: str, x: Any) -> None:
    """Refuses what is not a strided tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {kind_of(x)}; expected a torch.Tensor{_of_a_tracer(x)}")
    strided(name, x)


def _of_a_tracer(x: Any) -> str:
    """Advice for the message if ``x`` is a proxy of torch.fx's symbolic tracing."""
    if not isinstance(x, torch.fx.Proxy):
        return ""
    return '; call torch.fx.wrap("flash_attn_func") in the module that calls the function'


def strided(name: str, x: Tensor) -> None:
    """Refuses nested and sparse tensors. It must come first: other checks fail on these."""
    if x.is_nested:
        advice = "give a varlen function its values(), and its offsets() as int32 cu_seqlens"
        raise NotImplementedError(f"{name} is a nested tensor; {advice}")
    if x.layout is not torch.strided:
        raise NotImplementedError(f"{name} has layout {x.layout}; call {name}.to_dense()")


def flag(name: str, x: Any) -> None:
    """Refuses everything but bools, 0 and 1."""
    if type(x) is bool:
        return
    if not isinstance(x, int):
        raise TypeError(f"{name} is {kind_of(x)}; expected a bool")
    if x not in (0, 1):
        raise ValueError(f"{name} is {x}; expected a bool")


def count(name: str, x: Any, least: int = 0) -> None:
    """Refuses everything but ints >= ``least``."""
    if isinstance(x, bool) or not isinstance(x, (int, torch.SymInt)):
        raise TypeError(f"{name} is {kind_of(x)}; expected an int >= {least}")
    if not (allowed(x >= least) and allowed(x <= INT64_MAX)):
        raise ValueError(f"{name} is {shown(x)}; expected an int >= {least} that fits int64")


def packed(
    name: str,
    x: Tensor,
    rank: int,
    parts: int,
    q: Tensor | None = None,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> None:
    """Checks a packed tensor (..., parts, heads, dim) of the given rank against a separate q."""
    tensor(name, x)
    if isinstance(q, Tensor):
        strided("q", q)
    if x.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {x.dtype}; supported: {listed(dtypes)}")
    if isinstance(q, Tensor) and q.dtype != x.dtype:
        raise TypeError(f"dtypes differ: q has {q.dtype}, {name} {x.dtype}; cast them to one")
    if x.dim() != rank or x.shape[-3] != parts:
        lead = "batch, seqlen" if rank == 5 else "total"
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; expected ({lead}, {parts}, heads, dim)"
        )
    if rank == 5 and isinstance(q, Tensor) and q.dim() == 4 and len(q) != len(x):
        raise ValueError(f"batch sizes differ: q has {len(q)}, {name} {len(x)}")
    contiguous_last(name, x)


def is_descale_tensor(x: Any, name: str, q: Tensor, of_q: str = "q") -> TypeGuard[Tensor]:
    """Whether a descale is a tensor; refuses other numbers than positive ones, and tensors that are
    not where q is, which is called ``of_q``."""
    if isinstance(x, Tensor):
        strided(name, x)
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, {of_q} on {q.device}; they must agree")
        return True
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise TypeError(f"{name} is {kind_of(x)}; expected a number or a tensor")
    if not FP32_TINY <= x <= FP32_MAX:
        raise ValueError(
            f"{name} is {shown(x)}; expected a positive number, and a finite one in fp32, at least "
            f"{FP32_TINY:.3g}"
        )
    return False


def kind_of(x: Any) -> str:
    """The type of ``x``, with its module if the name is ambiguous: numpy has an int64, too."""
    kind = type(x)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def dtype_or_kind(x: Any) -> str:
    return str(x.dtype) if isinstance(x, Tensor) else kind_of(x)


def listed(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(map(str, dtypes))


def _named(q: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[str, Tensor], ...]:
    return ("q", q), ("k", k), ("v", v)


def same_kind(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    name_k: str = "k",
    name_v: str = "v",
    is_quantized: bool = False,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> None:
    """Refuses other dtypes and devices than q's; with ``is_quantized`` the dtypes of k and v are
    looked at elsewhere."""
    tensor("q", q)
    tensor(name_k, k)
    tensor(name_v, v)
    dtype, device = q.dtype, q.device
    if dtype not in dtypes:
        raise TypeError(f"q has dtype {dtype}; supported: {listed(dtypes)}")
    if not is_quantized and (k.dtype != dtype or v.dtype != dtype):
        raise TypeError(
            f"dtypes differ: q has {dtype}, {name_k} {k.dtype}, {name_v} {v.dtype}; cast them to "
            "one"
        )
    if k.device != device or v.device != device:
        raise ValueError(
            f"devices differ: q is on {device}, {name_k} on {k.device}, {name_v} on {v.device}"
        )
    if device.type not in ("cpu", "cuda", "meta"):
        raise NotImplementedError(f"q is on {device}; supported devices: cpu, cuda")


def _heads_and_dims(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    heads_k: int,
    heads_v: int,
    dim: int,
    dim_k: int,
    dim_v: int,
) -> None:
    if dim_k != dim:
        raise ValueError(f"q and k differ in head dim: q has {dim}, k {dim_k}")
    if heads_v != heads_k:
        raise ValueError(f"k and v differ in heads: k has {heads_k}, v {heads_v}")
    if heads_k == 0 or heads % heads_k != 0:
        raise ValueError(
            f"q has {heads} heads and k {heads_k}; heads must be a multiple of heads_k (GQA)"
        )
    if dim == 0 or dim_v == 0:
        raise ValueError(f"head dim is 0: q has {dim}, v {dim_v}")
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        for name, x in _named(q, k, v):
            contiguous_last(name, x)


def index_tensor(name: str, x: Tensor, q: Tensor) -> int:
    """An int32 contiguous vector on q's device; returns its length."""
    tensor(name, x)
    if x.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {x.dtype}; expected torch.int32")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}, q on {q.device}; they must agree")
    if x.dim() != 1 or not x.is_contiguous():
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected a contiguous vector")
    return x.shape[0]


# Names of cu_seqlens, max_seqlen and seqused: of q, of k, and of packed tensors.
OF_Q = ("cu_seqlens_q", "max_seqlen_q", "seqused_q")
OF_K = ("cu_seqlens_k", "max_seqlen_k", "seqused_k")
OF_BOTH = ("cu_seqlens", "max_seqlen", "seqused")


def _sequences(
    names: tuple[str, str, str], q: Tensor, cu_seqlens: Tensor, longest: int, used: Tensor | None
) -> int:
    """Checks cu_seqlens, max_seqlen and seqused of q or of k; returns the number of sequences."""
    batch = index_tensor(names[0], cu_seqlens, q) - 1
    if batch < 0:
        raise ValueError(f"{names[0]} is empty; it holds batch + 1 offsets")
    if used is not None and (entries := index_tensor(names[2], used, q)) != batch:
        raise ValueError(f"{names[2]} has {entries} entries; {names[0]} asks for {batch}")
    length(names[1], longest)
    return batch


def check_block_table(x: Tensor, q: Tensor, batch: int, name: str = "block_table") -> None:
    if not isinstance(x, Tensor) or x.dtype != torch.int32:
        raise TypeError(f"{name} is {dtype_or_kind(x)}; expected int32")
    strided(name, x)
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}, q on {q.device}; they must agree")
    if x.dim() != 2 or x.shape[0] != batch or not has_rows(x):
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; expected ({batch}, max_blocks), rows contiguous"
        )


def has_rows(x: Tensor) -> bool:
    """Whether the last dimension is contiguous, or has at most one element."""
    return x.stride(-1) == 1 or x.shape[-1] <= 1 or x.numel() == 0


def contiguous_last(name: str, x: Tensor) -> None:
    if not has_rows(x):
        raise ValueError(
            f"{name}'s last dimension has stride {x.stride(-1)}; it must be contiguous (stride 1): "
            f"call {name}.contiguous()"
        )
