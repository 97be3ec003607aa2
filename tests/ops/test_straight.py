"""The shortest way of inference: the same bits as the validated one, the same errors, and no
validation on the way."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from flash_cute import check, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, ops
from flash_cute.call.validate import kvcache as validate_kvcache
from flash_cute.functional import dense_varlen as functional
from flash_cute.functional import kvcache, run
from flash_cute.kernels import plan_log

MODULES = (functional, kvcache)


def dense(device, dtype):
    q, k, v = (torch.randn(2, 33, h, 64, device=device, dtype=dtype) for h in (4, 2, 2))
    return flash_attn_func, {"q": q, "k": k, "v": v, "causal": True}


def varlen(device, dtype):
    cu = torch.tensor([0, 5, 5, 40], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(40, h, 64, device=device, dtype=dtype) for h in (4, 2, 2))
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 35, "max_seqlen_k": 35}
    used = torch.tensor([3, 0, 30], dtype=torch.int32, device=device)
    return flash_attn_varlen_func, {"q": q, "k": k, "v": v, **lengths, "seqused_k": used}


def cache(device, dtype):
    k_cache, v_cache = torch.randn(2, 3, 50, 2, 64, device=device, dtype=dtype).unbind()
    lengths = torch.tensor([40, 0, 7], dtype=torch.int32, device=device)
    q = torch.randn(3, 2, 4, 64, device=device, dtype=dtype)
    caches = {"k_cache": k_cache.clone(), "v_cache": v_cache.clone(), "cache_seqlens": lengths}
    return flash_attn_with_kvcache, {"q": q, **caches, "causal": True}


def append(device, dtype):
    function, arguments = cache(device, dtype)
    k, v = torch.randn(2, 3, 2, 2, 64, device=device, dtype=dtype).unbind()
    cos, sin = torch.randn(2, 60, 32, device=device, dtype=dtype).unbind()
    return function, arguments | {"k": k, "v": v, "rotary_cos": cos, "rotary_sin": sin}


CALLS = [dense, varlen, cache, append]


def copied(arguments):
    return {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_bits_are_those_of_the_validated_way(device, dtype, call, monkeypatch):
    if device == "cuda" and dtype == torch.float32 and call in (cache, append):
        pytest.skip("caches have 16 bits on CUDA")
    function, arguments = call(device, dtype)
    long, short = copied(arguments), copied(arguments)
    lse = {"return_softmax_lse": True}
    with monkeypatch.context() as patch:
        for module in MODULES:
            patch.setattr(module, "is_direct", lambda *_: False)
        expected = function(**long, **lse)
    if function is not flash_attn_with_kvcache:  # whose own name it is
        lse = {"return_lse": True}
    out, softmax_lse = function(**short, **lse)
    assert torch.equal(out, expected[0]) and torch.equal(softmax_lse, expected[1])
    if call is append:
        assert torch.equal(short["k_cache"], long["k_cache"])
        assert torch.equal(short["v_cache"], long["v_cache"])


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_the_op_is_called_once_and_directly(call, monkeypatch):
    function, arguments = call("cpu", torch.float32)
    name = {"dense": "fwd", "varlen": "varlen_fwd", "cache": "attend_kvcache"}.get(call.__name__)
    name = name or "fwd_kvcache"
    calls, op = [], getattr(ops, name)
    monkeypatch.setattr(ops, name, lambda *args, **named: calls.append(args) or op(*args, **named))
    monkeypatch.setattr(functional, "run", None)
    monkeypatch.setattr(validate_kvcache, "cuda", None)
    function(**arguments)
    assert len(calls) == 1


@pytest.mark.parametrize("switched", [check.switched, plan_log.switched], ids=["check", "plan_log"])
def test_calls_that_are_looked_at_go_the_long_way(switched):
    q = torch.randn(1, 3, 2, 8)
    assert run.is_direct(q, q, q)
    with switched():
        assert not run.is_direct(q, q, q)


def test_autocast_meta_and_other_kinds_go_the_long_way():
    q = torch.randn(1, 3, 2, 8)
    with torch.autocast("cpu"):
        assert not run.is_direct(q, q, q)
    assert not run.is_direct(q, q, q.to("meta"))
    assert not run.is_direct(q, q, q, torch.zeros(2, device="meta"))
    assert not run.is_direct(q, q, q, [0, 3])
    assert not run.is_direct(q, q, torch.nn.Parameter(q, requires_grad=False))


def test_new_keys_that_require_grad_are_refused():
    function, arguments = append("cpu", torch.float32)
    arguments["k"].requires_grad_()
    with pytest.raises(RuntimeError, match="requires grad"):
        function(**arguments)


def test_caches_are_seen_to_change():
    function, arguments = append("cpu", torch.float32)
    before = arguments["k_cache"]._version
    function(**arguments)
    assert arguments["k_cache"]._version > before


@pytest.mark.parametrize("call", [dense, varlen], ids=lambda call: call.__name__)
@pytest.mark.parametrize("with_lse", [False, True])
def test_gradients_are_those_of_the_validated_way(device, call, with_lse, monkeypatch):
    function, arguments = call(device, torch.float32)
    gradients = []
    for is_direct in (lambda *_: False, run.is_direct):
        monkeypatch.setattr(functional, "is_direct", is_direct)
        qkv = [arguments[n].clone().requires_grad_(n != "k") for n in "qkv"]
        results = function(**arguments | dict(zip("qkv", qkv, strict=True)), return_lse=with_lse)
        out, *lse = results if with_lse else (results,)
        loss = out.square().sum() + sum(torch.where(x.isinf(), 0, x).sum() for x in lse)
        gradients.append(torch.autograd.grad(loss, (qkv[0], qkv[2])))
    for expected, found in zip(*gradients, strict=True):
        assert torch.equal(found, expected)


def test_a_gradient_takes_no_detour(monkeypatch):
    function, arguments = dense("cpu", torch.float32)
    monkeypatch.setattr(functional, "run", None)
    q = arguments["q"].requires_grad_()
    out = function(**arguments)
    assert out.grad_fn.name() == "AttentionBackward"
    out.sum().backward()
    assert q.grad.isfinite().all()
    with pytest.raises(NotImplementedError, match="not differentiable again"):
        (again,) = torch.autograd.grad(function(**arguments).sum(), q, create_graph=True)
        again.sum().backward()


@pytest.mark.parametrize("call", [dense, varlen, cache])
@pytest.mark.parametrize(
    "words", ["CUDA out of memory. Tried to allocate 2 GiB", "flash_cute: odd"]
)
def test_an_error_of_the_op_is_raised_as_it_is_and_nothing_is_tried_again(monkeypatch, call, words):
    """Out of memory, say, or a refusal that validation has no words for."""
    function, arguments = call("cpu", torch.float32)
    error, calls = RuntimeError(words), []

    def broken(*args, **named):
        calls.append(args)
        raise error

    for name in ("fwd", "varlen_fwd", "attend_kvcache"):
        monkeypatch.setattr(ops, name, broken)
    with pytest.raises(RuntimeError, match=words) as raised:
        function(**arguments)
    assert raised.value is error and len(calls) == 1
    assert raised.value.__context__ is None


@pytest.mark.parametrize("is_worded", [True, False])
def test_a_refused_call_keeps_no_tensor_alive(monkeypatch, is_worded):
    function, arguments = dense("cpu", torch.float32)
    if is_worded:
        arguments["k"] = arguments["k"][:, :, :, :32]
    else:
        monkeypatch.setattr(ops, "fwd", refusing)
    alive = weakref.ref(arguments["q"])
    gc.disable()
    try:
        with pytest.raises((ValueError, RuntimeError), match="head dim"):
            function(**arguments)
        del arguments
        assert alive() is None
    finally:
        gc.enable()


def refusing(*_, **__):
    raise RuntimeError("flash_cute: a head dim that validation knows nothing of")
