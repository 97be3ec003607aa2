"""What the ops of e4m3 inputs refuse, by name."""

from __future__ import annotations

import importlib.util
import math
import re
from typing import Any

import pytest
import torch
from fp8_calls import values
from fp8_oracle import offsets

from flash_cute import _torch_internals as internals
from flash_cute.native import library
from flash_cute.ops import fp8 as ops_fp8
from flash_cute.ops import has_fp8_attention
from flash_cute.ops.fp8 import _refuse
from flash_cute.ops.schema import fp8_fwd
from flash_cute.ops.typed import OPS

BF16 = torch.bfloat16
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q of 16 bits": ({"q": torch.zeros(2, 8, 4, 16, dtype=BF16)}, TypeError,
                     "q has dtype torch.bfloat16; supported: torch.float8_e4m3fn"),
    "v of e5m2": ({"v": torch.zeros(2, 9, 2, 16).to(torch.float8_e5m2)}, TypeError,
                  "v has dtype torch.float8_e5m2; supported"),
    "q of 3 dims": ({"q": values(8, 4, 16)}, ValueError, "q has 3 dimensions"),
    "head dims": ({"k": values(2, 9, 2, 8)}, ValueError, "q and k differ in head dim"),
    "heads": ({"q": values(2, 8, 3, 16)}, ValueError, "heads must be a multiple of heads_k"),
    "lengths": ({"v": values(2, 8, 2, 16)}, ValueError, "k and v differ in seqlen"),
    "device": ({"k": values(2, 9, 2, 16).to("meta")}, ValueError, "devices differ"),
    "strides": ({"k": values(2, 9, 16, 2).transpose(2, 3)}, ValueError, "k's last dimension"),
    "rows of k for q": ({"q_descale": torch.ones(2, 9, 2)}, ValueError,
                        r"q_descale has shape \(2, 9, 2\); expected \(batch, heads_k\), \(2, 2\), "
                        r"or one for each row and head, \(2, 8, 4\)"),
    "rows of v": ({"v_descale": torch.ones(2, 9, 2)}, ValueError,
                  r"v_descale has shape .* one for each channel, \(2, 2, 16\)"),
    "one element": ({"k_descale": torch.ones(1)}, ValueError, r"k_descale has shape \(1,\)"),
    "number": ({"k_descale": 2.0}, (TypeError, RuntimeError), "k_descale"),
    "dtype": ({"q_descale": torch.ones(2, 2).double()}, TypeError,
              "q_descale has dtype torch.float64; expected torch.float32"),
    "its device": ({"v_descale": torch.ones(2, 2, device="meta")}, ValueError,
                   "v_descale is on meta"),
    "sink": ({"sink": torch.ones(4, dtype=BF16)}, TypeError, "sink has dtype torch.bfloat16"),
    "sinks": ({"sink": torch.ones(2)}, ValueError, "sink has shape"),
    "scale": ({"softmax_scale": math.nan}, ValueError, "softmax_scale is nan"),
    "window": ({"window_size_left": -2}, ValueError, "window_size_left is -2"),
    "out": ({"dtype": torch.float32}, TypeError,
            "dtype is torch.float32, that of out; supported: torch.bfloat16, torch.float16"),
    **{
        f"{name} of {x}": ({name: torch.tensor([[1.0, x], [1.0, 1.0]])}, ValueError,
                           f"{name} holds {re.escape(str(x))}; expected positive finite numbers")
        for name in ("q_descale", "k_descale", "v_descale")
        for x in (0.0, -1.0, math.inf, math.nan)
    },
    "a row of 0": ({"k_descale": torch.ones(2, 9, 2).index_fill_(1, torch.tensor(3), 0.0)},
                   ValueError, "k_descale holds 0.0"),
    "a channel of inf": ({"v_descale": torch.full((2, 2, 16), math.inf)}, ValueError,
                         "v_descale holds inf"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name):
    change, kind, words = BAD[name]
    call: dict[str, Any] = {
        "q": values(2, 8, 4, 16), "k": values(2, 9, 2, 16), "v": values(2, 9, 2, 16),
    }  # fmt: skip
    with pytest.raises(kind, match=words):
        OPS.fp8_fwd(**(call | change))


