"""Programs that were written for flash-attn, over flash_cute.compat."""

from __future__ import annotations

import importlib
import inspect
import sys

import fresh
import numpy as np
import pytest
import torch
from bad_arguments import good_arguments, pages, wide

import flash_cute
from flash_cute import compat
from flash_cute.compat import flash_attn, flash_attn_2_cuda, flash_attn_interface
from flash_cute.compat.flash_attn import flash_attn_interface as fa2

PROGRAM = """
import flash_cute.compat
flash_cute.compat.install()

import flash_attn
import torch
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.flash_attn_interface import _flash_attn_forward
from flash_attn.layers.rotary import RotaryEmbedding
import flash_attn_2_cuda
from flash_attn_interface import flash_attn_with_kvcache

q = torch.randn(2, 9, 4, 16, requires_grad=True)
mask = torch.arange(9) < torch.tensor([[9], [5]])
tokens, indices, cu_seqlens, longest, _ = unpad_input(q, mask)
sequences = (cu_seqlens, cu_seqlens, longest, longest)
out = flash_attn_varlen_func(tokens, tokens, tokens, *sequences, causal=True)
out = pad_input(out, indices, 2, 9)
expected = flash_attn_func(q[1:, :5], q[1:, :5], q[1:, :5], causal=True)
torch.testing.assert_close(out[1:, :5], expected)
assert (out[1, 5:] == 0).all()
out.sum().backward()
assert q.grad[1, 5:].abs().max() == 0 < q.grad.abs().max()
print(flash_attn.__version__)
flash_cute.compat.uninstall()
try:
    import flash_attn.bert_padding
except ModuleNotFoundError:
    print("gone")
"""
FUNCTIONS = (
    "func", "qkvpacked_func", "kvpacked_func", "varlen_func", "varlen_qkvpacked_func",
    "varlen_kvpacked_func",
)  # fmt: skip


def test_a_program_with_one_line_added():
    result = fresh.run(PROGRAM)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [flash_attn.__version__, "gone"]


