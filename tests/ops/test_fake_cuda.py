"""Fake CUDA tensors where there are no kernels: shapes and memory of a model, on any machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_arguments import good_arguments, pages
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import flash_cute
from flash_cute.call import validate

OPS = torch.ops.flash_cute
FUNCTIONS = (
    "func",
    "qkvpacked_func",
    "kvpacked_func",
    "varlen_func",
    "varlen_qkvpacked_func",
    "varlen_kvpacked_func",
)


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "has_cuda_kernels", lambda: False)


def fakes(x: Any, device: str = "cuda:0") -> Any:
    """Fake tensors like those of ``x``; inside of a FakeTensorMode."""
    return tree_map_only(
        torch.Tensor,
        lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device),
        x,
    )


def properties(x: torch.Tensor) -> tuple[Any, ...]:
    return x.shape, x.dtype, x.stride()


def results(call: Callable[..., Any], arguments: dict[str, Any]) -> list[torch.Tensor]:
    returned = call(**arguments)
    returned = returned if isinstance(returned, (tuple, list)) else (returned,)
    return [x for x in returned if x is not None]


def check_fakes(call: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Results of fake CUDA tensors are like those of real ones on the CPU."""
    expected = results(call, arguments)
    with FakeTensorMode():
        got = results(call, fakes(arguments))
    assert all(x.device == torch.device("cuda:0") for x in got)
    assert [properties(x) for x in got] == [properties(x) for x in expected]


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward(name, dropout_p):
    function = getattr(flash_cute, f"flash_attn_{name}")
    asked = {"return_lse": True, "dropout_p": dropout_p}
    check_fakes(function, good_arguments(name, "cpu") | asked)


def test_forward_over_pages():
    arguments = good_arguments("varlen_func", "cpu")
    check_fakes(flash_cute.flash_attn_varlen_func, arguments | pages(arguments))


@pytest.mark.parametrize("lengths", [5, torch.tensor([5, 3], dtype=torch.int32)])
@pytest.mark.parametrize("with_new_keys", [False, True])
def test_over_a_cache(with_new_keys, lengths):
    q, new, *caches = (torch.randn(2, n, 4, 16).bfloat16() for n in (1, 1, 8, 8))
    arguments = {"q": q, "k_cache": caches[0], "v_cache": caches[1], "cache_seqlens": lengths}
    if with_new_keys:
        arguments |= {"k": new, "v": new}
    check_fakes(flash_cute.flash_attn_with_kvcache, arguments | {"return_softmax_lse": True})


def test_combine():
    parts = {"out_partial": torch.randn(3, 5, 16), "lse_partial": torch.randn(3, 5)}
    check_fakes(flash_cute.flash_attn_combine, parts)


@pytest.mark.parametrize("scaling", ["head", "tensor", "row", "channel"])
def test_quantize(scaling):
    x = torch.randn(2, 4, 9, 16).transpose(1, 2)  # results are contiguous all the same
    check_fakes(OPS.quantize_e4m3, {"x": x, "scaling": scaling, "subtract_mean": True})


@pytest.mark.parametrize("name", ["func", "varlen_func"])
def test_backward(name):
    arguments = good_arguments(name, "cpu")
    fwd, bwd = (OPS.fwd, OPS.bwd) if name == "func" else (OPS.varlen_fwd, OPS.varlen_bwd)
    out, lse, _, _ = fwd(**arguments)
    saved = {"dout": torch.ones_like(out), "out": out, "softmax_lse": lse}
    check_fakes(bwd, arguments | saved)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_backward_of_autograd(cuda, name):
    """Without a GPU torch's autograd ends the process."""
    with FakeTensorMode():
        arguments = fakes(good_arguments(name, "cpu"))
        leaves = [x for x in arguments.values() if isinstance(x, torch.Tensor)]
        leaves = [x.requires_grad_() for x in leaves if x.is_floating_point()]
        getattr(flash_cute, f"flash_attn_{name}")(**arguments).sum().backward()
        assert [properties(x.grad) for x in leaves] == [properties(x) for x in leaves]


def test_calls_without_a_kernel_are_still_refused():
    arguments = good_arguments("func", "cpu")
    with FakeTensorMode(), pytest.raises(NotImplementedError, match="float64"):
        flash_cute.flash_attn_func(**{n: x.double() for n, x in fakes(arguments).items()})
    wide = {name: torch.empty(2, 8, 4, 264).half() for name in "qkv"}
    with FakeTensorMode(), pytest.raises(NotImplementedError, match="head dim 264"):
        flash_cute.flash_attn_func(**fakes(wide))


def test_autocast():
    """The rule of CUDA is CUDA's own."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    try:
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.float16)
        with FakeTensorMode():
            q = torch.empty(2, 8, 4, 16, device="cuda:0")
            assert flash_cute.flash_attn_func(q, q, q.bfloat16()).dtype == torch.float16
            assert OPS.fwd(q, q, q.bfloat16())[0].dtype == torch.float16
            q = torch.empty(2, 8, 4, 16)
            assert flash_cute.flash_attn_func(q, q, q).dtype == torch.float32
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def test_vmap():
    """A refusal of vmap's is not taken for one of strides, which only memory could tell."""
    with FakeTensorMode():
        q, k_cache, v_cache = torch.empty(3, 4, 1, 8, 2, 16, device="cuda:0").bfloat16()
        assert torch.vmap(flash_cute.flash_attn_func)(q, k_cache, v_cache).shape == q.shape

        def append(q, k_cache, v_cache):
            return flash_cute.flash_attn_with_kvcache(q, k_cache, v_cache, q, q, cache_seqlens=0)

        with pytest.raises(NotImplementedError, match=r"fwd_kvcache.*vmap"):
            torch.vmap(append)(q, k_cache, v_cache)
