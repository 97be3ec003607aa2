"""Which calls the ops of e4m3 inputs compute, and such a call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute import ops
from flash_cute.call import validate
from flash_cute.kernels import plan_log
from flash_cute.ops.typed import FwdCall, VarlenFwdCall
from flash_cute.sparse.value import Sparse

E4M3 = torch.float8_e4m3fn
Call = FwdCall | VarlenFwdCall
OpDescales = tuple[Tensor | None, Tensor | None, Tensor | None]  # in the ops' shapes


def why_widened(
    call: Call, out_dtype: torch.dtype | None = None, sparse: Sparse | None = None
) -> tuple[str, ...]:
    """The reasons for which a call with fp8 q and k is widened to 16 bits; none if the ops of e4m3
    inputs, ``fp8_fwd`` and ``fp8_varlen_fwd``, compute it.

    Example::

        import torch
        from flash_cute.fp8 import why_widened
        from flash_cute.ops.typed import FwdCall

        q, k, v = torch.randn(3, 2, 100, 8, 64).to(torch.float8_e4m3fn).unbind()
        assert why_widened(FwdCall(q, k, v)) == ()
        print(why_widened(FwdCall(q, k, v.bfloat16(), softcap=30.0)))
    """
    reasons = [
        f"{name} has dtype {x.dtype}" for name, x in zip("qkv", call[:3], strict=True)
        if x.dtype != E4M3
    ]  # fmt: skip
    device = call.q.device
    if not ops.has_fp8_attention(device):
        reasons.append(f"there are no kernels of e4m3 inputs for {device}")
    if device.type == "cuda":
        reasons += [
            f"{name}'s head dim is {x.shape[-1]}, above {validate.CUDA_MAX_HEAD_DIM}"
            for name, x in (("q", call.q), ("v", call.v))
            if x.shape[-1] > validate.CUDA_MAX_HEAD_DIM
        ]
    if any(hasattr(x, "placements") for x in call[:3]):
        reasons.append("q, k and v are DTensors")
    if out_dtype == torch.float32:
        reasons.append("out_dtype is torch.float32")
    reasons += [
        f"{name} is given" for name in ("softcap", "dropout_p") if not _is_zero(getattr(call, name))
    ]  # fmt: skip
    given = {"alibi_slopes": call.alibi_slopes is not None, "sparse": sparse is not None}
    given |= {"return_attn_probs": call.return_softmax, "return_max_logits": call.return_row_max}
    reasons += [f"{name} is given" for name, is_given in given.items() if is_given]
    sink = call.sink
    if isinstance(sink, Tensor) and sink.requires_grad and torch.is_grad_enabled():
        reasons.append("sink requires grad")
    return tuple(reasons)


def _is_zero(x: Any) -> bool:
    return type(x) in (int, float) and x == 0


def attend(call: Any, descales: OpDescales, out_dtype: torch.dtype | None) -> Any:
    """(out, softmax_lse) of a valid call by the op of e4m3 inputs."""
    if plan_log.is_on():
        plan_log.fp8(call)
    op = ops.fp8_fwd
    sequences: tuple[Any, ...] = ()
    if isinstance(call, VarlenFwdCall):
        op, sequences = ops.fp8_varlen_fwd, (*call[3:9], call.block_table)
    sink = None if call.sink is None else call.sink.float()
    window = bool(call.is_causal), call.window_size_left, call.window_size_right
    args = (*call[:3], *sequences, *descales, call.softmax_scale, *window, sink, True, out_dtype)
    if torch.compiler.is_compiling() or ops.transformed():
        return op(*args)
    with internals.below_autograd():
        return op(*args)