def test_what_was_there_comes_back():
    mine = type(sys)("flash_attn")
    sys.modules["flash_attn"] = sys.modules["flash_attn.ops"] = mine
    try:
        compat.install()
        compat.install()
        assert importlib.import_module("flash_attn") is flash_attn
        assert "flash_attn.ops" not in sys.modules
        compat.uninstall()
        compat.uninstall()
        assert sys.modules["flash_attn"] is sys.modules["flash_attn.ops"] is mine
        assert "flash_attn_interface" not in sys.modules
    finally:
        del sys.modules["flash_attn"], sys.modules["flash_attn.ops"]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_flash_attn_2(device, function):
    arguments = good_arguments(function, device)
    call = getattr(flash_attn, f"flash_attn_{function}")
    own = getattr(flash_cute, f"flash_attn_{function}")
    expected = own(**arguments, causal=True, window_size=(3, -1), return_lse=True)
    options = {"causal": True, "window_size": (torch.tensor(3), -7), "softcap": -1.0}
    assert torch.equal(call(**arguments, **options), expected[0])
    out, lse, probs = call(**arguments, **options, return_attn_probs=True)
    assert torch.equal(lse, expected[1]) and torch.equal(out, expected[0]) and probs.numel() == 0
    torch.manual_seed(0)
    *_, probs = call(**arguments, dropout_p=0.5, return_attn_probs=True)
    torch.manual_seed(0)
    *_, expected = own(**arguments, dropout_p=0.5, return_attn_probs=True)
    assert torch.equal(probs, expected) and (probs < 0).any()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_positions_of_arguments_are_flash_attn_2_s(function):
    """In the order that its callers count on."""
    given = list(inspect.signature(getattr(flash_attn, f"flash_attn_{function}")).parameters)
    tail = [
        "dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes",
        "deterministic", "return_attn_probs",
    ]  # fmt: skip
    first = list(good_arguments(function, "cpu"))
    if function == "varlen_func":
        first = ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
        tail.append("block_table")
    if function == "varlen_kvpacked_func":
        first = ["q", "kv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    assert given == first + tail


def test_flash_attn_3_s_fourth_argument_is_the_scale(device):
    arguments = good_arguments("func", device)
    expected = flash_cute.flash_attn_func(**arguments, softmax_scale=0.25, return_lse=True)
    out, lse = flash_attn_interface.flash_attn_func(
        *arguments.values(), 0.25, return_attn_probs=True
    )
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert torch.equal(flash_attn_interface.flash_attn_func(*arguments.values(), 0.25), out)


def test_flash_attn_3_varlen_and_packed(device):
    arguments = good_arguments("varlen_func", device)
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    used = torch.tensor([4, 3], dtype=torch.int32, device=device)
    expected = flash_cute.flash_attn_varlen_func(
        **arguments, seqused_q=used, softmax_scale=0.3, causal=True
    )
    got = flash_attn_interface.flash_attn_varlen_func(
        *(arguments[x] for x in names), used, None, 0.3, True
    )
    assert torch.equal(got, expected)
    q, k, v = good_arguments("func", device).values()
    packed = torch.cat([q, k, v], 2)
    got = flash_attn_interface.flash_attn_qkvpacked_func(packed, causal=True, num_heads_q=4)
    torch.testing.assert_close(got, flash_cute.flash_attn_func(q, k, v, causal=True))


def test_flash_attn_3_over_a_cache(device):
    q = torch.randn(2, 1, 4, 16, device=device).bfloat16()
    k_cache, v_cache = torch.randn(2, 6, 4, 2, 16, device=device).bfloat16()  # 6 pages of 4 rows
    table = torch.tensor([[0, 3], [5, 1], [2, 4]], dtype=torch.int32, device=device)
    picks = torch.tensor([2, 0], dtype=torch.int32, device=device)
    lengths = torch.tensor([7, 5], dtype=torch.int32, device=device)
    expected = flash_cute.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lengths, block_table=table[[2, 0]].contiguous(),
        causal=True, return_softmax_lse=True,
    )  # fmt: skip
    out, lse, *rest = flash_attn_interface.flash_attn_with_kvcache(
        q.requires_grad_(), k_cache, v_cache, cache_seqlens=lengths, page_table=table,
        cache_batch_idx=picks, causal=True, return_softmax_lse=True, rotary_seqlens=lengths,
        scheduler_metadata=flash_attn_interface.get_scheduler_metadata(2, 1, device=device),
    )  # fmt: skip
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1]) and rest == [None, None]
    with pytest.raises(NotImplementedError, match="q_descale"):
        flash_attn_interface.flash_attn_with_kvcache(q, k_cache, v_cache, q_descale=lengths)
    with pytest.raises(RuntimeError, match="k_descale is given, and the caches"):
        flash_attn_interface.flash_attn_with_kvcache(q, k_cache, v_cache, k_descale=lengths)


@pytest.mark.filterwarnings("ignore:flash_cute. no kernel reads a cache")
def test_flash_attn_3_over_an_fp8_cache(device):
    q, k, v = (torch.randn(2, 1, n, 16, device=device).bfloat16() for n in (4, 2, 2))
    cache = torch.randn(2, 6, 4, 2, 16, device=device).to(torch.float8_e4m3fn)
    table = torch.tensor([[0, 3], [5, 1], [2, 4]], dtype=torch.int32, device=device)
    picks = torch.tensor([2, 0], dtype=torch.int32, device=device)
    lengths = torch.tensor([7, 5], dtype=torch.int32, device=device)
    k_descale, v_descale = torch.rand(2, 2, 2, device=device) + 0.5
    same = {"cache_seqlens": lengths, "k_descale": k_descale, "v_descale": v_descale}
    ours, theirs = cache.clone(), cache.clone()
    expected = flash_cute.flash_attn_with_kvcache(
        q, *ours, k, v, block_table=table[[2, 0]].contiguous(), causal=True, **same
    )
    out = flash_attn_interface.flash_attn_with_kvcache(
        q, *theirs, k, v, page_table=table, cache_batch_idx=picks, causal=True, **same
    )
    assert torch.equal(out, expected)
    assert torch.equal(theirs.view(torch.int8), ours.view(torch.int8))
    assert not torch.equal(theirs.view(torch.int8), cache.view(torch.int8))


