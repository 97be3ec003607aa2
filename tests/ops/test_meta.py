"""Fakes refuse what the ops refuse: on meta, under FakeTensorMode, and while a graph is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_arguments import BF16, INT32, Change, good_arguments, on, to, vector
from test_kvcache_errors import good as good_over_a_cache
from test_op_errors import OPS, OPS_OF_BACKWARD
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

ERRORS = (RuntimeError, ValueError, TypeError, NotImplementedError)
Arguments = dict[str, Any]

# What needs the place of elements, or a gradient, or whose error only values show.
_BY_PLACE = {"lse_is_out", "out_is_q", "dv_is_dk", "dk_is_k", "dq_is_dout", "dsink_is_dq"}


def on_meta(arguments: Arguments) -> Arguments:
    """With their strides, which ``to`` does not keep."""
    return {
        x: torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device="meta")
        if isinstance(y, torch.Tensor)
        else y
        for x, y in arguments.items()
    }


def under_fake_mode(arguments: Arguments) -> Arguments:
    mode = FakeTensorMode()
    return {
        x: mode.from_tensor(y) if isinstance(y, torch.Tensor) else y for x, y in arguments.items()
    }


WAYS = pytest.mark.parametrize("way", [on_meta, under_fake_mode])


def forward_arguments() -> Arguments:
    arguments = good_arguments("func", "cpu")
    out = torch.empty_like(arguments["q"])
    return arguments | {"out": out, "softmax_lse": torch.empty(2, 4, 8)}


@WAYS
@pytest.mark.parametrize("name", sorted(OPS.keys() - _BY_PLACE))
def test_forward(name, way):
    change, word = OPS[name]
    arguments = forward_arguments()
    changed = arguments | change(arguments)
    if "rng" in name:
        changed["dropout_p"] = 0.3
    torch.ops.flash_cute.fwd.out(**way(arguments))
    with pytest.raises(ERRORS, match=word):
        torch.ops.flash_cute.fwd.out(**way(changed))


@WAYS
@pytest.mark.parametrize("name", sorted(OPS_OF_BACKWARD.keys() - _BY_PLACE))
def test_backward(name, way):
    change, word = OPS_OF_BACKWARD[name]
    arguments = good_arguments("func", "cpu") | {"sink": torch.ones(4)}
    out, lse, _, _ = torch.ops.flash_cute.fwd(**arguments)
    arguments |= {f"d{x}": torch.empty_like(arguments[x]) for x in "qkv"}
    arguments |= {"dout": out, "out": out, "softmax_lse": lse, "dsink": torch.empty(4)}
    torch.ops.flash_cute.bwd.out(**way(arguments))
    with pytest.raises(ERRORS, match=word):
        torch.ops.flash_cute.bwd.out(**way(arguments | change(arguments)))


VARLEN: dict[str, tuple[Change, str]] = {
    "offsets_of_long": (on("cu_seqlens_q", torch.Tensor.long), "cu_seqlens_q has dtype"),
    "offsets_differ": (on("cu_seqlens_k", lambda x: x[:-1]), "cu_seqlens_k has"),
    "k_of_4_dims": (on("k", lambda x: x[None]), "k has shape"),
    "longest_negative": (to(max_seqlen_q=-1), "max_seqlen_q is -1"),
    "used_of_another_batch": (vector("seqused_k", 7, dtype=INT32), "seqused_k has 7"),
}


@WAYS
@pytest.mark.parametrize("name", VARLEN)
def test_varlen(name, way):
    change, word = VARLEN[name]
    arguments = good_arguments("varlen_func", "cpu")
    torch.ops.flash_cute.varlen_fwd(**way(arguments))
    with pytest.raises(ERRORS, match=word):
        torch.ops.flash_cute.varlen_fwd(**way(arguments | change(arguments)))


OVER_A_CACHE: dict[str, tuple[Change, str]] = {
    "q_of_3_dims": (on("q", lambda x: x[0]), "q has shape"),
    "caches_differ": (on("v_cache", lambda x: x[:5]), "k_cache and v_cache differ"),
    "dtypes_differ": (on("k_cache", torch.Tensor.half), "dtypes differ"),
    "new_heads": (on("k", lambda x: x[:, :, :1]), "k has shape"),
    "lengths": (vector("cache_seqlens", 3, dtype=INT32), "cache_seqlens has 3"),
    "table": (on("block_table", torch.Tensor.long), "block_table is torch.int64"),
    "rotary": (on("rotary_cos", lambda x: x[:, :3]), "rotary_cos|rotary_sin"),
    "one_cache": (lambda a: {"v_cache": a["k_cache"]}, "share memory"),
    "window": (to(window_size_left=-2), "window_size_left is -2"),
}


@WAYS
@pytest.mark.parametrize("name", OVER_A_CACHE)
def test_over_a_cache(name, way):
    change, word = OVER_A_CACHE[name]
    arguments = good_over_a_cache("cpu")
    torch.ops.flash_cute.fwd_kvcache(**way(arguments))
    changed = way(arguments | change(arguments))
    if name == "one_cache":
        changed["v_cache"] = changed["k_cache"]
    with pytest.raises(ERRORS, match=word):
        torch.ops.flash_cute.fwd_kvcache(**changed)


@WAYS
def test_combine(way):
    parts = {"out_partial": torch.ones(2, 3, 8), "lse_partial": torch.ones(2, 3)}
    assert torch.ops.flash_cute.combine(**way(parts))[0].shape == (3, 8)
    with pytest.raises(ValueError, match=r"expected .parts, .., dim."):
        torch.ops.flash_cute.combine(**way(parts | {"lse_partial": torch.ones(2, 4)}))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.ops.flash_cute.fwd(q, k, v)[0]


def append(q: torch.Tensor, cache: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    lengths = torch.full((len(q),), 3, dtype=INT32)
    caches = cache, cache.clone()
    return torch.ops.flash_cute.fwd_kvcache(q, *caches, new, new, cache_seqlens=lengths)[0]


def rows(*shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(shape, dtype=BF16) for shape in shapes)


DYNAMIC: dict[str, tuple[Callable[..., torch.Tensor], Callable[[int, int], Any]]] = {
    "dense": (attention, lambda b, n: rows((b, n, 4, 16), *[(b, n + 3, 2, 16)] * 2)),
    "append": (append, lambda b, n: rows((b, 1, 4, 16), (b, n, 2, 16), (b, 1, 2, 16))),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_shapes_are_compiled_once(name):
    """Fakes add no guard: what differs at first may become equal, and one becomes two."""
    torch._dynamo.reset()
    function, make = DYNAMIC[name]
    counter = CompileCounter()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for batch, n in ((7, 24), (3, 64), (5, 5), (16, 16), (4, 300)):  # 2 is heads_k, 16 dim
        args = make(batch, n)
        assert torch.equal(compiled(*args), function(*args))
    assert counter.frame_count == 1


def test_export_with_dynamic_shapes():
    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attention(q, k, v)

    batch, n, m = (torch.export.Dim(x) for x in ("batch", "n", "m"))
    shapes = ({0: batch, 1: n}, {0: batch, 1: m}, {0: batch, 1: m})
    _, make = DYNAMIC["dense"]
    program = torch.export.export(Attention(), make(2, 16), dynamic_shapes=shapes)
    for size in ((3, 40), (7, 7), (16, 2)):
        args = make(*size)
        assert torch.equal(program.module()(*args), attention(*args))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_is_refused_as_it_is_made(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, dynamic=dynamic, backend="eager")
    q, k, v = rows((2, 8, 4, 16), (2, 8, 2, 16), (2, 9, 2, 16))
    with pytest.raises(Exception, match="k and v differ in seqlen: k has 8, v 9"):
        compiled(q, k, v)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_depend_on_data_are_checked_when_the_graph_runs():
    def some(q: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        x = q[:, chosen.nonzero().flatten()]
        return attention(q, x, x)

    (q,) = rows((1, 8, 2, 16))
    chosen = torch.arange(8) % 3 == 0
    compiled = torch.compile(some, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, chosen), some(q, chosen))
