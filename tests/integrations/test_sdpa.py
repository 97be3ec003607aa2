"""torch's own attention functions over flash_cute's kernels."""

from __future__ import annotations

import inspect
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from sdpa_calls import gradients, ops_of
from torch.nn import attention
from torch.nn.attention import SDPBackend, bias, sdpa_kernel

import flash_cute
from flash_cute import _torch_internals as internals
from flash_cute.integrations import sdpa, sdpa_kernels

ATEN = torch.ops.aten
varlen = pytest.importorskip("torch.nn.attention.varlen")
VARLEN = inspect.signature(varlen.varlen_attn).parameters


@pytest.fixture(autouse=True)
def restored():
    yield
    sdpa.restore()


def heads_first(device: str, seqlen_q: int, seqlen_k: int, heads_k: int, dtype=torch.float64):
    """q, k and v (batch, heads, seqlen, dim): contiguous, and views of (batch, seqlen, ..)."""
    q = torch.randn(2, 4, seqlen_q, 16, dtype=dtype, device=device)
    k, v = (torch.randn(2, seqlen_k, heads_k, 16, dtype=dtype, device=device) for _ in range(2))
    return [x.requires_grad_() for x in (q, k.transpose(1, 2), v.transpose(1, 2))]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(9, 9), (9, 5), (5, 9), (1, 7)])
@pytest.mark.parametrize("heads_k", [4, 2])
def test_scaled_dot_product_attention(is_causal, seqlen_q, seqlen_k, heads_k):
    qkv = heads_first("cpu", seqlen_q, seqlen_k, heads_k)
    options = {"is_causal": is_causal, "scale": 0.4, "enable_gqa": heads_k != 4}

    def run():
        return gradients(F.scaled_dot_product_attention(*qkv, **options), qkv)

    with sdpa_kernel(SDPBackend.MATH):
        expected = run()
    with sdpa.activated():
        got = run()
        assert ops_of(run) == {"flash_cute::fwd", "flash_cute::bwd"}
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_masks_are_left_to_aten():
    q, k, v = heads_first("cpu", 9, 9, 4)
    mask = torch.rand(9, 9) > 0.3
    expected = gradients(F.scaled_dot_product_attention(q, k, v, mask), [q, k, v])
    sdpa.activate()

    def run():
        return gradients(F.scaled_dot_product_attention(q, k, v, mask), [q, k, v])

    assert ops_of(run) == set()
    for x, y in zip(run(), expected, strict=True):
        assert torch.equal(x, y)


def test_activation_and_restoration():
    qkv = heads_first("cpu", 5, 5, 4)

    def run():
        return F.scaled_dot_product_attention(*qkv)

    assert not sdpa.is_active() and ops_of(run) == set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sdpa.activate()
        sdpa.activate()
    assert sdpa.is_active() and ops_of(run)
    with sdpa.activated():
        pass
    assert sdpa.is_active()
    sdpa.restore()
    sdpa.restore()
    assert not sdpa.is_active() and ops_of(run) == set()
    with pytest.raises(RuntimeError, match="out"), sdpa.activated():
        raise RuntimeError("out")
    assert not sdpa.is_active()


@pytest.mark.skipif(not hasattr(attention, "restore_flash_attention_impl"), reason="torch >= 2.11")
def test_torch_s_own_way_of_activation():
    qkv = heads_first("cpu", 5, 5, 4)

    def run():
        return F.scaled_dot_product_attention(*qkv)

    assert {sdpa.NAME, "FA3", "FA4"} <= set(attention.list_flash_attention_impls())
    sdpa.activate()
    assert attention.current_flash_attention_impl() == sdpa.NAME
    sdpa.restore()
    assert attention.current_flash_attention_impl() is None
    attention.activate_flash_attention_impl(sdpa.NAME)  # torch's own way
    assert sdpa.is_active() and ops_of(run)
    attention.restore_flash_attention_impl()
    assert not sdpa.is_active()


