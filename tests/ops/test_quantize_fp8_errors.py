"""What quantize_fp8 refuses: the type of the error, and what its message names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp8_oracle import E4M3, inputs, offsets

from flash_cute import check as flash_check
from flash_cute import quantize_fp8

COS = torch.ones(40, 8)
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "qk_scaling": ({"qk_scaling": "channel"}, ValueError,
                   "qk_scaling is 'channel'; supported: head, tensor, row"),
    "v_scaling": ({"v_scaling": "row"}, ValueError,
                  "v_scaling is 'row'; supported: head, tensor, channel"),
    "no string": ({"v_scaling": None}, ValueError, "v_scaling is None"),
    "head dim": ({n: torch.ones(2, 30, 2, 24) for n in "qk"}, ValueError,
                 "hadamard is given, and q's head dim is 24; supported: powers of two"),
    "flag": ({"smooth_k": "yes"}, TypeError, "smooth_k is str; expected a bool"),
    "power": ({"power_of_two": 2}, ValueError, "power_of_two is 2; expected a bool"),
    "packed without offsets": ({n: torch.ones(30, 2, 32) for n in "qkv"}, ValueError,
                               "cu_seqlens_q is None"),
    "fp64": ({n: torch.ones(2, 30, 2, 32).double() for n in "qkv"}, TypeError,
             "q has dtype torch.float64; supported: torch.float16, torch.bfloat16, torch.float32"),
    "fp8": ({"q": torch.ones(2, 30, 2, 32).to(E4M3)}, TypeError, "q has dtype torch.float8_e4m3fn"),
    "integers": ({"q": torch.ones(2, 30, 2, 32).int()}, TypeError, "q has dtype torch.int32"),
    "one dtype": ({"v": torch.ones(2, 30, 2, 32).half()}, TypeError, "dtypes differ"),
    "rank": ({"q": torch.ones(30, 2, 32)}, ValueError, "q has 3 dimensions"),
    "heads": ({"q": torch.ones(2, 30, 3, 32)}, ValueError, "q has 3 heads and k 2"),
    "one cu_seqlens": ({"q": torch.ones(30, 2, 32), "k": torch.ones(30, 2, 32),
                        "v": torch.ones(30, 2, 32),
                        "cu_seqlens_q": torch.tensor([0, 30], dtype=torch.int32)}, TypeError,
                       "cu_seqlens_k is NoneType"),
    "one table": ({"rotary_cos": COS}, ValueError, "rotary_cos or rotary_sin is None"),
    "width": ({"rotary_cos": torch.ones(40, 17), "rotary_sin": torch.ones(40, 17)}, ValueError,
              "rotary_cos has shape"),
    "tables": ({"rotary_cos": COS.half(), "rotary_sin": COS.half()}, TypeError,
               "rotary_cos is torch.float16; q is torch.float32"),
    "positions": ({"rotary_cos": COS[:9], "rotary_sin": COS[:9]}, ValueError,
                  "rotary_cos has 9 positions, and k 30 rows"),
    "queries": ({"q": torch.ones(2, 31, 2, 32), "rotary_cos": COS, "rotary_sin": COS}, ValueError,
                "q has 31 rows, k 30"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    change, kind, words = BAD[name]
    given = {n: torch.ones(2, 30, 2, 32) for n in "qkv"}
    with pytest.raises(kind, match=words):
        quantize_fp8(**given | {"hadamard": True} | change)


def test_bad_offsets_are_refused_if_values_are_checked():
    q, k, v = inputs("cpu", lead=((12,), (12,)))
    good, bad = offsets("cpu", 5, 7), torch.tensor([0, 12, 5], dtype=torch.int32)
    with flash_check.switched(), pytest.raises(ValueError, match="cu_seqlens_k"):
        quantize_fp8(q, k, v, cu_seqlens_q=good, cu_seqlens_k=bad)


def test_gradients_are_refused():
    q, k, v = inputs("cpu")
    k.requires_grad_()
    with pytest.raises(NotImplementedError, match="q, k, v or a rotary table requires grad"):
        quantize_fp8(q, k, v)
    table = torch.ones(40, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match="q, k, v or a rotary table requires grad"):
        quantize_fp8(q, k.detach(), v, rotary_cos=table, rotary_sin=table)
    with torch.no_grad():
        assert not quantize_fp8(q, k, v).k_descale.requires_grad
