"""``cp_decode``: a few queries over a key/value cache whose tokens ranks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute import ops
from flash_cute.call import validate
from flash_cute.call.sizes import cache_capacity
from flash_cute.call.validate import kvcache as validate_kvcache
from flash_cute.call.validate import options as validate_options
from flash_cute.distributed import comm, description
from flash_cute.distributed.context import ContextParallel
from flash_cute.distributed.merge import merge_, merge_sink, rows
from flash_cute.distributed.trace import named
from flash_cute.functional.kvcache import flash_attn_with_kvcache
from flash_cute.ops import autocast
from flash_cute.ops.autograd import refuse_tangents
from flash_cute.ops.typed import FwdKvcacheCall


def cp_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cp: ContextParallel,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_seqlens: int | Tensor = 0,
    cache_batch_idx: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    sink: Tensor | None = None,
    block: int | None = None,
) -> Any:
    """:func:`flash_cute.flash_attn_with_kvcache` over the caches of all ranks together.

    Every rank calls it with the same q, k, v and lengths, and with its own cache. It attends to
    the tokens that it has; one message of a rank's out and LSE, in fp32, gives all ranks the result
    over all tokens. Nothing is read back by the host.

    Args:
        q: (batch, seqlen_q, heads, dim), after rotary embedding.
        k_cache: (batch_cache, capacity, heads_k, dim), or with ``block_table`` (num_blocks,
            page_size, heads_k, dim): this rank's tokens, written in place. All ranks have the same
            capacity, or ``block_table`` of the same width and pages of the same size.
        v_cache: as k_cache, with its own head dim.
        cp: the ranks. Its strategy and layout do not matter. ``check=False`` saves a message
            between hosts in each call.
        k: (batch, seqlen_new, heads_k, dim), after rotary embedding, on every rank: each token
            joins the cache of the rank that it belongs to. More of them than queries are a prompt.
        v: as k.
        cache_seqlens: int, or int32 (batch,): tokens on all ranks before k joins. Tokens of a
            tensor's lengths that no rank has room for are neither written nor read.
        cache_batch_idx, block_table: as there, of this rank's cache.
        softmax_scale, causal, window_size, softcap, alibi_slopes, sink: as there; masks and ALiBi
            go by positions in the whole sequence.
        num_splits, return_softmax_lse: as there.
        block: so many tokens in a row belong to the first rank, as many to the next, and so on in
            turns: ranks have as much to do whatever the length. The last turn has what is left of
            the capacity. None is a rank's capacity, so that a rank gets tokens once the ones before
            it are full.

    With several queries and a mask each is a sequence of its own: keys are read once for each.

    Returns:
        out (batch, seqlen_q, heads, dim_v), the same on every rank, and as asked softmax_lse
        (batch, heads, seqlen_q).

    Raises:
        TypeError, ValueError, NotImplementedError: as there, and if ranks differ; the same message
            on all ranks. ALiBi needs the default ``block``, and a causal mask if there are several
            queries.
        RuntimeError: an argument requires gradients, in grad mode.

    Example::

        import torch
        from flash_cute.distributed import ContextParallel, cp_decode

        cp = ContextParallel()  # once, under torchrun; without it, of one rank
        k_cache, v_cache = torch.zeros(2, 4, 1024, 8, 64).unbind()  # 1024 tokens a rank
        q, k, v = torch.randn(3, 4, 100, 8, 64).unbind()  # the prompt
        cp_decode(q[:, -1:], k_cache, v_cache, cp, k, v)
        q, k, v = torch.randn(3, 4, 1, 8, 64).unbind()  # the next token
        out = cp_decode(q, k_cache, v_cache, cp, k, v, cache_seqlens=100)
    """
    options = {
        "cache_seqlens": cache_seqlens, "softmax_scale": softmax_scale, "causal": causal,
        "window_size": window_size, "softcap": softcap, "alibi_slopes": alibi_slopes,
        "sink": sink, "block": block,
    }  # fmt: skip
    caches: dict[str, Any] = {"k_cache": k_cache, "v_cache": v_cache, "block_table": block_table}
    if not isinstance(cp, ContextParallel):
        raise TypeError(f"cp is {type(cp).__name__}; expected a ContextParallel")
    problem, what = None, ""
    try:
        validate.flag("return_softmax_lse", return_softmax_lse)
        for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
            validate.tensor(name, x)
        q, k, v = autocast.cast_as(k_cache, q, k, v)
        lengths = _check(q, k, v, cp, caches, cache_batch_idx, num_splits, options)
        if cp.asks:
            what = description.of_decoding({"q": q, "k": k, "v": v} | caches, options)
    except Exception as error:  # whatever it is, the other ranks must not wait
        problem = error
    cp.agree(what, problem)

    batch, seqlen_q = q.shape[:2]
    capacity = cache_capacity(k_cache, block_table)
    tokens = _Tokens(cp.rank, cp.size, capacity, min(block or capacity, capacity))
    total = lengths if k is None else lengths + k.shape[1]
    new = _new(tokens, lengths, k, v)
    added = 0 if k is None else k.shape[1]
    left, right = window_size[0], 0 if causal else window_size[1]
    is_each_alone = seqlen_q > 1 and (left >= 0 or right >= 0)
    steps: int | Tensor = seqlen_q - 1  # the last query sees what all see
    if new and (is_each_alone or 0 <= left < added - seqlen_q):
        # For the append alone: the op has a window begin where new tokens join, or before.
        flash_attn_with_kvcache(q[:, :1], **caches, **new, cache_batch_idx=cache_batch_idx)
        new = {}
    if is_each_alone:
        steps = torch.arange(seqlen_q, dtype=torch.int32, device=q.device).repeat(batch)
        total = total.repeat_interleave(seqlen_q)
        if block_table is not None:
            caches["block_table"] = block_table.repeat_interleave(seqlen_q, 0)
        else:
            if cache_batch_idx is None:
                cache_batch_idx = torch.arange(batch, dtype=torch.int32, device=q.device)
            cache_batch_idx = cache_batch_idx.repeat_interleave(seqlen_q)
        if alibi_slopes is not None and alibi_slopes.dim() == 2:
            alibi_slopes = alibi_slopes.repeat_interleave(seqlen_q, 0)
    position = total - seqlen_q + steps
    stop = total if right < 0 else torch.minimum(total, (position + right + 1).clamp(min=0))
    end = tokens.before(stop)
    start = tokens.before((position - left).clamp(min=0)) if left >= 0 else None
    out, lse = flash_attn_with_kvcache(
        q.flatten(0, 1).unsqueeze(1) if is_each_alone else q,
        **({"cache_seqlens": end} | caches | new), cache_batch_idx=cache_batch_idx,
        cache_leftpad=start, softmax_scale=softmax_scale, softcap=softcap,
        alibi_slopes=alibi_slopes, num_splits=num_splits, return_softmax_lse=True,
    )  # fmt: skip
    if alibi_slopes is not None:  # the op counts distances from this rank's last key
        ahead = (position + 1 - cp.rank * capacity - end).to(lse.dtype)
        lse = lse - alibi_slopes.to(lse.dtype).reshape(-1, q.shape[2], 1) * ahead[:, None, None]
    if is_each_alone:
        out = out.view(batch, seqlen_q, *out.shape[2:])
        lse = lse.view(batch, seqlen_q, -1).transpose(1, 2)
    out, lse = _merged(out, lse, cp)
    if sink is not None:
        out, lse = merge_sink(out, lse, sink)
    cp.compare({name: x for name, x in options.items() if isinstance(x, Tensor)})
    out = out.to(q.dtype)
    return (out, lse) if return_softmax_lse else out


@dataclass(frozen=True)
class _Tokens:
    """Which tokens are a rank's: ``block`` in a row, then as many of each other rank. In the last
    turn blocks are what is left of ``capacity``, so that every rank's is used."""

    rank: int
    ranks: int
    capacity: int
    block: int

    def before(self, position: Tensor) -> Tensor:
        """How many are the rank's of the tokens before a position: where it lies in its cache."""
        rest = self.capacity % self.block
        whole_turns = (self.capacity - rest) * self.ranks
        turn = self.block * self.ranks
        of_turns = position.clamp(max=whole_turns)
        here = (of_turns % turn - self.rank * self.block).clamp(0, self.block)
        of_last = (position - whole_turns - self.rank * rest).clamp(0, rest)
        return of_turns // turn * self.block + here + of_last

    def has(self, position: Tensor) -> Tensor:
        """Whether a token is the rank's."""
        return self.before(position + 1) > self.before(position)


