"""The backend for vLLM, against vLLM's interface without its kernels."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
import vllm_interface
from vllm_interface import AttentionType

import flash_cute

HEADS, HEADS_K, DIM, PAGE = 4, 2, 16, 16
MODULE = "flash_cute.integrations.vllm"


@pytest.fixture
def vllm():
    before = {x: m for x, m in sys.modules.items() if x.split(".")[0] == "vllm"}
    registered = vllm_interface.installed()
    module = importlib.import_module(f"{MODULE}.backend")
    module.registered = registered
    yield module
    for name in [x for x in sys.modules if x.split(".")[0] == "vllm" or x.startswith(MODULE)]:
        del sys.modules[name]
    sys.modules.update(before)


def make(vllm, **options):
    given = {
        "alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto",
    } | options  # fmt: skip
    return vllm.Implementation(HEADS, DIM, 0.3, HEADS_K, **given)


def batch(vllm, device, layout=(0, 1, 2, 3)):
    """Two sequences of 29 and 17 keys, with 3 and 1 queries; one more query is padding. Pages in
    memory in any order of their dimensions."""
    query = torch.randn(5, HEADS, DIM, device=device).bfloat16()
    shape = (6, HEADS_K, PAGE, 2 * DIM)
    cache = torch.randn([shape[i] for i in layout], device=device).bfloat16()
    cache = cache.permute([layout.index(i) for i in range(4)])
    metadata = vllm.Metadata(
        num_actual_tokens=4,
        max_query_len=3,
        query_start_loc=torch.tensor([0, 3, 4], dtype=torch.int32, device=device),
        max_seq_len=29,
        seq_lens=torch.tensor([29, 17], dtype=torch.int32, device=device),
        block_table=torch.tensor([[3, 0, 5], [1, 4, 0]], dtype=torch.int32, device=device),
        slot_mapping=torch.tensor([26, 27, 28, 64], device=device),
    )
    return query, cache, metadata


def expected_of(b, rows, query, cache, metadata, causal=True, **options):
    """The second way: a sequence by itself, whose keys are taken out of its pages."""
    length = int(metadata.seq_lens[b])
    pages = cache[metadata.block_table[b].long()].transpose(1, 2).flatten(0, 1)[:length]
    k, v = pages.split(DIM, -1)
    window, slopes = options.get("sliding_window"), options.get("alibi_slopes")
    side = -1 if window is None else window - 1
    return flash_cute.flash_attn_func(
        query[None, rows], k[None], v[None], 0.0, 0.3, causal, (side, 0 if causal else side),
        options.get("logits_soft_cap", 0.0),
        None if slopes is None else torch.tensor(slopes, device=query.device),
        sink=options.get("sinks"),
    )[0]  # fmt: skip


def test_registration(vllm):
    integration = importlib.import_module(MODULE)
    integration.register()
    integration.register()  # as each process of vLLM may, more than once
    assert vllm.registered["FLASH_CUTE"] == f"{MODULE}.backend.Backend"
    backend = vllm.Backend
    assert backend.get_name() == "FLASH_CUTE"
    assert backend.get_impl_cls() is vllm.Implementation
    assert not backend.forward_includes_kv_cache_update
    builder = backend.get_builder_cls()
    assert builder._cudagraph_support is vllm_interface.AttentionCGSupport.ALWAYS
    assert backend.supports_sink() and backend.supports_non_causal()
    assert backend.supports_sliding_window()
    assert backend.supports_batch_invariance() is False  # not shown for every kernel
    assert backend.supports_head_size(64) and not backend.supports_head_size(512)
    assert backend.supports_kv_cache_dtype("auto")
    assert backend.supports_kv_cache_dtype("fp8") and backend.supports_kv_cache_dtype("fp8_e4m3")
    assert not backend.supports_kv_cache_dtype("fp8_e5m2")
    assert vllm.Implementation.lse_base_on_e and not vllm.Implementation.supports_dcp


def test_older_releases(vllm, caplog):
    integration = importlib.import_module(MODULE)
    registered = vllm_interface.installed("0.31.2")
    with pytest.raises(ImportError, match=r"vLLM 0\.31 is installed.*0\.32 and newer"):
        integration.register()
    integration.plugin()  # vLLM starts without it
    assert "FLASH_CUTE" not in registered and "0.31" in caplog.text


def test_metadata(vllm):
    _, _, expected = batch(vllm, "cpu")
    builder = vllm.MetadataBuilder(None, ["layer"], None, torch.device("cpu"))
    given = {x: y for x, y in vars(expected).items() if x != "block_table"}
    common = vllm_interface.CommonAttentionMetadata(
        **given, num_reqs=2, query_start_loc_cpu=expected.query_start_loc,
        block_table_tensor=expected.block_table,
    )  # fmt: skip
    assert vars(builder.build(0, common)) == vars(expected)
    pages, slots = expected.block_table + 1, expected.slot_mapping + 1
    changed = builder.update_block_table(expected, pages, slots)
    assert changed.block_table is pages and changed.slot_mapping is slots
    assert changed.seq_lens is expected.seq_lens


OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 4},
    "alibi": {"alibi_slopes": [0.1, 0.2, 0.3, 0.4]},
    "softcap": {"logits_soft_cap": 2.0},
    "sinks": {"sinks": torch.tensor([0.1, 1.0, -1.0, 2.0])},
}


@pytest.mark.parametrize("layout", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
@pytest.mark.parametrize("name", OPTIONS)
def test_decoder(device, vllm, name, layout):
    query, cache, metadata = batch(vllm, device, layout)
    options = {
        x: y.to(device) if isinstance(y, torch.Tensor) else y for x, y in OPTIONS[name].items()
    }
    layer = make(vllm, **options)
    output = torch.full((5, HEADS * DIM), 7.0, device=device).bfloat16()
    got = layer.forward(None, query, None, None, cache, metadata, output)
    assert got is output and (output[4:] == 7).all()
    for b, rows in enumerate((slice(0, 3), slice(3, 4))):
        expected = expected_of(b, rows, query, cache, metadata, **options)
        torch.testing.assert_close(
            output[rows].view(-1, HEADS, DIM), expected, rtol=2e-2, atol=2e-2
        )


@pytest.mark.parametrize("name", ["plain", "window", "sinks"])
def test_requests_that_are_not_causal(device, vllm, name):
    """All of a batch, or some: int32 says which."""
    query, cache, metadata = batch(vllm, device)
    options = {
        x: y.to(device) if isinstance(y, torch.Tensor) else y for x, y in OPTIONS[name].items()
    }
    layer = make(vllm, **options)
    for causal in ([0, 0], [0, 1], [1, 0], False):
        given = causal
        if causal is not False:
            given = torch.tensor(causal, dtype=torch.int32, device=device)
        changed = dataclasses.replace(metadata, causal=given)
        output = torch.empty_like(query)
        layer.forward(None, query, None, None, cache, changed, output)
        for b, rows in enumerate((slice(0, 3), slice(3, 4))):
            is_causal = bool(causal and causal[b])
            expected = expected_of(b, rows, query, cache, metadata, is_causal, **options)
            torch.testing.assert_close(output[rows], expected, rtol=2e-2, atol=2e-2)


def test_pages_left_of_the_window_are_not_read(device, vllm):
    """vLLM replaces them by page 0, which may hold anything."""
    query, cache, metadata = batch(vllm, device)
    pages = torch.tensor([[0, 2, 5], [0, 4, 0]], dtype=torch.int32, device=device)
    metadata = dataclasses.replace(metadata, block_table=pages)
    layer = make(vllm, sliding_window=1)
    clean = layer.forward(None, query, None, None, cache, metadata, torch.zeros_like(query))
    cache[0] = torch.nan
    got = layer.forward(None, query, None, None, cache, metadata, torch.zeros_like(query))
    assert torch.equal(got, clean) and got[:4].isfinite().all()


def test_new_keys_are_written(vllm):
    _, cache, _ = batch(vllm, "cpu", (0, 2, 1, 3))
    before = cache.clone()
    key, value = torch.randn(2, 5, HEADS_K, DIM).bfloat16()
    slots = torch.tensor([26, 3, -1, 64])  # of four tokens: the fifth is padding
    make(vllm).do_kv_cache_update(None, key, value, cache, slots)
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            row = before[slot // PAGE, :, slot % PAGE]
            row[:, :DIM], row[:, DIM:] = key[i], value[i]
    assert torch.equal(cache, before)
    encoder = make(vllm, attn_type=AttentionType.ENCODER_ONLY)
    encoder.do_kv_cache_update(None, key + 1, value, cache, slots)
    assert torch.equal(cache, before)


@pytest.mark.filterwarnings("ignore:flash_cute. no kernel reads a cache")
@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
@pytest.mark.parametrize("causal", [True, [1, 0]], ids=["causal", "mixed"])
def test_caches_of_fp8(device, vllm, name, causal):
    """vLLM's bytes, and the scales of its layer: attention over the numbers that they stand for."""
    query, wide, metadata = batch(vllm, device)
    layer = SimpleNamespace(
        _k_scale=torch.full((), 0.02, device=device), _v_scale=torch.full((), 0.3, device=device)
    )
    scales = torch.cat([x.expand(DIM) for x in (layer._k_scale, layer._v_scale)])
    stored = (wide.float() / scales).to(torch.float8_e4m3fn)
    numbers = (stored.float() * scales).bfloat16()
    if causal is not True:
        given = torch.tensor(causal, dtype=torch.int32, device=device)
        metadata = dataclasses.replace(metadata, causal=given)
    output = torch.empty_like(query)
    make(vllm, kv_cache_dtype=name).forward(
        layer, query, None, None, stored.view(torch.uint8), metadata, output
    )
    for b, rows in enumerate((slice(0, 3), slice(3, 4))):
        is_causal = causal is True or bool(causal[b])
        expected = expected_of(b, rows, query, numbers, metadata, is_causal)
        torch.testing.assert_close(output[rows], expected, rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore:flash_cute. no kernel reads a cache")
@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("of_q", [(), (1,), (HEADS_K,)], ids=str)
@pytest.mark.parametrize("causal", [True, [1, 0]], ids=["causal", "mixed"])
def test_queries_of_fp8(device, vllm, causal, of_q, is_long):
    """vLLM's queries in e4m3 and their scale. For the bound of long ones, weights are rounded."""
    _, cache, metadata = batch(vllm, device)
    layer = SimpleNamespace(
        _q_scale=torch.full(of_q, 0.5, device=device), _k_scale=torch.full((), 0.02, device=device),
        _v_scale=torch.full((1,), 0.3, device=device),
    )  # fmt: skip
    scales = torch.cat([x.expand(DIM) for x in (layer._k_scale, layer._v_scale)])
    stored = (cache.float() / scales).to(torch.float8_e4m3fn)
    numbers = (stored.float() * scales).bfloat16()
    longest = 40 if is_long else 3  # 80 rows of queries a kv head, or 6
    query = torch.randn(longest + 2, HEADS, DIM, device=device).to(torch.float8_e4m3fn)
    changes = {
        "max_query_len": longest, "num_actual_tokens": longest + 1, "max_seq_len": 45,
        "seq_lens": torch.tensor([45, 17], dtype=torch.int32, device=device),
        "query_start_loc": torch.tensor([0, longest, longest + 1], dtype=torch.int32).to(device),
    }  # fmt: skip
    if causal is not True:
        changes["causal"] = torch.tensor(causal, dtype=torch.int32, device=device)
    metadata = dataclasses.replace(metadata, **changes)
    output = torch.full(query.shape, 7.0, dtype=torch.float16, device=device)
    make(vllm, kv_cache_dtype="fp8").forward(
        layer, query, None, None, stored.view(torch.uint8), metadata, output
    )
    assert (output[longest + 1 :] == 7).all()
    for b, rows in enumerate((slice(0, longest), slice(longest, longest + 1))):
        is_causal = causal is True or bool(causal[b])
        expected = expected_of(b, rows, query.bfloat16() / 2, numbers, metadata, is_causal)
        error = (output[rows].float() - expected.float()).norm() / expected.float().norm()
        assert error < (5e-2 if is_long else 1.5e-2)


def test_prompts_over_fp8_see_no_more_pages_than_the_longest_request(vllm, monkeypatch):
    """They take memory for as many keys as the table has room for."""
    _, cache, metadata = batch(vllm, "cpu")
    layer = SimpleNamespace(
        _q_scale=torch.ones(()), _k_scale=torch.ones(()), _v_scale=torch.ones(())
    )
    given = (torch.zeros(5, HEADS, DIM).to(torch.float8_e4m3fn), None, None,
             cache.to(torch.float8_e4m3fn).view(torch.uint8))  # fmt: skip
    columns = []
    attend = flash_cute.flash_attn_with_kvcache

    def recorded(*args, **named):
        columns.append(named["block_table"].shape[1])
        return attend(*args, **named)

    monkeypatch.setattr(vllm.flash_cute, "flash_attn_with_kvcache", recorded)
    for queries in (3, 1):  # of one query each: as a draft has, whose lengths grow on the device
        offsets = torch.tensor([0, queries, queries + 1], dtype=torch.int32)
        changed = dataclasses.replace(
            metadata, max_query_len=queries, query_start_loc=offsets, num_actual_tokens=queries + 1
        )
        output = torch.zeros(5, HEADS, DIM).bfloat16()
        make(vllm, kv_cache_dtype="fp8").forward(layer, *given, changed, output)
    assert columns == [2, 3]  # 29 tokens in pages of 16, and the table as it is


def test_vllm_rounds_queries_where_an_op_takes_them(vllm, monkeypatch):
    def asked(**options):
        return make(vllm, **options).supports_quant_query_input

    for has_kernels in (False, True):
        monkeypatch.setattr(vllm, "_has_fp8_kernels", lambda found=has_kernels: found)
        assert asked(kv_cache_dtype="fp8") is has_kernels
        assert not asked() and not asked(kv_cache_dtype="bfloat16")
        for options in ({"logits_soft_cap": 2.0}, {"alibi_slopes": [0.1] * 4},
                        {"attn_type": AttentionType.ENCODER}):  # fmt: skip
            assert not asked(kv_cache_dtype="fp8_e4m3", **options)


def test_new_keys_are_written_as_fp8(vllm):
    cache = torch.zeros(6, HEADS_K, PAGE, 2 * DIM, dtype=torch.uint8)
    key, value = torch.randn(2, 5, HEADS_K, DIM).bfloat16()
    layer = SimpleNamespace(_k_scale=torch.full((), 0.02), _v_scale=torch.full((), 0.001))
    slots = torch.tensor([26, 3, -1, 64])
    make(vllm, kv_cache_dtype="fp8").do_kv_cache_update(layer, key, value, cache, slots)
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            row = cache[slot // PAGE, :, slot % PAGE].view(torch.float8_e4m3fn).float()
            for got, x, scale in ((row[:, :DIM], key[i], 0.02), (row[:, DIM:], value[i], 0.001)):
                expected = (x.float() / torch.tensor(scale)).clamp(-448, 448)
                assert torch.equal(got, expected.to(torch.float8_e4m3fn).float())
    assert int((cache != 0).any(-1).any(1).sum()) == 3


@pytest.mark.parametrize("window", [None, 2])
def test_encoder(device, vllm, window):
    query, _, metadata = batch(vllm, device)
    key, value = torch.randn(2, 5, HEADS_K, DIM, device=device).bfloat16()
    layer = make(vllm, attn_type=AttentionType.ENCODER_ONLY, sliding_window=window)
    output = torch.zeros(5, HEADS, DIM, device=device).bfloat16()
    layer.forward(None, query, key, value, None, metadata, output)
    offsets, side = metadata.query_start_loc, -1 if window is None else window - 1
    expected = flash_cute.flash_attn_varlen_func(
        query[:4], key[:4], value[:4], offsets, offsets, 3, 3, softmax_scale=0.3,
        window_size=(side, side),
    )  # fmt: skip
    assert torch.equal(output[:4], expected)


def test_batch_invariance(vllm):
    query, cache, metadata = batch(vllm, "cpu")
    layer = make(vllm)
    both = layer.forward(None, query, None, None, cache, metadata, torch.empty_like(query))
    metadata = dataclasses.replace(
        metadata, num_actual_tokens=3, query_start_loc=metadata.query_start_loc[:2],
        seq_lens=metadata.seq_lens[:1], block_table=metadata.block_table[:1],
    )  # fmt: skip
    one = layer.forward(None, query, None, None, cache, metadata, torch.empty_like(query))
    assert torch.equal(one[:3], both[:3])


def test_refusals(vllm):
    query, cache, metadata = batch(vllm, "cpu")
    layer = make(vllm)
    output = torch.ones_like(query)
    assert (layer.forward(None, query, None, None, cache, None, output) == 0).all()
    with pytest.raises(NotImplementedError, match="output_scale"):
        layer.forward(None, query, None, None, cache, metadata, output, torch.ones(1))
    with pytest.raises(NotImplementedError, match="fp8_e5m2"):
        make(vllm, kv_cache_dtype="fp8_e5m2")
    layer.dcp_world_size = 2
    with pytest.raises(NotImplementedError, match="context parallelism"):
        layer.forward(None, query, None, None, cache, metadata, output)
