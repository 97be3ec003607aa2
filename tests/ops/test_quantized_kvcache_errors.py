"""What calls over 8-bit caches refuse, before anything is written, and what they warn of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eight_bits import DTYPES, E4M3, INT8, bits
from quantized_caches import BF16, good
from torch import Tensor

import flash_cute
from flash_cute import Sparse
from flash_cute.functional import quantized_kvcache


def tokens(*shape: int) -> Tensor:
    return torch.ones(shape or (3, 4, 2))


SHARED = tokens()
ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "e5m2": (
        {n: torch.zeros(3, 4, 2, 8).to(torch.float8_e5m2) for n in ("k_cache", "v_cache")},
        TypeError, "k_cache has torch.float8_e5m2.*supported: both of q's dtype, or both of one",
    ),
    "uint8": ({n: torch.zeros(3, 4, 2, 8).byte() for n in ("k_cache", "v_cache")}, TypeError,
              "k_cache has torch.uint8"),
    "mixed": ({"v_cache": torch.zeros(3, 4, 2, 8).to(INT8)}, TypeError,
              "v_cache torch.int8; supported: both"),
    "half": ({"v_cache": torch.zeros(3, 4, 2, 8).to(BF16)}, TypeError, "v_cache torch.bfloat16"),
    "16_bits": ({n: torch.zeros(3, 4, 2, 8).to(BF16) for n in ("k_cache", "v_cache")}, ValueError,
                "k_descale is given, and the caches have torch.bfloat16"),
    "e5m2_q": ({"q": lambda a: a["q"].to(torch.float8_e5m2)}, TypeError, "q has dtype torch.fl"),
    "fp8_q_fp16_k": ({"q": lambda a: a["q"].to(E4M3), "k": lambda a: a["k"].half()}, TypeError,
                     "k torch.float16, v torch.bfloat16; with q in e4m3, k and v are to be torch"),
    "fp8_k": ({"k": lambda a: a["k"].to(E4M3)}, TypeError, "dtypes differ: q has torch.bfloat16"),
    "int8_k": ({"dtype": INT8, "k_descale": None}, ValueError, "k_descale is None; caches of"),
    "int8_v": ({"dtype": INT8, "v_descale": None}, ValueError, "v_descale is None; caches of"),
    "zero": ({"k_descale": 0.0}, ValueError, "k_descale is 0.0; expected a positive number"),
    "inf": ({"v_descale": float("inf")}, ValueError, "v_descale is inf"),
    "text": ({"v_descale": "1"}, TypeError, "v_descale is str; expected a number or a tensor"),
    "bool": ({"v_descale": True}, TypeError, "v_descale is bool"),
    "bf16": ({"k_descale": torch.ones(2).to(BF16)}, TypeError, "k_descale has dtype torch.bfloat"),
    "double": ({"k_descale": torch.ones(2).double()}, TypeError, "expected torch.float32"),
    "length": ({"k_descale": torch.ones(3)}, ValueError, r"k_descale has shape \(3,\); expected"),
    "of_q": ({"v_descale": torch.ones(2, 4)}, ValueError, r"\(batch, heads_k\), \(2, 2\)"),
    "rows": ({"v_descale": torch.ones(3, 5, 2)}, ValueError, r"dimension, \(3, 4, 2\)"),
    "device": ({"k_descale": torch.ones(2, device="meta")}, ValueError, "k_descale is on meta"),
    "expanded": ({"k_descale": torch.ones(1).expand(3, 4, 2)}, ValueError, "k_descale has elem"),
    "shared": ({"k_descale": SHARED, "v_descale": SHARED}, ValueError, "v_descale share memory"),
    "views": ({"k_descale": SHARED[:], "v_descale": SHARED[:]}, ValueError, "share memory"),
    "gradient": ({"q": torch.ones(2, 1, 4, 8).to(BF16).requires_grad_()}, RuntimeError,
                 "requires grad"),
    "trained": ({"k_descale": torch.ones(2).requires_grad_()}, RuntimeError, "requires grad"),
    "q_descale": ({"q_descale": torch.ones(4)}, ValueError, r"q_descale has shape \(4,\); exp"),
    "q_double": ({"q_descale": torch.ones(2).double()}, TypeError, "q_descale has dtype torch.fl"),
    "q_zero": ({"q_descale": 0}, ValueError, "q_descale is 0; expected a positive number"),
    "q_descale_of_16_bits": (
        {n: torch.zeros(3, 4, 2, 8).to(BF16) for n in ("k_cache", "v_cache")}
        | {"k_descale": None, "v_descale": None, "q_descale": 1.0},
        NotImplementedError, "q_descale is given, and the caches have torch.bfloat16",
    ),
    "sparse": ({"sparse": 3}, TypeError, "sparse is int"),
    "slopes": ({"sparse": Sparse.topk(torch.zeros(2, 1, 2, 1).int(), 4, seqlen_k=4),
                "alibi_slopes": torch.ones(4)}, NotImplementedError, "alibi_slopes and sparse"),
    "sizes": ({"k": torch.zeros(2, 1, 2, 16).to(BF16)}, ValueError, "k has shape"),
    "full": ({"cache_seqlens": 4}, ValueError, "too small"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_come_before_anything_is_written(name):
    changes, error, match = ERRORS[name]
    arguments = good(**changes)
    kept = {n: x.clone() for n, x in arguments.items() if isinstance(x, Tensor)}
    with pytest.raises(error, match=match):
        flash_cute.flash_attn_with_kvcache(**arguments)
    for n, x in kept.items():
        if x.device.type == "cpu":
            assert torch.equal(
                bits(x.detach().contiguous()), bits(arguments[n].detach().contiguous())
            )


def test_the_call_is_good():
    for dtype in DTYPES:
        arguments = good(dtype, k_descale=tokens(), v_descale=tokens())
        flash_cute.flash_attn_with_kvcache(**arguments)
        assert bits(arguments["k_cache"]).any()


def test_a_copy_is_said_once(cuda):
    arguments = {n: x.to(cuda) if isinstance(x, Tensor) else x for n, x in good().items()}
    quantized_kvcache._say.cache_clear()
    with pytest.warns(UserWarning, match="no kernel reads a cache of torch.float8_e4m3fn") as said:
        for _ in range(2):
            flash_cute.flash_attn_with_kvcache(**arguments)
    assert sum("no kernel reads" in str(x.message) for x in said) == 1


def test_descales_that_are_no_factors_are_told_without_waiting():
    """0, below 0, inf and NaN, of rows in use alone."""
    cache = torch.zeros(4, 4, 2, 8, dtype=INT8)
    table = torch.tensor([[0, 1], [3, 99], [2, -1]], dtype=torch.int32)
    lengths = torch.tensor([6, 2, 3], dtype=torch.int32)
    status = flash_cute.kvcache_status
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        descale = torch.ones(4, 4, 2)
        descale[1, 2], descale[3, 3], descale[0, 3, 1] = wrong, wrong, wrong  # two are not in use
        found = status(cache, lengths, block_table=table, v_descale=descale)
        assert found.tolist() == [8, 0, 0]
        pads = torch.tensor([4, 0, 0], dtype=torch.int32)
        padded = {"cache_leftpad": pads, "block_table": table, "k_descale": descale}
        assert status(cache, lengths, **padded).tolist() == [0, 0, 0]
        by_index = {"cache_batch_idx": torch.tensor([1, 0, 3], dtype=torch.int32)}
        found = status(cache, lengths.clamp_max(4), **by_index, k_descale=descale)
        assert found.tolist() == [8, 0, 0]
        heads = torch.ones(3, 2)
        heads[2, 1] = wrong
        assert status(cache, lengths.clamp_max(4), k_descale=heads).tolist() == [0, 0, 8]
        one = torch.tensor([wrong])
        assert status(cache, lengths, block_table=table, k_descale=one).tolist() == [8, 8, 8]
    assert status(cache, lengths + 9, block_table=table, k_descale=one).tolist() == [9, 11, 11]
    assert status(cache[:, :0], 0, k_descale=torch.ones(4, 0, 2)).tolist() == [0] * 4


@pytest.mark.parametrize("name", ["k_descale", "v_descale"])
@pytest.mark.parametrize("kind", ["one", "heads", "tokens"])
def test_descales_that_are_no_factors_are_refused_where_values_are_checked(name, kind):
    shapes = {"one": (1,), "heads": (2, 2), "tokens": (3, 4, 2)}
    arguments = good(**{name: torch.ones(shapes[kind])}, cache_seqlens=2)
    flash_cute.flash_attn_with_kvcache(**arguments, check_indices=True)
    arguments[name].view(-1)[0] = 0
    kept = bits(arguments["k_cache"]).clone()
    for checks, asked in ((False, {"check_indices": True}), (True, {})):
        with flash_cute.check.switched(checks), pytest.raises(ValueError, match=f"{name} of seq"):
            flash_cute.flash_attn_with_kvcache(**arguments, **asked)
        assert torch.equal(bits(arguments["k_cache"]), kept)
    flash_cute.flash_attn_with_kvcache(**arguments)