def _new(tokens: _Tokens, lengths: Tensor, k: Tensor | None, v: Tensor | None) -> dict[str, Any]:
    """The arguments that append this rank's rows of k and v, which are packed at the front."""
    if k is None or v is None or k.shape[1] == 0:
        return {}
    steps = torch.arange(k.shape[1], dtype=torch.int32, device=k.device)
    mine = tokens.has(lengths[:, None] + steps)
    order = mine.flatten().logical_not().to(torch.uint8).argsort(stable=True)
    counts = mine.sum(1).cumsum(0, dtype=torch.int32)
    k, v = (x.flatten(0, 1).index_select(0, order) for x in (k, v))
    return {
        "k": k, "v": v, "cu_seqlens_k_new": F.pad(counts, (1, 0)),
        "cache_seqlens": tokens.before(lengths),
    }  # fmt: skip


@named("merge")
def _merged(out: Tensor, lse: Tensor, cp: ContextParallel) -> tuple[Tensor, Tensor]:
    """out and lse over the tokens of all ranks, merged in fp32 from one message."""
    mine = torch.cat((out.to(lse.dtype), rows(lse)), -1)
    gathered, work = comm.all_gather(mine, cp.group if cp.size > 1 else None)
    work.wait()
    parts = gathered.view(cp.size, -1, mine.shape[-1])
    outs, lses = parts[..., :-1].contiguous(), parts[..., -1].contiguous()
    if lse.dtype == torch.float64:
        outs, lses = outs[:, :, None, None], lses[:, :, None, None]  # a row each is a batch entry
        for part, part_lse in zip(outs[1:], lses[1:], strict=True):
            merge_(outs[0], lses[0], part, part_lse)
        whole, of_all = outs[0], lses[0]
    else:
        whole, of_all = ops.combine(outs, lses, None)
    return whole.view(out.shape), of_all.view(*out.shape[:-1]).transpose(1, 2)


