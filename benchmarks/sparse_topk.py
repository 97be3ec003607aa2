"""Time of attention to the blocks that each query token chose (Sparse.topk), on a GPU.

    python -m benchmarks.sparse_topk --json build/sparse_topk.json

Causal, bf16. Of two choices, ``near`` (of any 8 tokens at most 28 blocks: each draws from a pool
of theirs) and ``random`` (each from all blocks before it): milliseconds of forward and backward,
lists included, and of the lists alone, beside our dense call (``--dense``) and the Triton kernel
``parallel_nsa`` of flash-linear-attention, if it is importable. Medians of turns that take each in
order. Some rows of ours are compared with fp64 first.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import turns
from flash_cute import Sparse, flash_attn_func

BLOCK, GROUP_OF_TOKENS, POOL = 128, 8, 28


def choose(kind: str, seqlen: int, heads_k: int, k: int) -> Tensor:
    """int32 (1, seqlen, heads_k, k) on the GPU: the token's own block, the first, and others before
    it, -1 where there are too few."""
    token = torch.arange(seqlen, device="cuda")
    own = (token // BLOCK)[:, None, None].expand(-1, heads_k, 1)
    shape = (seqlen, heads_k, k)
    drawn = torch.empty(shape, dtype=torch.int32, device="cuda")
    for part in token.split(4096):  # scores of all blocks would not fit at once
        blocks = seqlen // BLOCK
        scores = torch.rand(len(part), heads_k, blocks, device="cuda")
        if kind == "near":
            groups = len(part) // GROUP_OF_TOKENS
            pool = torch.rand(groups, heads_k, blocks, device="cuda")
            block = torch.arange(blocks, device="cuda")
            pool.masked_fill_(block >= own[part][::GROUP_OF_TOKENS], -1)
            least = pool.topk(min(POOL - 1, blocks), -1).values[..., -1:]
            in_pool = (pool >= least).repeat_interleave(GROUP_OF_TOKENS, 0)
            scores.masked_fill_(~in_pool, -1)
        scores.masked_fill_(torch.arange(blocks, device="cuda") >= own[part], -1)
        best = scores.topk(k - 1, -1)
        others = best.indices.masked_fill(best.values < 0, -1)
        drawn[part] = torch.cat((own[part], others), -1).int()
    return drawn[None]


def union_of_tokens(chosen: Tensor) -> float:
    """How many blocks 8 tokens chose together, on average."""
    by_tokens = chosen[0].unflatten(0, (-1, GROUP_OF_TOKENS)).transpose(1, 2).flatten(2).sort(-1)
    words = by_tokens.values
    first = torch.cat((words[..., :1] >= 0, words[..., 1:] != words[..., :-1]), -1)
    return float((first & (words >= 0)).sum(-1).float().mean())


def check(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, out: Tensor) -> float:
    """The largest error of some tokens' rows, against fp64."""
    worst, group = 0.0, q.shape[2] // k.shape[2]
    for token in torch.randint(q.shape[1], (8,)).tolist():
        for head in range(0, q.shape[2], group + 1):
            blocks = chosen[0, token, head // group]
            key = torch.cat([torch.arange(BLOCK) + int(b) * BLOCK for b in blocks if b >= 0]).cuda()
            key = key[key <= token]
            keys, values = (x[0, key, head // group].double() for x in (k, v))
            scores = keys @ q[0, token, head].double() * q.shape[-1] ** -0.5
            error = torch.softmax(scores, 0) @ values - out[0, token, head].double()
            worst = max(worst, float(error.abs().max()))
    return worst


def rival(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> Callable[[], Tensor] | None:
    """The call of flash-linear-attention, if it is there."""
    try:
        nsa = importlib.import_module("fla.ops.nsa.parallel")
    except ImportError as error:
        print(f"without parallel_nsa: {error}")
        return None
    counts = (chosen >= 0).sum(-1)
    indices = chosen.long()
    return lambda: nsa.ParallelNSAFunction.apply(
        q, k, v, indices, counts, BLOCK, q.shape[-1] ** -0.5, None
    )


def measure(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """The times of one kind of choice."""
    shape = (1, options.seqlen, options.heads, options.dim)
    of_keys = (1, options.seqlen, options.heads_k, options.dim)
    q, k, v = (
        torch.randn(x, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for x in (shape, of_keys, of_keys)
    )
    chosen = choose(kind, options.seqlen, options.heads_k, options.k)

    def attend() -> Tensor:
        out: Tensor = flash_attn_func(q, k, v, causal=True, sparse=Sparse.topk(chosen))
        return out

    calls: dict[str, Callable[[], Tensor]] = {"ours": attend}
    theirs = rival(q, k, v, chosen)
    if theirs is not None:
        calls["parallel_nsa"] = theirs
    if options.dense:
        calls["dense"] = lambda: flash_attn_func(q, k, v, causal=True)
    found: dict[str, Any] = {"kind": kind, "union_of_8_tokens": union_of_tokens(chosen)}
    with torch.no_grad():
        found["error"] = check(q, k, v, chosen, attend())
        if theirs is not None:
            found["error_of_parallel_nsa"] = check(q, k, v, chosen, theirs())
        group = options.heads // options.heads_k
        lists = {"lists": lambda: Sparse.topk(chosen).token_lists(group, True)}
        found["forward_ms"] = turns({**calls, **lists}, options.rounds)
    dout = torch.randn_like(q)
    outs = {name: call() for name, call in calls.items()}
    back = {
        name: lambda out=out: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        for name, out in outs.items()
    }
    found["backward_ms"] = turns(back, options.rounds)
    found["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seqlen", type=int, default=131072)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--heads-k", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dense", action="store_true", help="measure the dense call, too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    sizes = {x: getattr(options, x) for x in ("seqlen", "heads", "heads_k", "dim", "k")}
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, **sizes}
    found["rows"] = [measure(kind, options) for kind in ("near", "random")]
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
