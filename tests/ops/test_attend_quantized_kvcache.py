"""The op over caches of 8 bits: beside fp64, as torch sees it, and what it refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from eight_bits import DTYPES, E4M3, INT8, codes_of, values_of
from quantized_caches import BF16, CLOSE, FP32, Case
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from flash_cute import cpu
from flash_cute.cpu import quantized_kvcache
from flash_cute.ops.schema import CALLS
from flash_cute.ops.typed import AttendQuantizedKvcacheCall

OP = torch.ops.flash_cute.attend_quantized_kvcache
KINDS = ["batch", "tokens"]


def of_op(case: Case) -> dict[str, Any]:
    """The arguments of a random call as the op has them."""
    left, right = case.options["window_size"]
    names = CALLS[OP.default]._fields
    given = {name: x for name, x in case.arguments.items() if name in names}
    return given | {
        "is_causal": case.options["causal"], "window_size_left": left, "window_size_right": right
    }  # fmt: skip


def check(case: Case) -> None:
    out, lse = case.expected()
    got, got_lse = OP(**of_op(case))
    assert got.dtype == case.q_dtype and got_lse.dtype == torch.float32
    if not case.q_packed:
        got, got_lse = got.flatten(0, 1), got_lse.transpose(0, 1).flatten(1)
    size = max(1.0, float(out.abs().max())) if out.numel() else 1.0
    close = CLOSE[case.q_dtype]
    torch.testing.assert_close(got.double(), out, rtol=close, atol=close * size)
    # q is multiplied as it is: scores have no rounding but fp32's
    torch.testing.assert_close(got_lse.double(), lse, rtol=2e-5, atol=4e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("few", [True, False], ids=["at_once", "by_blocks"])
@pytest.mark.parametrize("seed", range(60))
def test_is_attention_over_the_dequantised_cache(monkeypatch, dtype, few, seed):
    if not few:
        monkeypatch.setattr(quantized_kvcache, "FEW_NUMBERS", -1)
    kinds = {"k_kind": KINDS[seed % 2], "v_kind": KINDS[seed // 2 % 2]}
    check(Case(3000 + seed, dtype, appends=False, **kinds))


@pytest.mark.parametrize("seed", range(6))
def test_without_descales_the_numbers_are_the_values(seed):
    check(Case(4000 + seed, E4M3, appends=False, k_kind="none", v_kind="none"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_are_what_is_read_at_once(monkeypatch, dtype):
    """Several blocks of keys and of queries."""
    torch.manual_seed(0)
    caches = torch.randint(-100, -1, (2, 3, 1200, 2, 32), dtype=INT8).view(dtype)  # no NaN
    q = torch.randn(3, 300, 4, 32).to(BF16)
    descales = 0.02 * (0.5 + torch.rand(2, 3, 1200, 2))
    call = partial(OP, q, *caches, *descales, is_causal=True, window_size_left=700)
    expected = call()
    monkeypatch.setattr(quantized_kvcache, "FEW_NUMBERS", -1)
    for got, x in zip(call(), expected, strict=True):
        torch.testing.assert_close(got.float(), x.float(), rtol=1e-2, atol=1e-3)


class Largest(TorchDispatchMode):
    """The most bytes of a tensor that an operator makes."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for x in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(x, Tensor):
                self.size = max(self.size, x.untyped_storage().nbytes())
        return results


def test_memory_does_not_grow_with_the_cache():
    """A cache of 2^26 bytes, of which a block of 512 keys is widened: 2^18 numbers of fp32."""
    cache = torch.zeros(1, 2**16, 8, 128, dtype=INT8)
    descale = torch.ones(1, 8)
    q = torch.randn(1, 1, 8, 128).to(BF16)
    call = AttendQuantizedKvcacheCall(q, cache, cache, descale, descale)
    given = cache.nbytes
    with Largest() as seen:
        cpu.attend_quantized_kvcache(call)
    assert seen.size == given  # views of the cache; all else is smaller
    blocks = quantized_kvcache.Dequantized(cache[0], descale, torch.float32)
    assert blocks[:, slice(0, 512)].untyped_storage().nbytes() == 512 * 8 * 128 * 4 < given


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_is_widened_exactly(dtype):
    """The values of all codes come back through one key that is seen alone."""
    codes = torch.arange(-128, 128).to(INT8).view(1, 1, 1, 256)
    codes = codes if dtype == INT8 else codes.masked_fill((codes & 127) == 127, 0)
    descale = torch.full((1, 1), 0.3)
    q = torch.zeros(1, 1, 1, 256)
    out, _ = OP(q, torch.zeros_like(codes).view(dtype), codes.view(dtype), None, descale)
    expected = values_of(codes.flatten(), dtype).float() * descale.flatten()
    assert torch.equal(out.flatten(), expected)


SAMPLES = {
    "heads": {"page": 0, "k_kind": "batch", "v_kind": "batch"},
    "tokens": {"page": 16, "k_kind": "tokens", "v_kind": "tokens"},
    "none": {"page": 0, "k_kind": "none", "v_kind": "none"},
}


