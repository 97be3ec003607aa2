"""flash-attn 2.8.4's num_splits of varlen calls, and its refusals over pages."""

from __future__ import annotations

import inspect

import pytest
import torch
from bad_arguments import good_arguments, pages

from flash_cute.compat import flash_attn, flash_attn_2_cuda
from flash_cute.compat.flash_attn import flash_attn_interface as fa2

INT32 = torch.int32


def varlen_call(device: str, **more):
    a = good_arguments("varlen_func", device)
    rest = {"block_table": None, "seqused_k": None} | more
    k, v = rest.pop("k", a["k"]), rest.pop("v", a["v"])
    sequences = [a[x] for x in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")]
    return fa2._flash_attn_varlen_forward(a["q"], k, v, *sequences, 0.0, 0.3, True, **rest)


def test_num_splits_is_the_last_argument():
    for function in (fa2._flash_attn_varlen_forward, flash_attn_2_cuda.varlen_fwd):
        last = list(inspect.signature(function).parameters.values())[-1]
        assert (last.name, last.default) == ("num_splits", 0)
    assert "num_splits" not in inspect.signature(flash_attn.flash_attn_varlen_func).parameters


@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_num_splits_cut_keys_alone(device, num_splits):
    """Of packed keys, and of keys with gaps, which are cut."""
    torch.manual_seed(5)
    out, lse, *_ = varlen_call(device, num_splits=num_splits)
    torch.manual_seed(5)
    expected, expected_lse, *_ = varlen_call(device)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    used = torch.tensor([4, 2], dtype=INT32, device=device)
    results = []
    for splits in (num_splits, 0):
        torch.manual_seed(7)
        results.append(varlen_call(device, seqused_k=used, num_splits=splits))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(results[0][1], results[1][1])


def test_num_splits_over_pages(device):
    paged = pages(good_arguments("varlen_func", device))
    paged["k"].normal_(), paged["v"].normal_()
    results = []
    for splits in (0, 1):
        torch.manual_seed(9)
        results.append(varlen_call(device, **paged, num_splits=splits)[0])
    assert torch.equal(*results) and results[0].isfinite().all()
    with pytest.raises(RuntimeError, match=r"num_splits is 2.*give 0 or 1"):
        varlen_call(device, **paged, num_splits=2)


@pytest.mark.parametrize(
    ("given", "error"), [(-1, ValueError), (True, TypeError), (1.0, TypeError)]
)
def test_num_splits_is_a_count(given, error):
    with pytest.raises(error, match="num_splits"):
        varlen_call("cpu", num_splits=given)
    with pytest.raises(RuntimeError, match="num_splits"):
        varlen_call("cpu", num_splits=given)


class TestBeyondThePages:
    """2 sequences with 3 pages of 4 rows each."""

    @pytest.fixture
    def cache(self, device):
        k_cache, v_cache = torch.randn(2, 7, 4, 2, 16, device=device).bfloat16()
        table = torch.tensor([[5, 0, 3], [1, 6, 2]], dtype=INT32, device=device)
        return {"k_cache": k_cache, "v_cache": v_cache, "block_table": table}

    @staticmethod
    def call(raw, cache, lengths, new=0, table=None):
        device = cache["k_cache"].device
        table = cache["block_table"] if table is None else table
        if not isinstance(lengths, int):
            lengths = torch.tensor(lengths, dtype=INT32, device=device)
        q = torch.randn(2, 1, 4, 16, device=device).bfloat16()
        k, v = torch.randn(2, 2, new, 2, 16, device=device).bfloat16() if new else (None, None)
        if not raw:
            return flash_attn.flash_attn_with_kvcache(
                q, cache["k_cache"], cache["v_cache"], k, v, cache_seqlens=lengths,
                block_table=table, causal=True,
            )  # fmt: skip
        return flash_attn_2_cuda.fwd_kvcache(
            q, cache["k_cache"], cache["v_cache"], k, v, lengths, None, None, None, None, table,
            None, None, 0.25, True, -1, -1, 0.0, True, 0,
        )[0]  # fmt: skip

    @pytest.mark.parametrize("raw", [False, True])
    @pytest.mark.parametrize(("lengths", "new"), [((12, 3), 0), ((0, 11), 1), ((9, 9), 3)])
    def test_lengths_that_fit(self, cache, raw, lengths, new):
        before = cache["k_cache"].clone()
        assert self.call(raw, cache, lengths, new).isfinite().all()
        assert torch.equal(before, cache["k_cache"]) == (new == 0)

    @pytest.mark.parametrize("raw", [False, True])
    @pytest.mark.parametrize(("lengths", "new"), [((12, 13), 0), ((2, 12), 1), ((10, 2), 3)])
    def test_lengths_beyond_them_write_nothing(self, cache, raw, lengths, new):
        before = cache["k_cache"].clone()
        columns = -(-(max(lengths) + new) // 4)
        with pytest.raises(
            RuntimeError, match=rf"cache_seqlens is up to {max(lengths)}.* {columns} col"
        ):
            self.call(raw, cache, lengths, new)
        assert torch.equal(before, cache["k_cache"])

    def test_one_length_for_all(self, cache):
        assert self.call(False, cache, 12).isfinite().all()
        with pytest.raises(RuntimeError, match="cache_seqlens is up to 13"):
            self.call(False, cache, 13)

    @pytest.mark.parametrize("raw", [False, True])
    @pytest.mark.parametrize("page", [-1, 7, 2**31 - 1])
    def test_pages_that_do_not_exist_on_the_cpu(self, raw, page):
        k_cache, v_cache = torch.randn(2, 7, 4, 2, 16).bfloat16()
        cache = {"k_cache": k_cache, "v_cache": v_cache}
        table = torch.tensor([[5, 0, 3], [1, page, 2]], dtype=INT32)
        assert self.call(raw, cache, (12, 4), 0, table).isfinite().all()  # not read
        for lengths, new in (((12, 5), 0), ((3, 4), 1)):
            with pytest.raises(RuntimeError, match=rf"block_table\[1, 1\] is {page}; there are 7"):
                self.call(raw, cache, lengths, new, table)

    @pytest.mark.parametrize("name", ["block_table", "cache_seqlens"])
    def test_other_mistakes_keep_their_words(self, cache, name):
        device = cache["k_cache"].device
        given = {"cache_seqlens": torch.tensor([3, 4], dtype=INT32, device=device)} | cache
        for wrong in (given[name].float(), given[name][None], "no tensor"):
            with pytest.raises((TypeError, ValueError), match=name):
                flash_attn.flash_attn_with_kvcache(
                    torch.randn(2, 1, 4, 16, device=device).bfloat16(), **(given | {name: wrong})
                )