def fa3_raw_case(device, packed):
    """q, k and v, and what functions are told of their sequences."""
    a = good_arguments("varlen_func" if packed else "func", device)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return [a["q"], a["k"], a["v"]], {name: a[name] for name in names if packed}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("used", [False, True])
def test_flash_attn_3_s_raw_functions(device, packed, used):
    """As ring attention and Transformer Engine call them."""
    if used and not packed:
        pytest.skip("lengths of packed tensors")
    qkv, sequences = fa3_raw_case(device, packed)
    lengths = torch.tensor([4, 2], dtype=torch.int32, device=device) if used else None
    dout = torch.randn_like(qkv[0])
    options = {"softmax_scale": 0.3, "softcap": 2.0}
    buffer = torch.full_like(qkv[0], torch.nan)
    with torch.no_grad():
        out, lse, *rest = flash_attn_interface._flash_attn_forward(
            wide(qkv[0]), *qkv[1:], out_=buffer, **sequences, seqused_q=lengths, seqused_k=lengths,
            causal=True, window_size_left=-1, window_size_right=0, **options,
        )  # fmt: skip
    assert out.data_ptr() == buffer.data_ptr() and [x.numel() for x in rest] == [0, 0]
    grads = [torch.full_like(x, torch.nan) for x in qkv]
    softmax_d = flash_attn_interface._flash_attn_backward(
        wide(dout), *qkv, out, lse, *(sequences.get(x) for x in ("cu_seqlens_q", "cu_seqlens_k")),
        lengths, lengths, *(sequences.get(x) for x in ("max_seqlen_q", "max_seqlen_k")), *grads,
        is_causal=True, deterministic=True, **options,
    )  # fmt: skip
    leaves = [x.clone().requires_grad_() for x in qkv]
    function, more = flash_cute.flash_attn_func, {}
    if packed:
        function, more = flash_cute.flash_attn_varlen_func, {**sequences}
        more |= {"seqused_q": lengths, "seqused_k": lengths}
    expected, expected_lse = function(
        *leaves, causal=True, deterministic=True, return_lse=True, **options, **more
    )
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    for x, y in zip(grads, torch.autograd.grad(expected, leaves, dout), strict=True):
        torch.testing.assert_close(x, y)
    rows = (dout.double() * out.double()).sum(-1).transpose(-1, -2)
    torch.testing.assert_close(softmax_d.double(), rows, rtol=1e-2, atol=1e-2)