def sample(name: str, dtype: torch.dtype = E4M3) -> dict[str, Any]:
    seed = 31
    while True:  # opcheck compares inputs after the call with those before: without NaN
        case = Case(seed, E4M3, appends=False, q_dtype=BF16, **SAMPLES[name])
        if max(case.used) > 3 and max(case.queries) > 0:
            break
        seed += 1
    arguments = of_op(case)
    for n in ("k_cache", "v_cache"):
        codes = arguments[n].view(INT8)
        arguments[n] = codes.masked_fill((codes & 127) == 127, 0).view(dtype)
    for n in ("k_descale", "v_descale"):
        if arguments[n] is not None:
            arguments[n] = arguments[n].nan_to_num(1.0)
    return arguments


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name, dtype):
    """But for its comparison of inputs, which torch cannot do in fp8."""
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor",
                 "test_aot_dispatch_dynamic")  # fmt: skip
    names = utilities[dtype == E4M3 :]
    torch.library.opcheck(OP.default, (), sample(name, dtype), test_utils=names)


@pytest.mark.parametrize("name", SAMPLES)
def test_fakes_tell_shape_dtype_and_strides(name):
    arguments = sample(name)
    real = OP(**arguments)
    with FakeTensorMode() as mode:
        moved = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, arguments)
        fake = OP(**moved)
    for x, y in zip(real, fake, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


@pytest.mark.parametrize("name", SAMPLES)
def test_compile(name):
    torch._dynamo.reset()
    arguments = sample(name)
    compiled = torch.compile(lambda given: OP(**given), fullgraph=True, backend="aot_eager")
    for x, y in zip(compiled(arguments), OP(**arguments), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("mapped", ["q", "descale"])
def test_vmap_is_a_call_for_each_sample(mapped):
    caches = torch.randint(-100, 100, (2, 2, 9, 2, 16), dtype=INT8)
    q, descale = torch.randn(3, 2, 1, 4, 16), torch.rand(3, 2, 2)
    if mapped == "q":
        got = torch.vmap(lambda x: OP(x, *caches, descale[0], descale[1]))(q)
        expected = [OP(x, *caches, descale[0], descale[1]) for x in q]
    else:
        got = torch.vmap(lambda x: OP(q[0], *caches, x, x))(descale)
        expected = [OP(q[0], *caches, x, x) for x in descale]
    for x, y in zip(got, zip(*expected, strict=True), strict=True):
        assert torch.equal(x, torch.stack(y))


def test_flops_are_those_of_the_call_in_16_bits():
    from torch.utils.flop_counter import FlopCounterMode

    q, cache = torch.randn(2, 3, 4, 16), torch.zeros(2, 9, 2, 16)
    counts = []
    for call in (
        partial(torch.ops.flash_cute.attend_kvcache, q, cache, cache),
        partial(OP, q, cache.to(INT8), cache.to(INT8), torch.ones(2, 2)),
    ):
        with FlopCounterMode(display=False) as counter:
            call()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_no_sequences_and_no_keys():
    cache = torch.zeros(2, 9, 2, 16).to(E4M3)
    out, lse = OP(torch.zeros(0, 1, 4, 16), cache, cache, torch.ones(0, 2))
    assert out.shape == (0, 1, 4, 16) and lse.shape == (0, 4, 1)
    lengths = torch.zeros(2, dtype=torch.int32)
    out, lse = OP(torch.ones(2, 1, 4, 16), cache, cache, torch.ones(2, 2), cache_seqlens=lengths)
    assert not out.any() and bool((lse == -torch.inf).all())


def good(**changes: Any) -> dict[str, Any]:
    cache = codes_of(torch.randn(3, 4, 2, 8), torch.ones(()), E4M3).view(E4M3)
    given = {"q": torch.randn(2, 1, 4, 8).to(BF16), "k_cache": cache, "v_cache": cache}
    return given | changes


ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "16_bits": ({n: torch.zeros(3, 4, 2, 8).to(BF16) for n in ("k_cache", "v_cache")}, TypeError,
                "k_cache has torch.bfloat16.*go to attend_kvcache"),
    "mixed": ({"v_cache": torch.zeros(3, 4, 2, 8).to(INT8)}, TypeError, "v_cache torch.int8"),
    "fp8_q": ({"q": torch.zeros(2, 1, 4, 8).to(E4M3)}, TypeError, "q has dtype torch.float8"),
    "bf16": ({"k_descale": torch.ones(2, 2).to(BF16)}, TypeError, "k_descale has dtype torch.bf"),
    "one": ({"k_descale": torch.ones(1)}, ValueError, r"k_descale has shape \(1,\); expected"),
    "heads": ({"v_descale": torch.ones(2, 4)}, ValueError, r"\(batch, heads_k\), \(2, 2\)"),
    "rows": ({"v_descale": torch.ones(3, 5, 2)}, ValueError, r"dimension, \(3, 4, 2\)"),
    "device": ({"k_descale": torch.ones(2, 2, device="meta")}, ValueError, "k_descale is on meta"),
    "gradient": ({"k_descale": torch.ones(2, 2).requires_grad_()}, RuntimeError, "requires grad"),
    "window": ({"window_size_left": -2}, ValueError, "window_size_left is -2"),
    "both": ({"num_splits": 2, "split_size": 64}, ValueError, "num_splits is 2 and split_size"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    changes, error, match = ERRORS[name]
    with pytest.raises(error, match=match):
        OP(**good(**changes))


def test_q_of_fp32_and_fp64_keep_their_dtype():
    for dtype in (FP32, torch.float64):
        q = torch.randn(2, 1, 4, 8, dtype=dtype)
        out, lse = OP(**good(q=q))
        assert out.dtype == lse.dtype == dtype