BAD_VARLEN: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "sequences": ({"cu_seqlens_k": offsets("cpu", 9)}, ValueError, "cu_seqlens_k has 2 entries"),
    "offsets": ({"cu_seqlens_q": torch.zeros(3)}, TypeError, "cu_seqlens_q has dtype"),
    "length": ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q is -1"),
    "used": ({"seqused_k": torch.zeros(3).int()}, ValueError, "seqused_k has 3 entries"),
    "table": ({"block_table": torch.zeros(2, 1)}, (ValueError, TypeError), "k has shape"),
    "rows": ({"q_descale": torch.ones(8, 4)}, ValueError,
             r"q_descale has shape \(8, 4\); expected .* \(1, 8, 4\)"),
    "a used row of 0": ({"k_descale": torch.zeros(1, 9, 2)}, ValueError, "k_descale holds 0.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_VARLEN)
def test_bad_packed_calls(name):
    change, kind, words = BAD_VARLEN[name]
    call: dict[str, Any] = {
        "q": values(8, 4, 16), "k": values(9, 2, 16), "v": values(9, 2, 16),
        "cu_seqlens_q": offsets("cpu", 3, 5), "cu_seqlens_k": offsets("cpu", 4, 5),
        "max_seqlen_q": 5, "max_seqlen_k": 5,
    }  # fmt: skip
    with pytest.raises(kind, match=words):
        OPS.fp8_varlen_fwd(**(call | change))


@pytest.mark.parametrize("name", ["q", "v", "q_descale", "sink"])
def test_a_gradient_is_refused_by_name(name):
    call: dict[str, Any] = {
        "q": values(2, 8, 4, 16), "k": values(2, 9, 2, 16), "v": values(2, 9, 2, 16),
        "q_descale": torch.ones(2, 2), "sink": torch.zeros(4),
    }  # fmt: skip
    call[name] = call[name].requires_grad_()
    with pytest.raises(RuntimeError, match=rf"fp8_fwd.*: {name} requires grad, .*inference"):
        OPS.fp8_fwd(**call)
    with torch.no_grad():
        assert not OPS.fp8_fwd(**call)[0].requires_grad


def test_errors_of_fakes_are_the_same():
    q, k, v = (
        x.to("meta") for x in (values(2, 8, 4, 16), values(2, 9, 2, 16), values(2, 9, 2, 16))
    )
    with pytest.raises(ValueError, match="q_descale has shape"):
        OPS.fp8_fwd(q, k, v, q_descale=torch.ones(3, 2, device="meta"))


def test_which_devices_have_it():
    assert has_fp8_attention(torch.device("cpu")) and has_fp8_attention(torch.device("meta"))
    assert internals.has_kernel("flash_cute::fp8_fwd", "CUDA")  # or the refusal in its place
    if not torch.cuda.is_available():
        assert not has_fp8_attention(torch.device("cuda"))


@pytest.mark.parametrize("ids", [(), ("fwd_sm90_bf16_x", "decode_sm90_bf16_x_e4m3"),
                                 ("fwd_sm90_e4m3_x",)])  # fmt: skip
def test_ops_without_a_row_of_e4m3_are_not_used(monkeypatch, ids):
    """As FLASH_CUTE_ROWS may leave all of them out of a build."""
    monkeypatch.setattr(internals, "has_kernel", lambda op, key: True)
    monkeypatch.setattr(library, "kernels", lambda: ids)
    spec = importlib.util.spec_from_file_location("built_so", ops_fp8.__file__)
    built_so = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(built_so)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability in ((9, 0), (8, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, x=capability: x)
        has_it = built_so.has_fp8_attention(torch.device("cuda"))
        assert has_it == (ids[:1] == ("fwd_sm90_e4m3_x",) and capability == (9, 0))


def test_cuda_without_kernels_is_refused_by_name():
    """The kernel for CUDA of a build that holds none."""
    q, k, v = values(2, 8, 4, 16), values(2, 9, 2, 16), values(2, 9, 2, 16)
    rest = (None, None, None, None, False, -1, -1, None, True, None)
    with pytest.raises(NotImplementedError, match="no CUDA kernels of attention of e4m3 inputs"):
        _refuse(fp8_fwd, q, k, v, *rest)
    with pytest.raises(TypeError, match="v has dtype"):
        _refuse(fp8_fwd, q, k, v.float(), *rest)