def test_flash_attn_3_s_raw_forward_over_a_cache(device):
    q = torch.randn(2, 1, 4, 16, device=device).bfloat16()
    caches = torch.randn(2, 6, 4, 2, 16, device=device).bfloat16()
    new = torch.randn(2, 2, 1, 2, 16, device=device).bfloat16()
    table = torch.tensor([[0, 3], [5, 1]], dtype=torch.int32, device=device)
    lengths = torch.tensor([6, 5], dtype=torch.int32, device=device)
    results, written = [], []
    for function, named in (
        (flash_attn_interface._flash_attn_forward, {"k_new": new[0], "v_new": new[1]}),
        (flash_attn_interface.flash_attn_with_kvcache, {"k": new[0], "v": new[1]}),
    ):
        k, v = caches.clone()
        raw = "k_new" in named
        named[("seqused_k" if raw else "cache_seqlens")] = lengths
        named |= {} if raw else {"return_softmax_lse": True}
        results.append(function(q, k, v, page_table=table, causal=True, **named)[:2])
        written.append(torch.stack([k, v]))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    assert torch.equal(*written) and not torch.equal(written[0], caches)
    plain = torch.randn(2, 2, 12, 2, 16, device=device).bfloat16()
    out, lse, *_ = flash_attn_interface._flash_attn_forward(q, *plain, seqused_k=lengths)
    for b, length in enumerate(lengths.tolist()):
        part = plain[:, b : b + 1, :length]
        expected = flash_cute.flash_attn_func(q[b : b + 1], *part, return_lse=True)
        torch.testing.assert_close(out[b : b + 1], expected[0], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(lse[b : b + 1], expected[1], rtol=1e-3, atol=1e-3)


def test_flash_attn_3_s_raw_refusals(device):
    (q, k, v), _ = fa3_raw_case(device, False)
    offsets = torch.tensor([0, 8, 16], dtype=torch.int32, device=device)
    lengths = torch.tensor([4, 4], dtype=torch.int32, device=device)
    forward = flash_attn_interface._flash_attn_forward
    for named, word in (
        ({"cu_seqlens_k": offsets}, "cu_seqlens_k"),
        ({"seqused_q": lengths}, "seqused_q"),
        ({"seqused_q": lengths, "seqused_k": lengths}, "seqused_q"),
        ({"qv": v}, "qv"),
        ({"scheduler_metadata": lengths}, "scheduler_metadata"),
    ):
        with pytest.raises(NotImplementedError, match=word):
            forward(q, k, v, **named)
    out, lse, *_ = forward(q, k, v)
    with pytest.raises(RuntimeError, match="dk is None"):
        flash_attn_interface._flash_attn_backward(
            out, q, k, v, out, lse, dq=torch.empty_like(q), dv=torch.empty_like(v)
        )


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_raw_functions(device, dropout_p):
    """As ring attention and Megatron call them: results of forward go to backward."""
    q, k, v = good_arguments("func", device).values()
    dout = torch.randn_like(q)
    torch.manual_seed(1)
    out, lse, probs, state = fa2._flash_attn_forward(
        q, wide(k), v, dropout_p, 0.3, causal=True, window_size_left=-1, window_size_right=-1,
        softcap=0.0, alibi_slopes=None, return_softmax=False,
    )  # fmt: skip
    assert probs.numel() == 0
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    fa2._flash_attn_backward(
        wide(dout), q, k, v, out, lse, *grads, dropout_p, 0.3, True, -1, -1, 0.0, None, True,
        rng_state=state,
    )  # fmt: skip
    torch.manual_seed(1)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = flash_cute.flash_attn_func(
        *leaves, dropout_p, 0.3, True, deterministic=True, return_lse=True
    )
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    for x, y in zip(grads, torch.autograd.grad(expected[0], leaves, dout), strict=True):
        torch.testing.assert_close(x, y)


def test_raw_varlen_functions(device):
    a = good_arguments("varlen_func", device)
    sequences = [a[x] for x in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")]
    qkv, dout = [a["q"], a["k"], a["v"]], torch.randn_like(a["q"])
    out, lse, _, state = fa2._flash_attn_varlen_forward(
        *qkv, *sequences[:2], np.int64(5), torch.tensor(5), 0.0, 0.3, True
    )
    grads = [torch.empty_like(x) for x in qkv]
    fa2._flash_attn_varlen_backward(
        dout, *qkv, out, lse, *grads, *sequences, 0.0, 0.3, True, -1, -1, 0.0, None, False, state
    )
    leaves = [x.clone().requires_grad_() for x in qkv]
    expected = flash_cute.flash_attn_varlen_func(*leaves, *sequences, 0.0, 0.3, True)
    assert torch.equal(out, expected)
    for x, y in zip(grads, torch.autograd.grad(expected, leaves, dout), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)


def test_lse_of_rows_without_keys(device):
    """+inf, as flash-attn has it, and backward takes it so."""
    q, k, v = good_arguments("func", device).values()
    k, v = k[:, :5], v[:, :5]  # the first 3 of 8 causal queries see no key
    out, lse, *_ = fa2._flash_attn_forward(q, k, v, 0.0, 0.3, True, -1, -1, 0.0, None, False)
    assert (lse[:, :, :3] == torch.inf).all() and lse[:, :, 3:].isfinite().all()
    assert (out[:, :3] == 0).all()
    assert torch.equal(
        flash_attn.flash_attn_func(q, k, v, 0.0, 0.3, True, return_attn_probs=True)[1], lse
    )
    grads = [torch.empty_like(x) for x in (q, k, v)]
    fa2._flash_attn_backward(
        torch.ones_like(out), q, k, v, out, lse, *grads, 0.0, 0.3, True, -1, -1, 0.0, None, False
    )
    assert all(x.isfinite().all() for x in grads) and (grads[0][:, :3] == 0).all()


def test_keys_with_gaps(device):
    """xFormers' masks with gaps: starts in any order, rows that are shared."""
    a = good_arguments("varlen_func", device)
    q, k, v = a["q"], a["k"], a["v"]  # queries 0:5 and 5:8
    starts = torch.tensor([4, 1, 8], dtype=torch.int32, device=device)
    lengths = torch.tensor([4, 5], dtype=torch.int32, device=device)
    out, lse, *_ = flash_attn_2_cuda.varlen_fwd(
        q, k, v, None, a["cu_seqlens_q"], starts, lengths, None, None, None, 5, 5, 0.0, 0.3, False,
        True, -1, -1, 0.0, False, None,
    )  # fmt: skip
    for rows, keys in ((slice(0, 5), slice(4, 8)), (slice(5, 8), slice(1, 6))):
        expected, expected_lse = flash_cute.flash_attn_func(
            q[None, rows], k[None, keys], v[None, keys], 0.0, 0.3, True, return_lse=True
        )
        torch.testing.assert_close(out[rows], expected[0], rtol=1e-2, atol=1e-2)
        finite = expected_lse[0].masked_fill(expected_lse[0] == -torch.inf, torch.inf)
        torch.testing.assert_close(lse[:, rows], finite, rtol=1e-4, atol=1e-4)


def test_pages_with_queries_that_require_grad(device):
    arguments = good_arguments("varlen_func", device)
    arguments |= pages(arguments)
    arguments["k"].normal_(), arguments["v"].normal_()
    expected = flash_attn.flash_attn_varlen_func(**arguments)
    arguments["block_table"] = arguments["block_table"].mT.contiguous().mT
    arguments["q"].requires_grad_()
    assert torch.equal(flash_attn.flash_attn_varlen_func(**arguments), expected)


def test_over_a_cache(device):
    q = torch.randn(2, 1, 4, 16, device=device).bfloat16().requires_grad_()
    cache = torch.randn(2, 2, 12, 2, 16, device=device).bfloat16()
    lengths = torch.tensor([9, 0], dtype=torch.int32, device=device)
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, *cache, cache_seqlens=lengths, causal=True, return_softmax_lse=True
    )
    raw = flash_attn_2_cuda.fwd_kvcache(
        q, *cache, None, None, lengths, None, None, None, None, None, None, torch.empty_like(out),
        None, True, -1, -1, 0.0, True, 0,
    )  # fmt: skip
    assert torch.equal(out, raw[0]) and torch.equal(lse, raw[1])
    assert (lse[1] == torch.inf).all() and lse[0].isfinite().all() and (out[1] == 0).all()


@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface])
def test_compiled(module):
    q, k, v = (x.requires_grad_() for x in good_arguments("func", "cpu").values())
    run = torch.compile(module.flash_attn_func, backend="aot_eager", fullgraph=True)
    out, expected = (f(q, k, v, causal=True) for f in (run, module.flash_attn_func))
    assert torch.equal(out, expected)
    dout = torch.randn_like(out)
    assert torch.equal(*(torch.autograd.grad(x, q, dout)[0] for x in (out, expected)))


def test_errors_are_runtime_errors(device):
    q, k, v = good_arguments("func", device).values()
    for module in (flash_attn, flash_attn_interface):
        for kind in (RuntimeError, ValueError):
            with pytest.raises(kind, match="heads must be a multiple"):
                module.flash_attn_func(q[:, :, :3], k, v)
        for kind in (RuntimeError, TypeError):
            with pytest.raises(kind, match="dtypes differ"):
                module.flash_attn_func(q.float(), k, v)
    with pytest.raises(TypeError, match="missing"):
        flash_attn.flash_attn_func(q, k)
