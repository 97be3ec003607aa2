"""Time of attention over blocks of 128 x 128, beside FlexAttention, FlashAttention-4 and cuDNN.

    python -m benchmarks.sparse_rivals --json build/sparse_rivals.json

Each row of blocks keeps as many others, by chance, for each head; not causal, bf16. Milliseconds of
forward and backward, medians of turns that take each call, and the largest distances of a rival's
results from ours. cuDNN's kernels are those of the package nvidia-cudnn-frontend. A rival that
cannot run is left out, and why is printed.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import turns
from flash_cute import Sparse, flash_attn_func

BLOCK = 128
SIZES = ((32768, 8), (92160, 40))  # tokens, heads; the second is a video model's
Call = Callable[[Tensor, Tensor, Tensor], Tensor]
Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # out and LSE
Backward = Callable[..., tuple[Tensor, ...]]  # of dout, q, k, v, out and LSE


class _Kernels(torch.autograd.Function):
    """A rival's kernels of forward and backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, run: Forward, back: Backward) -> Tensor:
        out, lse = run(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.back = back
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return *ctx.back(*grads, *ctx.saved_tensors)[:3], None, None


def choose(heads: int, blocks: int, sparsity: float) -> Tensor:
    """int32 (1, heads, blocks, kept), ascending: the blocks of keys of each block of queries."""
    kept = max(1, round(blocks * (1 - sparsity)))
    chosen = torch.rand(1, heads, blocks, blocks, device="cuda").topk(kept, -1).indices
    return chosen.sort(-1).values.int()


def padded(index: Tensor, blocks: int) -> Tensor:
    """Lists with room for all blocks."""
    return torch.nn.functional.pad(index, (0, blocks - index.shape[-1]))


def ours(index: Tensor, counts: Tensor, blocks: int) -> Call:
    sparse = Sparse.blocks(padded(index, blocks), counts)
    return lambda q, k, v: flash_attn_func(q, k, v, sparse=sparse)


def flex_attention(index: Tensor, counts: Tensor, blocks: int) -> Call:
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    none = torch.zeros_like(counts)
    lists = padded(index, blocks)
    mask = flex.BlockMask.from_kv_blocks(none, lists, counts, lists, BLOCK_SIZE=BLOCK)
    config: Any = importlib.import_module("torch._functorch.config")
    config.donated_buffer = False  # gradients are taken several times
    compiled = torch.compile(flex.flex_attention)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = compiled(*rows, block_mask=mask).transpose(1, 2)
        return out

    return call


def flash_attention_4(index: Tensor, counts: Tensor, blocks: int) -> Call:
    interface = importlib.import_module("flash_attn.cute.interface")
    lists = importlib.import_module("flash_attn.cute.block_sparsity")
    none = torch.zeros_like(counts)
    room = padded(index, blocks)
    make = partial(lists.BlockSparseTensorsTorch, block_size=(BLOCK, BLOCK))
    tensors = make(none, room, counts, room)
    chosen = torch.zeros((1, len(index[0]), blocks, blocks), dtype=torch.bool, device=index.device)
    of_keys = chosen.scatter_(-1, index.long(), True).mT
    queries = torch.argsort(of_keys.int().contiguous(), stable=True, descending=True).int()
    back_tensors = make(none, queries, of_keys.sum(-1, dtype=torch.int32), queries)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        found = interface._flash_attn_fwd(q, k, v, block_sparse_tensors=tensors, return_lse=True)
        return found[0], found[1]

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]:
        given = {"block_sparse_tensors": back_tensors}
        return tuple(interface._flash_attn_bwd(q, k, v, out, dout, lse, **given))

    return lambda q, k, v: _Kernels.apply(q, k, v, forward, backward)


def cudnn(index: Tensor, counts: Tensor, blocks: int) -> Call:
    kernels = importlib.import_module("cudnn.block_sparse_attention")
    given = {"q2k_block_nums": counts, "sparse_block_size": BLOCK, "layout": "bshd"}

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        found = kernels.block_sparse_attention_forward(q, k, v, index, **given)
        return found["o_tensor"], found["lse_tensor"]

    def backward(dout: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
        found = kernels.block_sparse_attention_backward(dout, *saved, index, **given)
        return tuple(found[name] for name in ("dq_tensor", "dk_tensor", "dv_tensor"))

    return lambda q, k, v: _Kernels.apply(q, k, v, forward, backward)


RIVALS = {
    "flex_attention": flex_attention,
    "flash_attention_4": flash_attention_4,
    "cudnn": cudnn,
}


def measure(seqlen: int, heads: int, sparsity: float, rounds: int) -> dict[str, Any]:
    """The times of one size."""
    shape = (3, 1, seqlen, heads, 128)
    q, k, v = torch.randn(shape, device="cuda", dtype=torch.bfloat16).unbind()
    blocks = seqlen // BLOCK
    index = choose(heads, blocks, sparsity)
    counts = torch.full_like(index[..., 0], index.shape[-1])
    calls = {"ours": ours(index, counts, blocks)}
    found: dict[str, Any] = {"seqlen": seqlen, "heads": heads, "sparsity": sparsity}
    with torch.no_grad():
        out = calls["ours"](q, k, v)
        for name, make in RIVALS.items():
            try:
                call = make(index, counts, blocks)
                found[f"distance_of_{name}"] = float((call(q, k, v) - out).abs().max())
            except Exception as error:  # it has its own reasons
                print(f"without {name}: {type(error).__name__}: {str(error)[:300]}")
                continue
            calls[name] = call
        found["forward_ms"] = turns({n: partial(c, q, k, v) for n, c in calls.items()}, rounds)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dout = torch.randn_like(q)
    back: dict[str, Callable[[], Any]] = {}
    for name, call in calls.items():
        out = call(*leaves)
        work = partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)
        if name == "ours":
            expected = work()
        else:
            try:
                pairs = zip(work(), expected, strict=True)
            except Exception as error:
                print(f"without backward of {name}: {type(error).__name__}: {str(error)[:300]}")
                continue
            distance = max((x - y).abs().max() for x, y in pairs)
            found[f"distance_of_gradients_of_{name}"] = float(distance)
        back[name] = work
    found["backward_ms"] = turns(back, rounds)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.5, 0.9])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    rows = [
        measure(*size, sparsity, options.rounds)
        for size in SIZES
        for sparsity in options.sparsities
        if size == SIZES[0] or sparsity > 0.8
    ]
    print(json.dumps({**found, "rows": rows}, indent=1))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**found, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
