"""Bad input: the right exception, a message that names the argument, and nothing written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flash_cute
from flash_cute.testing import memory

NAN, INF = math.nan, math.inf
BF16, INT32 = torch.bfloat16, torch.int32
Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments]


def good_arguments(function: str, device: str) -> Arguments:
    """Arguments that the public function flash_attn_<function> accepts."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(BF16)

    def offsets() -> torch.Tensor:
        return torch.tensor([0, 5, 8], dtype=INT32, device=device)

    sequences_q = {"cu_seqlens_q": offsets(), "max_seqlen_q": 5}
    sequences_k = {"cu_seqlens_k": offsets(), "max_seqlen_k": 5}
    q, k, v = random(2, 8, 4, 16), random(2, 8, 2, 16), random(2, 8, 2, 16)
    rows = {"q": q[0], "k": k[0], "v": v[0], **sequences_q, **sequences_k}
    return {
        "func": {"q": q, "k": k, "v": v},
        "qkvpacked_func": {"qkv": random(2, 8, 3, 4, 16)},
        "kvpacked_func": {"q": q, "kv": random(2, 8, 2, 2, 16)},
        "varlen_func": rows,
        "varlen_qkvpacked_func": {
            "qkv": random(8, 3, 4, 16),
            "cu_seqlens": offsets(),
            "max_seqlen": 5,
        },
        "varlen_kvpacked_func": {
            "q": q[0],
            "kv": random(8, 2, 2, 16),
            **sequences_q,
            **sequences_k,
        },
    }[function]


def pages(arguments: Arguments, **changes: Any) -> Arguments:
    """Paged k and v for `varlen_func`: 4 pages of 4 rows, 2 pages a sequence."""
    device = arguments["q"].device
    cache = torch.zeros(4, 4, 2, 16, dtype=BF16, device=device)
    table = torch.arange(4, dtype=INT32, device=device).view(2, 2)
    return {"k": cache, "v": cache.clone(), "block_table": table} | changes


def on(name: str, change: Callable[[Any], Any]) -> Change:
    """Replaces argument `name` by a function of it."""
    return lambda arguments: {name: change(arguments[name])}


def to(**values: Any) -> Change:
    """Sets arguments to constants."""
    return lambda arguments: values


