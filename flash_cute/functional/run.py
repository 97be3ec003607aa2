"""The one way from every public attention function to its op: :func:`run` validates a call, runs
one op and orders its results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute import check, ops
from flash_cute.call import spellings, validate
from flash_cute.call.rng import rng_of_call
from flash_cute.call.sizes import batch_of, longest_keys, longest_queries
from flash_cute.call.validate import ops as validate_ops
from flash_cute.call.validate import options as validate_options
from flash_cute.functional import gathered, pack_gqa
from flash_cute.functional.kept_autograd import Kept
from flash_cute.functional.packed_autograd import PackedAttention
from flash_cute.kernels import plan_log
from flash_cute.ops.schema import Results
from flash_cute.ops.typed import AttendKvcacheCall, FwdCall, FwdKvcacheCall, VarlenFwdCall
from flash_cute.sparse.value import Sparse

Result = Any  # out, or the tuple that a call asks for
_NUMBERS = (int, float)

Call = FwdCall | VarlenFwdCall


def needs_grad(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a call of these has a gradient."""
    return (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled()


def is_plain(
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    dropout_p: float,
) -> bool:
    """Whether scores are scaled, and masked by ``causal`` at most. False, too, where an argument is
    of a kind that validation has to look at, and in graphs."""
    return (
        not torch.compiler.is_compiling()  # numbers may be known to data alone
        and (softmax_scale is None or type(softmax_scale) is float)
        and type(causal) is bool
        and type(window_size) is tuple
        and type(softcap) in _NUMBERS
        and type(dropout_p) in _NUMBERS
        and softcap == dropout_p == 0
        and alibi_slopes is None
        and window_size == (-1, -1)
    )


def are_counts(x: Any, y: Any) -> bool:
    """Whether both are ints that ops can be given, from 0 on; asked outside of graphs alone."""
    most = validate.INT64_MAX
    return type(x) is type(y) is int and 0 <= x <= most and 0 <= y <= most


def is_direct(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> bool:
    """Whether such a call may go straight to its op: plain tensors of one device that need no copy
    and no other dtype, and nothing around the call that has to see it."""
    if not (type(q) is type(k) is type(v) is Tensor):  # fakes and other kinds are validated
        return False
    device = q.device
    for x in (k, v, *others):  # one on meta would have the op's fake run
        if x is not None and (type(x) is not Tensor or x.device != device):
            return False
    return (
        are_rows(q, k, v)
        and (q.is_cuda or q.is_cpu)
        and q.dtype in validate.DTYPES
        and not torch.is_autocast_enabled(device.type)
        and not (check.is_on() or plan_log.is_on())
        and not ops.transformed()
        and not internals.in_context_parallel()
    )


def are_rows(x: Tensor, y: Tensor, z: Tensor) -> bool:
    """Whether the last dimension of each is contiguous."""
    try:
        if x.is_contiguous() and y.is_contiguous() and z.is_contiguous():  # the fastest to ask
            return True
        return x.stride(-1) == y.stride(-1) == z.stride(-1) == 1
    except (RuntimeError, IndexError):  # of layouts and ranks that validation refuses
        return False


def run(
    call: Call,
    *,
    return_lse: bool,
    return_rng: bool,
    generator: torch.Generator | None,
    packed: Tensor | None = None,
    out: Tensor | None = None,
    refused: list[Exception] | None = None,
    sparse: Sparse | None = None,
    kept: Kept | None = None,
) -> Result:
    """Attention of a call whose q, k and v, and sequences, are valid; the rest is validated here.

    ``sparse`` joins the call, ``packed`` is the tensor that k and v, and maybe q, are views of,
    ``out`` the one to fill. ``refused`` has the error of a call that went straight to its op; it is
    raised if validation has no better words, and leaves the list, as the frames of its traceback
    would keep tensors alive. ``kept`` says how backward keeps q, k and v, if not as they are.
    """
    call = spellings.with_reals(call)
    if sparse is not None:
        call = _stored(call, sparse)
    check_options(call, return_lse, return_rng)
    if call.q.is_cuda:
        validate.cuda(call.q, call.v, call.sink)
    if refused:
        raise refused.pop()
    grad = needs_grad(call.q, call.k, call.v)
    if call.sink is not None and call.sink.requires_grad:
        grad = torch.is_grad_enabled()
    if out is not None:
        _check_out(out, call, grad)
    if sparse is not None:
        rows = pack_gqa.pack(call, sparse)
        if rows is not None:
            found = run(
                rows[0], return_lse=return_lse, return_rng=return_rng, generator=generator,
                sparse=rows[1],
            )  # fmt: skip
            group = call.q.shape[-2] // call.k.shape[-2]
            return pack_gqa.unpack(found, group, out, return_lse)
        call = call._replace(tile_lists=sparse.tile_lists, tile_bits=sparse.tile_bits)
        validate_ops.lists(call, batch_of(call), of_keys=False)
    if plan_log.is_on():
        plan_log.attention(call, grad)
    rng = rng_of_call(call.q, call.dropout_p, generator, call.rng)
    call = call._replace(rng=rng, allow_tf32=ops.allow_tf32(call.q))
    out, softmax_lse, row_max, probs = _attend(call, grad, packed, out, return_lse, kept)
    results: list[Any] = [out]
    if return_lse or call.return_softmax:
        results.append(softmax_lse)
    if call.return_softmax:
        results.append(probs)
    if return_rng:
        results.append(rng)
    if row_max is not None:
        results.append(row_max.detach().amax((0, 2) if isinstance(call, FwdCall) else 1))
    return tuple(results) if len(results) > 1 else out


def _attend(
    call: Call,
    grad: bool,
    packed: Tensor | None,
    out: Tensor | None,
    return_lse: bool,
    kept: Kept | None,
) -> Results:
    """out, softmax_lse, row_max and probabilities of a valid call, by its shortest way."""
    op = ops.OP_OF[type(call)]
    is_eager = not torch.compiler.is_compiling() and not ops.transformed()
    if call.tile_lists is not None and is_eager and gathered.is_needed(call, grad):
        result, *statistics = gathered.attend(call)
        return result if out is None else out.copy_(result), *statistics
    if out is not None:
        return _into(out, op, call, return_lse)
    if kept is not None and (is_eager or (torch.compiler.is_compiling() and kept.is_traced(call))):
        return kept.attend(call), None, None, None
    if is_eager and not grad:
        # Straight to the kernel: without gradients the Python autograd formula is only a detour.
        with internals.below_autograd():
            return op(*call)
    is_plain = is_eager and call.tile_lists is None and not call.return_row_max
    if packed is not None and packed.requires_grad and is_plain:
        separate_q = call.q if packed.shape[-3] == 2 else None
        out, softmax_lse, probs = PackedAttention.apply(packed, separate_q, call.sink, call)
        return out, softmax_lse, None, probs
    return op(*call)


def _stored(call: Call, sparse: Sparse) -> Call:
    """The call with tensors that kernels over lists read, if ``sparse`` is for it."""
    if not isinstance(sparse, Sparse):
        raise TypeError(
            f"sparse is {validate.kind_of(sparse)}; expected a flash_cute.Sparse, "
            "which Sparse.blocks makes of a BlockMask's tensors"
        )
    q, k, v = map(gathered.stored, (call.q, call.k, call.v))
    longest = longest_queries(call), longest_keys(call)
    sparse.check(batch_of(call), q.shape[-2], k.shape[-2], longest, q.device, call.is_causal)
    return call._replace(q=q, k=k, v=v)


def check_options(call: Call, return_lse: bool, return_rng: bool) -> None:
    """Checks all of a call but q, k, v and sequences, and not what the device supports."""
    validate.whole_sequences()
    validate.flag("return_attn_probs", call.return_softmax)
    validate.flag("return_lse", return_lse)
    validate.flag("return_rng", return_rng)
    validate.flag("return_max_logits", call.return_row_max)
    if isinstance(call, VarlenFwdCall):
        validate.flag("zero_tensors", call.zero_tensors)
    validate_options.check(call, batch_of(call))


def run_kvcache(call: FwdKvcacheCall) -> tuple[Tensor, Tensor]:
    """out and softmax_lse by the op that appends, or if no keys join by the one that only reads."""
    if call.k is not None:
        return ops.fwd_kvcache(*call)
    return ops.attend_kvcache(*(getattr(call, name) for name in AttendKvcacheCall._fields))


def _into(out: Tensor, op: Any, call: Call, return_lse: bool) -> Results:
    """Attention into ``out``, by the op's out overload; statistics if asked for."""
    q = call.q
    *lead, rows, heads, _ = q.shape
    softmax_lse, row_max = (
        q.new_empty((*lead, heads, rows), dtype=validate_ops.statistic_dtype(q)) if asked else None
        for asked in (return_lse, call.return_row_max)
    )
    ops.OUT_OF[op](*call, out=out, softmax_lse=softmax_lse, row_max=row_max)
    return out, softmax_lse, row_max, None


def _check_out(out: Tensor, call: Call, grad: bool) -> None:
    if grad or call.return_softmax:
        raise ValueError(
            "out is given; it goes with tensors that require no grad, or torch.no_grad(), and "
            "without return_attn_probs"
        )
    q = call.q
    validate_ops.buffer("out", out, (*q.shape[:-1], call.v.shape[-1]), q.dtype, q.device)
    validate.contiguous_last("out", out)
    if not torch.compiler.is_compiling():
        validate_ops.check_no_aliasing({"out": out}, {"q": q, "k": call.k, "v": call.v})
