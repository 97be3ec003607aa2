"""Calls as flash-attn 2 to 4, vLLM and transformers spell them: the same results, or a hint."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bad_arguments import good_arguments, pages, wide

import flash_cute
from flash_cute import reference
from flash_cute.call import spellings

FUNCTIONS = (
    "func", "qkvpacked_func", "kvpacked_func", "varlen_func", "varlen_qkvpacked_func",
    "varlen_kvpacked_func",
)  # fmt: skip
TENSORS = ("q", "k", "v", "kv", "qkv")


def call(function: str, arguments: dict, **more):
    return getattr(flash_cute, f"flash_attn_{function}")(**(arguments | more))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_last_dimensions_are_copied(device, function):
    arguments = good_arguments(function, device)
    expected = call(function, arguments, causal=True)
    strided = {x: wide(arguments[x]) for x in TENSORS if x in arguments}
    assert all(x.stride(-1) == 2 for x in strided.values())
    assert torch.equal(call(function, arguments | strided, causal=True), expected)


def test_gradients_of_copies(device):
    q, k, v = (x.requires_grad_() for x in good_arguments("func", device).values())
    transposed = [x.mT.contiguous().mT for x in (q, k, v)]
    out = flash_cute.flash_attn_func(*transposed, causal=True)
    expected = flash_cute.flash_attn_func(q, k, v, causal=True)
    dout = torch.randn_like(out)
    for x, y in zip(
        torch.autograd.grad(out, (q, k, v), dout),
        torch.autograd.grad(expected, (q, k, v), dout),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("window", "same"),
    [
        (None, (-1, -1)),
        ((None, None), (-1, -1)),
        ((None, 0), (-1, 0)),
        ([3, None], (3, -1)),
        (np.array([3, 1]), (3, 1)),
        (torch.tensor([3, 1]), (3, 1)),
        ((torch.tensor(3), np.int64(1)), (3, 1)),
    ],
)
def test_windows(device, function, window, same):
    arguments = good_arguments(function, device)
    expected = call(function, arguments, window_size=same)
    assert torch.equal(call(function, arguments, window_size=window), expected)


@pytest.mark.parametrize("kind", [np.int32, torch.tensor])
@pytest.mark.parametrize("function", FUNCTIONS[3:])
def test_longest_lengths(device, function, kind):
    arguments = good_arguments(function, device)
    longest = {x: kind(y) for x, y in arguments.items() if x.startswith("max_seqlen")}
    assert torch.equal(call(function, arguments | longest), call(function, arguments))


@pytest.mark.parametrize("name", ["s_aux", "learnable_sink"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_names_of_sinks(device, function, name):
    arguments, logits = good_arguments(function, device), torch.randn(4, device=device)
    expected = call(function, arguments, sink=logits)
    assert torch.equal(call(function, arguments, **{name: logits}), expected)
    assert not torch.equal(call(function, arguments), expected)
    with pytest.raises(ValueError, match="names of one argument"):
        call(function, arguments, sink=logits, **{name: logits})


@pytest.mark.parametrize("function", FUNCTIONS)
def test_hints_and_disabled_features_are_accepted(device, function):
    arguments = good_arguments(function, device)
    hints = {"num_splits": 1, "pack_gqa": None, "sm_margin": 0, "q_descale": None, "qv": None}
    out, lse = call(function, arguments, **hints, return_softmax_lse=True)
    assert torch.equal(out, call(function, arguments))
    assert torch.equal(lse, call(function, arguments, return_lse=True)[1])


@pytest.mark.parametrize(
    ("name", "value", "error", "match"),
    [
        ("is_causal", True, TypeError, "use causal="),
        ("scale", 1.0, TypeError, "use softmax_scale="),
        ("attn_mask", None, TypeError, "use causal="),
        ("key_padding_mask", None, TypeError, "varlen"),
        ("attn_bias", 0, TypeError, "alibi_slopes="),
        ("block_mask", 0, TypeError, "Sparse.blocks"),
        ("mask_mod", 0, TypeError, "Sparse.from_mask_function"),
        ("softmax_scal", 1.0, TypeError, "did you mean softmax_scale="),
        ("unheard_of", 1, TypeError, "unexpected keyword argument 'unheard_of'$"),
        ("num_splits", "many", TypeError, "num_splits is str"),
        ("pack_gqa", 3, TypeError, "pack_gqa is int"),
        ("qv", torch.ones(1), NotImplementedError, "qv is given"),
        ("attention_chunk", 16, NotImplementedError, "attention_chunk is given"),
        ("attention_chunk", False, NotImplementedError, "attention_chunk is given"),
        ("return_softmax_lse", "no", TypeError, "return_softmax_lse is str; expected a bool"),
        ("return_softmax_lse", 2, ValueError, "return_softmax_lse is 2; expected a bool"),
    ],
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_other_keywords(device, function, name, value, error, match):
    with pytest.raises(error, match=match):
        call(function, good_arguments(function, device), **{name: value})


@pytest.mark.parametrize("number", [np.float32(0.3), np.float64(0.3), torch.tensor(0.3)])
def test_numbers_of_numpy_and_of_tensors(device, number):
    arguments = good_arguments("func", device)
    exact = {"softmax_scale": float(number), "softcap": float(number)}
    expected = call("func", arguments, **exact)
    given = {"softmax_scale": number, "softcap": number, "dropout_p": 0 * number}
    torch.testing.assert_close(call("func", arguments, **given), expected, rtol=0, atol=0)
    q, k, v = (arguments[name] for name in "qkv")
    cached = flash_cute.flash_attn_with_kvcache(q, k, v, softmax_scale=number)
    exact = flash_cute.flash_attn_with_kvcache(q, k, v, softmax_scale=float(number))
    assert torch.equal(cached, exact)
    x = q.to(torch.float8_e4m3fn)
    found = flash_cute.flash_attn_func(x, x, x, softmax_scale=number, q_descale=2.0)
    wide = flash_cute.flash_attn_func(x, x, x, softmax_scale=2.0 * float(number))
    assert torch.equal(found, wide)


@pytest.mark.parametrize(
    "number", [True, np.bool_(True), "x", torch.ones(2), torch.ones(()).requires_grad_(), 1j]
)
def test_what_is_no_number(device, number):
    with pytest.raises(TypeError, match=r"softmax_scale is .*; expected a number"):
        call("func", good_arguments("func", device), softmax_scale=number)


@pytest.mark.parametrize("off", [0, np.int64(0), torch.tensor(0), None])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_features_that_do_not_exist_are_off(device, function, off):
    arguments = good_arguments(function, device)
    expected = call(function, arguments)
    torch.testing.assert_close(call(function, arguments, attention_chunk=off), expected)


@pytest.mark.parametrize("function", ["func", "varlen_func"])
def test_out(device, function):
    arguments = good_arguments(function, device)
    expected = call(function, arguments, causal=True, return_lse=True, return_max_logits=True)
    out = torch.full_like(expected[0], torch.nan)
    got = call(
        function, arguments, causal=True, out=out, return_lse=True, return_max_logits=True
    )  # fmt: skip
    assert got[0] is out
    for x, y in zip(got, expected, strict=True):
        assert torch.equal(x, y)
    assert call(function, arguments, causal=True, out=out) is out


@pytest.mark.parametrize("function", ["func", "varlen_func"])
def test_out_that_does_not_fit(device, function):
    arguments = good_arguments(function, device)
    out = torch.empty_like(arguments["q"])
    for bad, error in ((out.float(), TypeError), (out[:1], ValueError), (1.0, TypeError)):
        with pytest.raises(error, match="out"):
            call(function, arguments, out=bad)
    with pytest.raises(ValueError, match="out"):
        call(function, arguments, out=arguments["q"])
    with pytest.raises(ValueError, match="return_attn_probs"):
        call(function, arguments, out=out, return_attn_probs=True)
    arguments["q"].requires_grad_()
    with pytest.raises(ValueError, match="require no grad"):
        call(function, arguments, out=out)


def test_pages_without_offsets_of_keys(device):
    """As vLLM calls it."""
    arguments = good_arguments("varlen_func", device)
    arguments |= pages(arguments)
    arguments["k"].normal_(), arguments["v"].normal_()
    lengths = torch.tensor([7, 3], dtype=torch.int32, device=device)
    offsets = torch.tensor([0, 7, 10], dtype=torch.int32, device=device)
    arguments |= {"max_seqlen_k": 7, "seqused_k": lengths}
    expected = call("varlen_func", arguments, cu_seqlens_k=offsets)
    assert torch.equal(call("varlen_func", arguments, cu_seqlens_k=None), expected)


def test_batched_keys_without_offsets(device):
    arguments = good_arguments("varlen_func", device)
    k, v = torch.randn(2, 2, 6, 2, 16, device=device).to(arguments["q"].dtype)
    lengths = torch.tensor([6, 2], dtype=torch.int32, device=device)
    more = {"k": k, "v": v, "cu_seqlens_k": None, "seqused_k": lengths, "max_seqlen_k": 6}
    out = call("varlen_func", arguments | more, causal=True)
    for b, rows in enumerate((slice(0, 5), slice(5, 8))):
        n = int(lengths[b])
        expected = flash_cute.flash_attn_func(
            arguments["q"][None, rows], k[b : b + 1, :n], v[b : b + 1, :n], causal=True
        )
        torch.testing.assert_close(out[rows], expected[0])


@pytest.mark.parametrize("used", [None, [1, 2]])
def test_no_offsets_and_no_lengths(device, used):
    with pytest.raises(ValueError, match="cu_seqlens_k is None"):
        call(
            "varlen_func", good_arguments("varlen_func", device), cu_seqlens_k=None, seqused_k=used
        )


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_max_logits(device, function, is_compiled):
    """What QK-clip needs: the largest score of each head."""
    arguments = good_arguments(function, device)
    for x in TENSORS:
        if x in arguments:
            arguments[x].requires_grad_()
    run = getattr(flash_cute, f"flash_attn_{function}")
    if is_compiled:
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    out, largest = run(**arguments, causal=True, softmax_scale=0.7, return_max_logits=True)
    assert largest.shape == (4,) and not largest.requires_grad and out.requires_grad
    if function in ("func", "varlen_func"):
        exact = {x: y.detach().double() if x in TENSORS else y for x, y in arguments.items()}
        if function == "func":
            row_max = reference.attention(**exact, is_causal=True, softmax_scale=0.7).row_max
            expected = row_max.amax((0, 2))
        else:
            row_max = reference.attention_varlen(**exact, is_causal=True, softmax_scale=0.7).row_max
            expected = row_max.amax(1)
        torch.testing.assert_close(largest.double(), expected, rtol=1e-5, atol=1e-5)
    out.sum().backward()


def test_kvcache(device):
    q, new = torch.randn(2, 1, 4, 16, device=device).bfloat16(), {}
    cache = torch.randn(2, 2, 12, 2, 16, device=device).bfloat16()
    sink = torch.randn(4, device=device)
    base = {"cache_seqlens": 9, "causal": True}

    def run(q=q, **more):
        return flash_cute.flash_attn_with_kvcache(q, *cache, **base, **new, **more)

    expected = run(sink=sink, window_size=(4, -1))
    got = run(
        wide(q), s_aux=sink, window_size=(np.int64(4), None), k_descale=None, pack_gqa=None,
        sm_margin=0, attention_chunk=0,
    )  # fmt: skip
    assert torch.equal(got, expected)
    with pytest.raises(TypeError, match="use softmax_scale="):
        run(scale=1.0)
    with pytest.raises(NotImplementedError, match="q_descale"):
        run(q_descale=sink)


def test_what_is_no_number_stays():
    for x in (None, 1.5, True, "a", torch.tensor(1.5), torch.tensor(True), torch.tensor([1])):
        assert spellings.integer(x) is x
    for x in ("ab", 3, 1.5):
        assert spellings.window(x) is x
