"""Bad input: the right exception, a message that names the argument, and nothing written."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from bad_arguments import (
    BF16,
    INT32,
    Change,
    elsewhere,
    good_arguments,
    on,
    pages,
    strided,
    to,
    vector,
    wide,
)

import flash_cute
from flash_cute.call import validate

NAN, INF = math.nan, math.inf


def nested(x: torch.Tensor) -> torch.Tensor:
    """A tensor of ragged rows."""
    return torch.nested.nested_tensor(list(x), layout=torch.jagged)


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
    "dropout_negative": (to(dropout_p=-0.1), ValueError, "dropout_p"),
    "dropout_above_1": (to(dropout_p=1.5), ValueError, "dropout_p"),
    "dropout_nan": (to(dropout_p=NAN), ValueError, "dropout_p"),
    "softcap_negative": (to(softcap=-1.0), ValueError, "softcap"),
    "softcap_nan": (to(softcap=NAN), ValueError, "softcap"),
    "softcap_inf": (to(softcap=INF), ValueError, "softcap"),
    "softcap_huge": (to(softcap=1e39), ValueError, "softcap"),
    "softcap_tiny": (to(softcap=1e-46), ValueError, "softcap"),
    "scale_huge": (to(softmax_scale=1e39), ValueError, "softmax_scale"),
    "scale_nan": (to(softmax_scale=NAN), ValueError, "softmax_scale"),
    "scale_inf": (to(softmax_scale=-INF), ValueError, "softmax_scale"),
    "probs_of_str": (to(return_attn_probs="x"), TypeError, "return_attn_probs"),
    "scale_of_str": (to(softmax_scale="1"), TypeError, "softmax_scale"),
    "scale_of_bool": (to(softmax_scale=True), TypeError, "softmax_scale is bool"),
    "dropout_of_bool": (to(dropout_p=True), TypeError, "dropout_p is bool"),
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
    "window_of_bool": (to(window_size=(True, 0)), TypeError, "window_size"),
    "window_beyond_64_bits": (to(window_size=(2**63, 0)), ValueError, "window_size"),
    "dropout_of_a_tensor": (vector("dropout_p", 2), TypeError, "dropout_p is torch.Tensor"),
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
    "alibi_strided": (strided("alibi_slopes", 4), ValueError, "alibi_slopes's last dim"),
    "alibi_of_batches_strided": (strided("alibi_slopes", 2, 4), ValueError, "alibi_slopes's last"),
    "sink_shape": (vector("sink", 3), ValueError, "sink"),
    "sink_strided": (strided("sink", 4), ValueError, "sink's last dim"),
    "sink_2d": (vector("sink", 2, 4), ValueError, "sink"),
    "sink_dtype": (vector("sink", 4, dtype=INT32), TypeError, "sink"),
    "sink_elsewhere": (vector("sink", 4, device="meta"), ValueError, "sink"),
    "generator_is_an_int": (to(generator=7, dropout_p=0.1), TypeError, "generator"),
    "causal_is_a_str": (to(causal="no"), TypeError, "causal"),
    "causal_of_numpy": (to(causal=np.True_), TypeError, "causal is numpy.bool"),
    "q_is_nested": (lambda a: {"q": nested(a["q"])}, NotImplementedError, "q is a nested tensor"),
    "deterministic_is_a_str": (to(deterministic="no"), TypeError, "deterministic"),
}

VARLEN: dict[str, tuple[Change, type[Exception], str]] = {
    "q_is_none": (to(q=None), TypeError, "q is NoneType"),
    "q_of_4_dims": (on("q", lambda x: x[None]), ValueError, "q has shape"),
    "k_of_4_dims": (on("k", lambda x: x[None]), ValueError, "k has shape"),
    "v_of_another_total": (on("v", lambda x: x[:5]), ValueError, "k and v"),
    "heads_not_a_multiple": (on("q", lambda x: x[:, :3]), ValueError, "multiple"),
    "k_of_another_dim": (on("k", lambda x: x[..., :8]), ValueError, "head dim"),
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
    "max_q_beyond_64_bits": (to(max_seqlen_q=2**63), ValueError, "max_seqlen_q"),
    "zero_tensors_is_a_str": (to(zero_tensors="no"), TypeError, "zero_tensors"),
    "max_k_of_float": (to(max_seqlen_k=5.0), TypeError, "max_seqlen_k"),
    "max_q_is_none": (to(max_seqlen_q=None), TypeError, "max_seqlen_q"),
    "max_k_is_a_tensor": (vector("max_seqlen_k", 1, dtype=INT32), TypeError, "max_seqlen_k"),
    "used_q_length": (vector("seqused_q", 3, dtype=INT32), ValueError, "seqused_q"),
    "used_k_length": (vector("seqused_k", 3, dtype=INT32), ValueError, "seqused_k"),
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
    "table_of_columns_first": (
        lambda a: pages(a, block_table=pages(a)["block_table"].mT.contiguous().mT),
        ValueError,
        "rows contiguous",
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
    "qkv_of_int": ("qkvpacked_func", on("qkv", torch.Tensor.int), TypeError, "qkv has .*int32"),
    "kv_of_3": ("kvpacked_func", vector("kv", 2, 8, 3, 2, 16, dtype=BF16), ValueError, "kv"),
    "kv_of_another_batch": ("kvpacked_func", on("kv", lambda x: x[:1]), ValueError, "kv 1"),
    "kv_dtype": ("kvpacked_func", on("kv", torch.Tensor.half), TypeError, "kv torch.float16"),
    "varlen_qkv_of_2": ("varlen_qkvpacked_func", on("qkv", lambda x: x[:, :2]), ValueError, "qkv"),
    "varlen_qkv_of_5_dims": ("varlen_qkvpacked_func", on("qkv", lambda x: x[0]), ValueError, "qkv"),
    "varlen_cu": (
        "varlen_qkvpacked_func",
        on("cu_seqlens", torch.Tensor.long),
        TypeError,
        "cu_seqlens has dtype",
    ),
    "varlen_max": ("varlen_qkvpacked_func", to(max_seqlen=-3), ValueError, "max_seqlen is"),
    "varlen_used": (
        "varlen_qkvpacked_func",
        vector("seqused", 3, dtype=INT32),
        ValueError,
        "seqused has 3 entries; cu_seqlens asks for 2",
    ),
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
    with pytest.raises(error, match=rf"\b(?:{word})") as raised:
        call(**(arguments | change(arguments)))
    assert type(raised.value) is error
    assert torch.equal(call(**arguments), expected)


def test_alibi_slopes_that_require_grad_under_no_grad(device):
    arguments = good_arguments("func", device)
    slopes = torch.rand(4, device=device)
    expected = flash_cute.flash_attn_func(**arguments, alibi_slopes=slopes)
    with torch.no_grad():
        out = flash_cute.flash_attn_func(**arguments, alibi_slopes=slopes.requires_grad_())
    assert torch.equal(out, expected)


def test_generator_of_another_device(cuda):
    for q_device, other in ((cuda, "cpu"), ("cpu", cuda)):
        arguments = good_arguments("func", q_device)
        with pytest.raises(ValueError, match="generator"):
            flash_cute.flash_attn_func(
                **arguments, dropout_p=0.1, generator=torch.Generator(device=other)
            )


def cast(dtype: torch.dtype) -> Change:
    """q, k and v in another dtype."""
    return lambda arguments: {name: arguments[name].to(dtype) for name in "qkv"}


def of_dim(dim: int, *names: str) -> Change:
    """The named tensors with another head dim."""
    return lambda a: {x: a[x].new_ones(*a[x].shape[:-1], dim) for x in names}


REFUSED_ON_CUDA: dict[str, tuple[str, Change, str]] = {
    **{
        str(dtype): ("func", cast(dtype), str(dtype).removeprefix("torch."))
        for dtype in validate.DTYPES
        if dtype not in validate.CUDA_DTYPES
    },
    "head_dim": ("func", of_dim(validate.CUDA_MAX_HEAD_DIM + 1, "q", "k"), "head dim"),
    "head_dim_of_v": ("func", of_dim(validate.CUDA_MAX_HEAD_DIM + 1, "v"), "head dim"),
    "sink_of_fp64": ("func", vector("sink", 4, dtype=torch.float64), "sink"),
}


@pytest.mark.parametrize("name", REFUSED_ON_CUDA)
def test_refused_on_cuda(cuda, name):
    """By the function and by the op, before anything is written."""
    function, change, word = REFUSED_ON_CUDA[name]
    arguments = good_arguments(function, cuda)
    changed = arguments | change(arguments)
    with pytest.raises(NotImplementedError, match=word):
        getattr(flash_cute, f"flash_attn_{function}")(**changed)
    packet = torch.ops.flash_cute.varlen_fwd if "varlen" in function else torch.ops.flash_cute.fwd
    with pytest.raises(RuntimeError, match=word):
        packet.default(**changed)
    *rows, heads, _ = changed["q"].shape
    out_shape = (*rows, heads, changed["v"].shape[-1])
    out = torch.full(out_shape, NAN, dtype=changed["q"].dtype, device=cuda)
    lse = torch.full((*rows[:-1], heads, rows[-1]), NAN, device=cuda)
    with pytest.raises(RuntimeError, match=word):
        packet.out(**changed, out=out, softmax_lse=lse)
    assert out.isnan().all() and lse.isnan().all()


@pytest.mark.parametrize("name", REFUSED_ON_CUDA)
def test_refusals_on_cuda_name_the_argument(monkeypatch, name):
    """What the functions ask before they call an op on CUDA; it looks at no element."""
    monkeypatch.setattr(validate, "has_cuda_kernels", lambda: True)
    function, change, word = REFUSED_ON_CUDA[name]
    arguments = good_arguments(function, "cpu")
    validate.cuda(arguments["q"], arguments["v"], torch.ones(4))
    changed = arguments | change(arguments)
    with pytest.raises(NotImplementedError, match=word):
        validate.cuda(changed["q"], changed["v"], changed.get("sink"))


def test_a_build_without_kernels_says_how_to_get_them(monkeypatch):
    monkeypatch.setattr(validate, "has_cuda_kernels", lambda: False)
    arguments = good_arguments("func", "cpu")
    with pytest.raises(NotImplementedError, match="FLASH_CUTE_BUILD=cuda"):
        validate.cuda(arguments["q"], arguments["v"])