@pytest.mark.parametrize("layout", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
def test_results_lie_as_torch_expects(layout):
    """As the meta kernels say, which graphs believe."""
    order = [layout.index(i) for i in range(4)]
    q = torch.randn([(2, 4, 9, 16)[i] for i in layout]).permute(order)
    cpu = (q, q, q, 0.0, True)
    with sdpa.activated():
        for op, args in (
            (ATEN._scaled_dot_product_flash_attention_for_cpu, cpu),
            (ATEN._scaled_dot_product_flash_attention, cpu),
        ):
            got, meta = op(*args), op(*(x.to("meta") if x is q else x for x in args))
            back = getattr(ATEN, f"{op.__name__}_backward")
            more = got[1:] if len(got) == 2 else got[1:6]
            more_meta = meta[1:] if len(meta) == 2 else meta[1:6]
            tail, tail_meta = ((), ()) if len(got) == 2 else (got[6:8], meta[6:8])
            grads = back(q, q, q, q, got[0], *more, 0.0, True, *tail)
            metas = back(*[q.to("meta")] * 4, meta[0], *more_meta, 0.0, True, *tail_meta)
            for x, y in zip((*got, *grads), (*meta, *metas), strict=True):
                if isinstance(x, torch.Tensor):
                    assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
                else:
                    assert x == y


@pytest.mark.parametrize("with_graphs", [False, True])
def test_results_that_nobody_reads_are_shared_between_calls_in_eager(with_graphs, monkeypatch):
    """And may be saved for backward, though they are first made in inference mode."""
    monkeypatch.setattr(internals, "has_inductor", lambda: with_graphs)
    monkeypatch.setattr(sdpa_kernels, "_kept", {})
    leaf = torch.randn(1, 2, 9, 16).requires_grad_()
    with sdpa.activated():
        with torch.inference_mode():
            first = ATEN._scaled_dot_product_flash_attention(leaf, leaf, leaf)
        second = ATEN._scaled_dot_product_flash_attention(leaf, leaf, leaf)
        second[0].sum().backward()
    for x, y in zip(first[6:], second[6:], strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert (x is y) != with_graphs


def test_rows_that_are_not_contiguous():
    q, k, v = heads_first("cpu", 9, 9, 4)
    strided = [x.detach().mT.contiguous().mT.requires_grad_() for x in (q, k, v)]
    with sdpa.activated():
        found = []
        for x in ([q, k, v], strided):
            out = ATEN._scaled_dot_product_flash_attention(*x, 0.0, True)[0]
            found.append(gradients(out, x))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("seqlen_k", [9, 12])
def test_dropout_and_alignment_of_the_operator(seqlen_k):
    """CUDA's operator, on the CPU too: causal to the bottom right, dropout replayed by backward."""
    qkv = heads_first("cpu", 9, seqlen_k, 2)
    sdpa.activate()
    out, lse, _, _, max_q, max_k, state, _, mask = ATEN._scaled_dot_product_flash_attention(
        *qkv, 0.3, True, True, scale=0.4
    )
    assert (max_q, max_k) == (9, seqlen_k) and (mask < 0).any()
    transposed = [x.transpose(1, 2) for x in qkv]
    expected, expected_lse, probs = flash_cute.flash_attn_func(
        *transposed, 0.3, 0.4, True, return_attn_probs=True, rng=state.view(torch.int64)
    )
    assert torch.equal(out, expected.transpose(1, 2)) and torch.equal(lse, expected_lse)
    assert torch.equal(mask, probs)
    got = gradients(out, qkv)
    for x, y in zip(got, gradients(expected.transpose(1, 2), qkv), strict=True):
        torch.testing.assert_close(x, y)
    again = ATEN._scaled_dot_product_flash_attention(*qkv, 0.3, True)[0]
    assert not torch.equal(again, out)


def test_causal_lower_right(cuda):
    q, k, v = (x.bfloat16() for x in heads_first(cuda, 5, 9, 4, torch.float32))
    with sdpa.activated():
        out = F.scaled_dot_product_attention(q, k, v, bias.causal_lower_right(5, 9))
    expected = flash_cute.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))


def packed(device: str, dtype=torch.float64):
    cu_q = torch.tensor([0, 5, 8], dtype=torch.int32, device=device)
    cu_k = torch.tensor([0, 7, 11], dtype=torch.int32, device=device)
    q, k, v = (
        torch.randn(n, h, 16, dtype=dtype, device=device).requires_grad_()
        for n, h in ((8, 4), (11, 2), (11, 2))
    )
    return [q, k, v], (cu_q, cu_k, 5, 7)


