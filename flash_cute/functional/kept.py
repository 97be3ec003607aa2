"""Attention of q, k and v that are fp8 values times powers of two, which backward keeps in fp8.

Of 16 bits that is half of their bytes, and of the same out and log-sum-exp the same gradients to
the bit. Forward of e4m3 is by the op of such inputs where that computes the call. Graphs of
torch.compile keep q, k and v of other calls as they are, and transforms of torch.func of all.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flash_cute import check
from flash_cute.call import spellings, validate
from flash_cute.functional.kept_autograd import Fp8Form, Kept
from flash_cute.functional.run import run
from flash_cute.ops.typed import FwdCall, VarlenFwdCall


def attention(
    tensors: tuple[Tensor, ...],
    form: Fp8Form,
    lengths: dict[str, Any],
    *,
    causal: bool,
    window_size: tuple[int, int],
    softmax_scale: float | None,
    softcap: float,
    deterministic: bool,
    dropout_p: float,
) -> Tensor:
    """The attention functions' out, of q, k and v or of qkv that have ``form``; ``lengths`` are the
    functions' arguments for sequences of different lengths."""
    is_packed = len(tensors) == 1
    q, k, v = tensors[0].unbind(-3) if is_packed else tensors
    score: Any = (
        softmax_scale, causal, *spellings.sides(window_size), softcap, None, None, dropout_p, None,
        deterministic,
    )  # fmt: skip
    call: FwdCall | VarlenFwdCall
    if lengths:
        names = ("cu_seqlens", "max_seqlen", "seqused")
        given = [name if is_packed else f"{name}_{x}" for name in names for x in "qk"]
        lengths = {"seqused_q": None, **lengths}
        cu_q, cu_k, max_q, max_k, used_q, used_k = (lengths[name] for name in given)
        sequences = (cu_q, cu_k, max_q, max_k, used_q, used_k)
        validate.varlen(q, k, v, *sequences)
        check.varlen(q, k, *sequences, None, False, packed=is_packed)
        call = VarlenFwdCall(q, k, v, *sequences, False, None, *score)
    else:
        validate.dense(q, k, v)
        check.dense(q, k)
        call = FwdCall(q, k, v, *score)
    return run(call, return_lse=False, return_rng=False, generator=None, kept=Kept(tensors, form))
