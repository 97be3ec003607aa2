"""The backend for vLLM, against vLLM's interface without its kernels."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
import vllm_interface
from vllm_interface import AttentionType, FlashAttentionMetadata

import flash_cute

HEADS, HEADS_K, DIM, PAGE = 4, 2, 16, 4


@pytest.fixture
def vllm():
    before = {x: m for x, m in sys.modules.items() if x.split(".")[0] == "vllm"}
    registered = vllm_interface.installed()
    module = importlib.import_module("flash_cute.integrations.vllm")
    module.registered = registered
    yield module
    for name in [x for x in sys.modules if x.split(".")[0] == "vllm"]:
        del sys.modules[name]
    del sys.modules["flash_cute.integrations.vllm"]
    sys.modules.update(before)


def make(vllm, **options):
    given = {
        "alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto",
    } | options  # fmt: skip
    return vllm.Implementation(HEADS, DIM, 0.3, HEADS_K, **given)


def batch(device):
    """Two sequences of 9 and 5 keys, with 3 and 1 queries; one more query is padding."""
    query = torch.randn(5, HEADS, DIM, device=device).bfloat16()
    cache = torch.randn(2, 6, PAGE, HEADS_K, DIM, device=device).bfloat16()
    metadata = FlashAttentionMetadata(
        num_actual_tokens=4,
        max_query_len=3,
        query_start_loc=torch.tensor([0, 3, 4], dtype=torch.int32, device=device),
        max_seq_len=9,
        seq_lens=torch.tensor([9, 5], dtype=torch.int32, device=device),
        block_table=torch.tensor([[3, 0, 5], [1, 4, 0]], dtype=torch.int32, device=device),
    )
    return query, cache, metadata


def test_registration(vllm):
    vllm.register()
    (path,) = vllm.registered.values()
    assert path == "flash_cute.integrations.vllm.Backend"
    backend = vllm.Backend
    assert backend.get_name() == "CUSTOM"
    assert backend.get_impl_cls() is vllm.Implementation
    builder = backend.get_builder_cls()(None, None, None, None)
    assert not builder.aot_schedule and not builder.use_cascade_attention(1)
    assert builder._cudagraph_support is vllm_interface.AttentionCGSupport.ALWAYS
    assert backend.supports_sink()
    assert backend.supports_batch_invariance() is False  # nobody has shown it of every kernel
    assert backend.supports_head_size(64) and not backend.supports_head_size(512)
    assert backend.supports_kv_cache_dtype("auto")
    assert not backend.supports_kv_cache_dtype("fp8_e4m3")


OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 4},
    "alibi": {"alibi_slopes": [0.1, 0.2, 0.3, 0.4]},
    "softcap": {"logits_soft_cap": 2.0},
    "sinks": {"sinks": torch.tensor([0.1, 1.0, -1.0, 2.0])},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_decoder(device, vllm, name):
    query, cache, metadata = batch(device)
    options = {
        x: y.to(device) if isinstance(y, torch.Tensor) else y for x, y in OPTIONS[name].items()
    }
    layer = make(vllm, **options)
    output = torch.full((5, HEADS * DIM), 7.0, device=device).bfloat16()
    got = layer.forward(None, query, None, None, cache, metadata, output)
    assert got is output and (output[4:] == 7).all()
    window = options.get("sliding_window")
    slopes = options.get("alibi_slopes")
    for b, (rows, length) in enumerate(((slice(0, 3), 9), (slice(3, 4), 5))):
        k, v = (x[metadata.block_table[b].long()].flatten(0, 1)[:length] for x in cache)
        expected = flash_cute.flash_attn_func(
            query[None, rows], k[None], v[None], 0.0, 0.3, True,
            (-1, -1) if window is None else (window - 1, 0), options.get("logits_soft_cap", 0.0),
            None if slopes is None else torch.tensor(slopes, device=device),
            sink=options.get("sinks"),
        )  # fmt: skip
        torch.testing.assert_close(
            output[rows].view(-1, HEADS, DIM), expected[0], rtol=2e-2, atol=2e-2
        )


def test_encoder(device, vllm):
    query, _, metadata = batch(device)
    key, value = torch.randn(2, 5, HEADS_K, DIM, device=device).bfloat16()
    layer = make(vllm, attn_type=AttentionType.ENCODER_ONLY)
    output = torch.zeros(5, HEADS, DIM, device=device).bfloat16()
    layer.forward(None, query, key, value, None, metadata, output)
    offsets = metadata.query_start_loc
    expected = flash_cute.flash_attn_varlen_func(
        query[:4], key[:4], value[:4], offsets, offsets, 3, 3, softmax_scale=0.3
    )
    assert torch.equal(output[:4], expected)


def test_batch_invariance(vllm):
    query, cache, metadata = batch("cpu")
    layer = make(vllm)
    layer.batch_invariant_enabled = True
    both = layer.forward(None, query, None, None, cache, metadata, torch.empty_like(query))
    metadata.num_actual_tokens, metadata.query_start_loc = 3, metadata.query_start_loc[:2]
    metadata.seq_lens, metadata.block_table = metadata.seq_lens[:1], metadata.block_table[:1]
    one = layer.forward(None, query, None, None, cache, metadata, torch.empty_like(query))
    assert torch.equal(one[:3], both[:3])


def test_refusals(vllm):
    query, cache, metadata = batch("cpu")
    layer = make(vllm)
    output = torch.ones_like(query)
    assert (layer.forward(None, query, None, None, cache, None, output) == 0).all()
    with pytest.raises(NotImplementedError, match="output_scale"):
        layer.forward(None, query, None, None, cache, metadata, output, torch.ones(1))
    with pytest.raises(NotImplementedError, match="fp8"):
        make(vllm, kv_cache_dtype="fp8_e4m3")
    layer.dcp_world_size = 2
    with pytest.raises(NotImplementedError, match="context parallelism"):
        layer.forward(None, query, None, None, cache, metadata, output)