def vector(name: str, *shape: int, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Change:
    """Sets argument `name` to ones of a shape, by default on the device of the other arguments."""

    def change(arguments: Arguments) -> Arguments:
        device = next(x for x in arguments.values() if isinstance(x, torch.Tensor)).device
        return {name: torch.ones(shape, **({"dtype": dtype, "device": device} | kwargs))}

    return change


def elsewhere(x: torch.Tensor) -> torch.Tensor:
    """`x` on another device."""
    return x.to("cpu" if x.is_cuda else "meta")


def wide(x: torch.Tensor) -> torch.Tensor:
    """`x` with a last stride of 2."""
    return x.repeat_interleave(2, -1)[..., ::2]


DENSE: dict[str, tuple[Change, type[Exception], str]] = {
    "q_is_a_list": (to(q=[1.0]), TypeError, "q is list"),
    "k_is_none": (to(k=None), TypeError, "k is NoneType"),
    "q_of_3_dims": (on("q", lambda x: x[0]), ValueError, "q has 3 dim"),
    "k_of_5_dims": (on("k", lambda x: x[None]), ValueError, "k has 5 dim"),
    "q_of_int32": (on("q", torch.Tensor.int), TypeError, "int32"),
    "all_of_int64": (lambda a: {x: a[x].long() for x in "qkv"}, TypeError, "int64"),
    "all_of_complex": (lambda a: {x: a[x].cfloat() for x in "qkv"}, TypeError, "complex64"),
    "k_of_fp32": (on("k", torch.Tensor.float), TypeError, "float32"),
    "v_of_fp16": (on("v", torch.Tensor.half), TypeError, "float16"),
    "k_on_meta": (on("k", lambda x: x.to("meta")), ValueError, "meta"),
    "k_elsewhere": (on("k", elsewhere), ValueError, "devices differ"),
    "v_elsewhere": (on("v", elsewhere), ValueError, "devices differ"),
    "k_and_v_elsewhere": (
        lambda a: {x: elsewhere(a[x]) for x in "kv"},
        ValueError,
        "devices differ",
    ),
    "k_of_another_batch": (on("k", lambda x: x[:1]), ValueError, "batch"),
    "v_of_another_batch": (on("v", lambda x: x[:1]), ValueError, "batch"),
    "v_of_another_seqlen": (on("v", lambda x: x[:, :5]), ValueError, "seqlen"),
    "k_of_another_dim": (on("k", lambda x: x[..., :8]), ValueError, "head dim"),
    "v_of_other_heads": (on("v", lambda x: x[:, :, :1]), ValueError, "heads"),
    "heads_not_a_multiple": (on("q", lambda x: x[:, :, :3]), ValueError, "multiple"),
    "no_kv_heads": (lambda a: {x: a[x][:, :, :0] for x in "kv"}, ValueError, "heads"),
    "head_dim_0": (lambda a: {x: a[x][..., :0] for x in "qkv"}, ValueError, "head dim"),
    "q_last_stride": (on("q", wide), ValueError, "q's last dim"),
    "k_last_stride": (on("k", wide), ValueError, "k's last dim"),
    "v_last_stride": (on("v", wide), ValueError, "v's last dim"),
    "dropout_negative": (to(dropout_p=-0.1), ValueError, "dropout_p"),
    "dropout_above_1": (to(dropout_p=1.5), ValueError, "dropout_p"),
    "dropout_nan": (to(dropout_p=NAN), ValueError, "dropout_p"),
    "softcap_negative": (to(softcap=-1.0), ValueError, "softcap"),
    "softcap_nan": (to(softcap=NAN), ValueError, "softcap"),
    "softcap_inf": (to(softcap=INF), ValueError, "softcap"),
    "scale_nan": (to(softmax_scale=NAN), ValueError, "softmax_scale"),
    "scale_inf": (to(softmax_scale=-INF), ValueError, "softmax_scale"),
    "scale_of_str": (to(softmax_scale="1"), TypeError, "softmax_scale"),
    "dropout_of_str": (to(dropout_p="0.1"), TypeError, "dropout_p"),
    "softcap_of_none": (to(softcap=None), TypeError, "softcap"),
    "window_of_1": (to(window_size=(3,)), ValueError, "window_size"),
    "window_of_3": (to(window_size=(3, 3, 3)), ValueError, "window_size"),
    "window_of_3_with_0": (to(window_size=(3, 3, 0.0)), ValueError, "window_size"),
    "window_of_0": (to(window_size=()), ValueError, "window_size"),
    "window_of_int": (to(window_size=3), TypeError, "window_size"),
    "window_minus_2": (to(window_size=(-2, 0)), ValueError, "window_size"),
    "window_right_minus_5": (to(window_size=(0, -5)), ValueError, "window_size"),
    "window_of_float": (to(window_size=(1.5, 0)), TypeError, "window_size"),
    "window_of_none": (to(window_size=(None, 0)), TypeError, "window_size"),
    "window_of_bool": (to(window_size=(True, 0)), TypeError, "window_size"),
    "alibi_shape": (vector("alibi_slopes", 3), ValueError, "alibi_slopes"),
    "alibi_batch": (vector("alibi_slopes", 3, 4), ValueError, "alibi_slopes"),
    "alibi_dtype": (vector("alibi_slopes", 4, dtype=BF16), TypeError, "alibi_slopes"),
    "alibi_is_a_float": (to(alibi_slopes=0.5), TypeError, "alibi_slopes"),
    "alibi_elsewhere": (vector("alibi_slopes", 4, device="meta"), ValueError, "alibi_slopes"),
    "alibi_requires_grad": (
        vector("alibi_slopes", 4, requires_grad=True),
        NotImplementedError,
        "alibi_slopes",
    ),
    "sink_shape": (vector("sink", 3), ValueError, "sink"),
    "sink_2d": (vector("sink", 2, 4), ValueError, "sink"),
    "sink_dtype": (vector("sink", 4, dtype=INT32), TypeError, "sink"),
    "sink_elsewhere": (vector("sink", 4, device="meta"), ValueError, "sink"),
    "generator_is_an_int": (to(generator=7, dropout_p=0.1), TypeError, "generator"),
    "causal_is_a_str": (to(causal="no"), TypeError, "causal"),
    "deterministic_is_a_str": (to(deterministic="no"), TypeError, "deterministic"),
}

VARLEN: dict[str, tuple[Change, type[Exception], str]] = {
    "q_is_none": (to(q=None), TypeError, "q is NoneType"),
    "q_of_4_dims": (on("q", lambda x: x[None]), ValueError, "q has shape"),
    "k_of_4_dims": (on("k", lambda x: x[None]), ValueError, "k has shape"),
    "v_of_another_total": (on("v", lambda x: x[:5]), ValueError, "k and v"),
    "heads_not_a_multiple": (on("q", lambda x: x[:, :3]), ValueError, "multiple"),
    "k_of_another_dim": (on("k", lambda x: x[..., :8]), ValueError, "head dim"),
    "q_last_stride": (on("q", wide), ValueError, "q's last dim"),
    "cu_q_of_int64": (on("cu_seqlens_q", torch.Tensor.long), TypeError, "cu_seqlens_q"),
    "cu_k_of_float": (on("cu_seqlens_k", torch.Tensor.float), TypeError, "cu_seqlens_k"),
    "cu_q_is_a_list": (to(cu_seqlens_q=[0, 5, 8]), TypeError, "cu_seqlens_q"),
    "cu_k_of_another_length": (on("cu_seqlens_k", lambda x: x[:2]), ValueError, "cu_seqlens_k"),
    "cu_q_is_empty": (on("cu_seqlens_q", lambda x: x[:0]), ValueError, "cu_seqlens_q"),
    "k_elsewhere": (on("k", elsewhere), ValueError, "devices differ"),
    "cu_q_elsewhere": (on("cu_seqlens_q", elsewhere), ValueError, "cu_seqlens_q"),
    "cu_k_of_2_dims": (on("cu_seqlens_k", lambda x: x[None]), ValueError, "cu_seqlens_k"),
    "cu_k_of_0_dims": (on("cu_seqlens_k", lambda x: x[0]), ValueError, "cu_seqlens_k"),
    "cu_q_strided": (on("cu_seqlens_q", wide), ValueError, "cu_seqlens_q"),
    "max_q_negative": (to(max_seqlen_q=-1), ValueError, "max_seqlen_q"),
    "max_k_of_float": (to(max_seqlen_k=5.0), TypeError, "max_seqlen_k"),
    "max_q_is_none": (to(max_seqlen_q=None), TypeError, "max_seqlen_q"),
    "max_k_is_a_tensor": (vector("max_seqlen_k", 1, dtype=INT32), TypeError, "max_seqlen_k"),
    "used_q_length": (vector("seqused_q", 3, dtype=INT32), ValueError, "seqused_q"),
    "used_k_dtype": (vector("seqused_k", 2, dtype=torch.int64), TypeError, "seqused_k"),
    "used_k_elsewhere": (
        vector("seqused_k", 2, dtype=INT32, device="meta"),
        ValueError,
        "seqused_k",
    ),
    "used_q_is_a_list": (to(seqused_q=[1, 2]), TypeError, "seqused_q"),
    "alibi_batch": (vector("alibi_slopes", 3, 4), ValueError, "alibi_slopes"),
    "table_dtype": (
        lambda a: pages(a, block_table=torch.zeros(2, 2, device=a["q"].device)),
        TypeError,
        "block_table",
    ),
    "table_of_1_dim": (
        lambda a: pages(a, block_table=torch.zeros(2, dtype=INT32, device=a["q"].device)),
        ValueError,
        "block_table",
    ),
    "table_of_another_batch": (
        lambda a: pages(a, block_table=torch.zeros(3, 2, dtype=INT32, device=a["q"].device)),
        ValueError,
        "block_table",
    ),
    "table_elsewhere": (
        lambda a: pages(a, block_table=torch.zeros(2, 2, dtype=INT32, device="meta")),
        ValueError,
        "block_table",
    ),
    "table_without_pages": (
        lambda a: {"block_table": pages(a)["block_table"]},
        ValueError,
        "k has shape",
    ),
    "table_with_grad": (
        lambda a: pages(a, q=a["q"].clone().requires_grad_()),
        NotImplementedError,
        "block_table",
    ),
    "dropout_nan": (to(dropout_p=NAN), ValueError, "dropout_p"),
    "window_minus_2": (to(window_size=(0, -2)), ValueError, "window_size"),
}

PACKED: dict[str, tuple[str, Change, type[Exception], str]] = {
    "qkv_of_2": ("qkvpacked_func", on("qkv", lambda x: x[:, :, :2]), ValueError, "qkv"),
    "qkv_of_4_dims": ("qkvpacked_func", on("qkv", lambda x: x[0]), ValueError, "qkv"),
    "qkv_is_none": ("qkvpacked_func", to(qkv=None), TypeError, "qkv"),
    "qkv_of_int": ("qkvpacked_func", on("qkv", torch.Tensor.int), TypeError, "int32"),
    "qkv_last_stride": ("qkvpacked_func", on("qkv", wide), ValueError, "last dim"),
    "kv_of_3": ("kvpacked_func", vector("kv", 2, 8, 3, 2, 16, dtype=BF16), ValueError, "kv"),
    "kv_of_another_batch": ("kvpacked_func", on("kv", lambda x: x[:1]), ValueError, "batch"),
    "kv_dtype": ("kvpacked_func", on("kv", torch.Tensor.half), TypeError, "float16"),
    "varlen_qkv_of_2": ("varlen_qkvpacked_func", on("qkv", lambda x: x[:, :2]), ValueError, "qkv"),
    "varlen_qkv_of_5_dims": ("varlen_qkvpacked_func", on("qkv", lambda x: x[0]), ValueError, "qkv"),
    "varlen_cu": (
        "varlen_qkvpacked_func",
        on("cu_seqlens", torch.Tensor.long),
        TypeError,
        "cu_seqlens",
    ),
    "varlen_max": ("varlen_qkvpacked_func", to(max_seqlen=-3), ValueError, "max_seqlen"),
    "varlen_kv_of_3": (
        "varlen_kvpacked_func",
        vector("kv", 8, 3, 2, 16, dtype=BF16),
        ValueError,
        "kv",
    ),
    "varlen_kv_is_a_list": ("varlen_kvpacked_func", to(kv=[]), TypeError, "kv"),
}

TABLE = (
    {f"dense-{name}": ("func", *row) for name, row in DENSE.items()}
    | {f"varlen-{name}": ("varlen_func", *row) for name, row in VARLEN.items()}
    | {f"packed-{name}": row for name, row in PACKED.items()}
)


@pytest.mark.parametrize("name", TABLE)
def test_functions(device, name):
    function, change, error, word = TABLE[name]
    call = getattr(flash_cute, f"flash_attn_{function}")
    arguments = good_arguments(function, device)
    expected = call(**arguments)
    with pytest.raises(error, match=word) as raised:
        call(**(arguments | change(arguments)))
    assert type(raised.value) is error
    assert torch.equal(call(**arguments), expected)


def test_generator_of_another_device(cuda):
    for q_device, other in ((cuda, "cpu"), ("cpu", cuda)):
        arguments = good_arguments("func", q_device)
        with pytest.raises(ValueError, match="generator"):
            flash_cute.flash_attn_func(
                **arguments, dropout_p=0.1, generator=torch.Generator(device=other)
            )


OPS: dict[str, tuple[Change, str]] = {
    "k_of_another_batch": (on("k", lambda x: x[:1]), r"batch|\bk\b"),
    "k_of_another_dim": (on("k", lambda x: x[..., :8].contiguous()), r"dim|\bk\b"),
    "v_of_another_seqlen": (on("v", lambda x: x[:, :5]), r"seqlen|\bv\b"),
    "k_dtype": (on("k", torch.Tensor.half), r"dtype|\bk\b"),
    "heads_not_a_multiple": (on("q", lambda x: x[:, :, :3]), "heads"),
    "q_of_3_dims": (on("q", lambda x: x[0]), r"\bq\b"),
    "out_shape": (on("out", lambda x: x[:1]), "out"),
    "out_dtype": (on("out", lambda x: torch.full_like(x, NAN, dtype=torch.float32)), "out"),
    "lse_shape": (on("softmax_lse", lambda x: x[..., :5]), "softmax_lse"),
    "lse_dtype": (on("softmax_lse", lambda x: x.double()), "softmax_lse"),
    "dropout_without_rng": (to(dropout_p=0.3), "rng|dropout"),
    "rng_dtype": (vector("rng", 2, dtype=INT32), "rng|dropout_p is not supported"),
    "rng_shape": (vector("rng", 3, dtype=torch.int64), "rng|dropout_p is not supported"),
    "dropout_above_1": (to(dropout_p=1.5), "dropout"),
    "softcap_negative": (to(softcap=-1.0), "softcap"),
    "scale_nan": (to(softmax_scale=NAN), "softmax_scale"),
    "window_minus_2": (to(window_size_left=-2), "window"),
    "alibi_shape": (vector("alibi_slopes", 3), "alibi"),
    "sink_shape": (vector("sink", 3), "sink"),
}


@pytest.mark.parametrize("name", OPS)
def test_ops_write_nothing_when_they_raise(device, name):
    """Ops check for themselves too, whoever calls them; an output given stays as it was."""
    change, word = OPS[name]
    arguments = good_arguments("func", device)
    out = memory.GuardedTensor(arguments["q"].shape, BF16, device)
    lse = memory.GuardedTensor((2, 4, 8), torch.float32, device)
    arguments |= {"out": out.tensor, "softmax_lse": lse.tensor}
    changed = arguments | change(arguments)
    if "rng" in name:
        changed["dropout_p"] = 0.3
    with pytest.raises((RuntimeError, ValueError, TypeError), match=word):
        torch.ops.flash_cute.fwd.out(**changed)
    assert out.tensor.isnan().all() and lse.tensor.isnan().all()
    out.check("out")
    lse.check("softmax_lse")
    torch.ops.flash_cute.fwd.out(**arguments)
    assert out.tensor.isfinite().all() and lse.tensor.isfinite().all()


def test_out_overload_refuses_gradients(device):
    arguments = good_arguments("func", device)
    arguments["q"].requires_grad_()
    arguments["out"] = torch.empty_like(arguments["q"])
    arguments["softmax_lse"] = torch.empty(2, 4, 8, device=device)
    with pytest.raises(RuntimeError, match="out"):
        torch.ops.flash_cute.fwd.out(**arguments)