@pytest.mark.skipif("window_size" not in VARLEN, reason="this torch's varlen_attn has no windows")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (2, 1)])
def test_varlen_attn(device, window):
    qkv, sequences = packed(device, torch.float64 if device == "cpu" else torch.bfloat16)
    grouped = {"enable_gqa": True} if "enable_gqa" in VARLEN else {}  # torch 2.11 asks for none
    sdpa.activate()

    def run():
        out = varlen.varlen_attn(
            *qkv, *sequences, scale=0.4, window_size=window, **grouped,
            return_aux=varlen.AuxRequest(lse=True),
        )  # fmt: skip
        return out

    out, lse = run()
    assert ops_of(run) >= {"flash_cute::varlen_fwd"}
    expected, expected_lse = flash_cute.flash_attn_varlen_func(
        *qkv, *sequences, softmax_scale=0.4, window_size=window, return_lse=True
    )
    torch.testing.assert_close(lse, expected_lse)
    for x, y in zip(gradients(out, qkv), gradients(expected, qkv), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.skipif("block_table" not in VARLEN, reason="this torch's varlen_attn has no pages")
def test_varlen_attn_over_pages(device):
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    (q, *_), (cu_q, *_) = packed(device, dtype)
    pages = torch.randn(2, 4, 4, 2, 16, dtype=dtype, device=device)
    table = torch.tensor([[0, 3], [2, 1]], dtype=torch.int32, device=device)
    used = torch.tensor([7, 4], dtype=torch.int32, device=device)
    more = {
        "seqused_k": used, "block_table": table, "enable_gqa": True, "num_splits": 1,
        "window_size": (-1, 0),
    }  # fmt: skip
    with torch.no_grad():
        expected = flash_cute.flash_attn_with_kvcache(
            q, *pages, cache_seqlens=used, block_table=table, cu_seqlens_q=cu_q, max_seqlen_q=5,
            causal=True, num_splits=1,
        )  # fmt: skip
        sdpa.activate()
        got = varlen.varlen_attn(q, *pages, cu_q, None, 5, 7, **more)
        assert torch.equal(got, expected)
        out = torch.empty_like(got)
        varlen.varlen_attn_out(out, q, *pages, cu_q, None, 5, 7, **more)
        assert torch.equal(out, expected)
        (q, k, v), sequences = packed(device, dtype)
        with pytest.raises(NotImplementedError, match="num_splits"):
            varlen.varlen_attn(q, k, v, *sequences, enable_gqa=True, num_splits=1)


class TestTransforms:
    def test_autocast(self):
        q, k, v = heads_first("cpu", 9, 9, 4, torch.float32)
        with sdpa.activated(), torch.autocast("cpu", torch.bfloat16):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            expected = flash_cute.flash_attn_func(
                *(x.transpose(1, 2) for x in (q, k, v)), causal=True
            )
        assert out.dtype == torch.bfloat16 and torch.equal(out, expected.transpose(1, 2))

    def test_vmap(self):
        x = torch.randn(3, 2, 4, 9, 16)

        def attend(x):
            return F.scaled_dot_product_attention(x, x, x)

        with sdpa.activated():
            out = torch.vmap(attend)(x)
            expected = torch.stack([attend(sample) for sample in x])
        torch.testing.assert_close(out, expected)

    def test_compiled(self):
        """What was compiled before takes what is active when it runs."""
        qkv = heads_first("cpu", 9, 9, 4, torch.float32)
        compiled = torch.compile(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2,
            fullgraph=True,
        )

        def run():
            return gradients(compiled(*qkv), qkv)

        expected = run()
        assert ops_of(run) == set()
        with sdpa.activated():
            assert ops_of(run) == {"flash_cute::fwd", "flash_cute::bwd"}
            for x, y in zip(run(), expected, strict=True):
                torch.testing.assert_close(x, y)

    def test_checkpointing(self):
        from torch.utils.checkpoint import checkpoint

        qkv = heads_first("cpu", 9, 9, 4)
        with sdpa.activated():
            expected = gradients(F.scaled_dot_product_attention(*qkv), qkv)
            out = checkpoint(F.scaled_dot_product_attention, *qkv, use_reentrant=False)
            for x, y in zip(gradients(out, qkv), expected, strict=True):
                assert torch.equal(x, y)


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_cuda(cuda, dtype, dropout_p):
    qkv = heads_first(cuda, 130, 130, 4, torch.float32)
    qkv = [x.detach().to(dtype).requires_grad_() for x in qkv]

    def run():
        torch.manual_seed(3)
        out = F.scaled_dot_product_attention(*qkv, is_causal=True, dropout_p=dropout_p)
        return gradients(out, qkv)

    with sdpa.activated():
        got = run()
        assert ops_of(run) == {"flash_cute::fwd", "flash_cute::bwd"}
    torch.manual_seed(3)
    transposed = [x.transpose(1, 2) for x in qkv]
    expected = flash_cute.flash_attn_func(*transposed, dropout_p, causal=True).transpose(1, 2)
    for x, y in zip(got, gradients(expected, qkv), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("name", ["seqused_k", "alibi_slopes"])
def test_arguments_that_aten_does_not_pass_to_backward(device, name):
    """Their gradients would be those of a call without them."""
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    q = torch.randn(18, 4, 16, dtype=dtype, device=device, requires_grad=True)
    cu = torch.tensor([0, 9, 18], dtype=torch.int32, device=device)
    more = {"seqused_k": cu[1:] // 2, "alibi_slopes": torch.ones(4, device=device)}
    call = partial(torch.ops.aten._flash_attention_forward, q, q, q, cu, cu, 9, 9, 0.0, False)
    with sdpa.activated():
        with pytest.raises(NotImplementedError, match=name):
            call(False, **{name: more[name]})
        with torch.no_grad():
            call(False, **{name: more[name]})
        call(False)[0].sum().backward()