def _check(
    q: Tensor, k: Tensor | None, v: Tensor | None, cp: ContextParallel,
    caches: dict[str, Any], cache_batch_idx: Tensor | None, num_splits: int,
    options: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Checks a call as far as one rank can, before anything is written; returns the lengths."""
    k_cache, v_cache, block_table = caches.values()
    used, block, slopes = options["cache_seqlens"], options["block"], options["alibi_slopes"]
    if used is None:
        raise ValueError(
            "cache_seqlens is None; expected the tokens on all ranks before k is appended"
        )
    lengths = used
    if not isinstance(used, Tensor):
        validate.length("cache_seqlens", used)
        lengths = torch.full((len(q),), used, dtype=torch.int32, device=q.device)
    call = FwdKvcacheCall(
        q, k_cache, v_cache, k, v, None, None, lengths, cache_batch_idx, None, block_table,
        softmax_scale=options["softmax_scale"], is_causal=options["causal"],
        softcap=options["softcap"], alibi_slopes=slopes, sink=options["sink"],
        num_splits=num_splits,
    )  # fmt: skip
    left, right = validate_options.sides(options["window_size"])
    call = call._replace(window_size_left=left, window_size_right=right)
    validate_kvcache.check(call, validate_options.OF_FUNCTIONS)
    if q.is_cuda:
        validate_kvcache.cuda(q, v_cache, options["sink"])
    if block is not None:
        validate.count("block", block, 1)
    if internals.in_forward_mode():
        refuse_tangents([x for x in (q, k, v, k_cache, v_cache) if x is not None])
    for name, x in (("q", q), ("k", k), ("v", v), ("sink", options["sink"])):
        if description.wants_gradient(x):
            raise RuntimeError(
                f"{name} requires grad, and decoding has no gradient: call it in torch.no_grad(), "
                "or detach()"
            )
    capacity, seqlen_new = cache_capacity(k_cache, block_table), 0 if k is None else k.shape[1]
    if not isinstance(used, Tensor) and used + seqlen_new > cp.size * capacity:
        raise ValueError(
            f"cache_seqlens is {used} and k has {seqlen_new} tokens; {cp.size} ranks have room for "
            f"{capacity} each"
        )
    if slopes is not None and block not in (None, capacity):
        raise NotImplementedError(
            f"alibi_slopes are given and block is {block}: distances would not be consecutive; "
            "leave block None"
        )
    right = 0 if call.is_causal else right
    if slopes is not None and q.shape[1] > 1 and right != 0:
        raise NotImplementedError(
            f"alibi_slopes are given for {q.shape[1]} queries that see later tokens; give "
            "causal=True"
        )
    return lengths
