"""Names, options and refusals of sparse attention layers, and what calls of them cost."""

from __future__ import annotations

import inspect
import time
from typing import Any

import pytest
import torch

from flash_cute.attention import (
    AttentionConfig,
    DynamicSparseAttention,
    SparseAttentionConfig,
    SparsePattern,
    create_attention,
    create_sparse_attention,
)

D, HEADS = 64, 2


@pytest.fixture
def device() -> str:
    """On a GPU fp32 has no kernel over lists: tests/kernels/test_list_kernels.py has the layer."""
    return "cpu"


def test_names_and_defaults():
    parameters = inspect.signature(create_sparse_attention).parameters
    assert list(parameters)[:4] == ["d_model", "num_heads", "sparsity_ratio", "pattern"]
    assert parameters["sparsity_ratio"].default == 0.9
    assert parameters["pattern"].default is SparsePattern.DYNAMIC_THRESHOLD
    assert {x.name: x.value for x in SparsePattern} == {
        "RANDOM": "random", "BLOCK_SPARSE": "block_sparse", "STRIDED": "strided",
        "LOCAL_GLOBAL": "local_global", "DYNAMIC_THRESHOLD": "dynamic_threshold",
        "LEARNED": "learned",
    }  # fmt: skip
    layer = create_sparse_attention(512, 8, sparsity_ratio=0.9)
    assert type(layer) is DynamicSparseAttention and layer.last_sparsity is None
    assert "sparse_pattern=dynamic_threshold, causal=False, sparsity_ratio=0.9" in repr(layer)


def test_create_attention_makes_it_from_either_config():
    plain = create_attention(
        AttentionConfig(64, 4, "sparse", num_kv_heads=2, bias=False, dtype=torch.bfloat16)
    )
    assert type(plain) is DynamicSparseAttention
    assert plain.config == SparseAttentionConfig(
        64, 4, num_kv_heads=2, bias=False, dtype=torch.bfloat16
    )
    given = SparseAttentionConfig(64, 4, sparse_pattern="strided", causal=True, sparsity_ratio=0.5)
    made = create_attention(given)
    assert made.config is given and given.sparse_pattern is SparsePattern.STRIDED
    assert given.score()["causal"] and hash(given) == hash(SparseAttentionConfig(**vars(given)))
    with pytest.raises(TypeError, match="AttentionConfig; expected a SparseAttentionConfig"):
        DynamicSparseAttention(AttentionConfig(64, 4, "sparse"))


BLOCKS = torch.eye(4, dtype=torch.bool)
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "negative": ({"sparsity_ratio": -0.1}, ValueError, "sparsity_ratio is -0.1; expected 0 to"),
    "too_much": ({"sparsity_ratio": 0.96}, ValueError, "sparsity_ratio is 0.96"),
    "nan": ({"sparsity_ratio": float("nan")}, ValueError, "sparsity_ratio is nan"),
    "ratio_bool": ({"sparsity_ratio": True}, TypeError, "sparsity_ratio is bool"),
    "ratio_str": ({"sparsity_ratio": "0.9"}, TypeError, "sparsity_ratio is str"),
    "pattern": ({"pattern": "spiral"}, ValueError, "sparse_pattern is 'spiral'; supported: .*RAN"),
    "heads": ({"num_heads": 7}, ValueError, "d_model is 64 and num_heads 7"),
    "causal": ({"causal": 1}, TypeError, "causal is int"),
    "window": ({"window_size": (9, 0)}, NotImplementedError, r"window_size is \(9, 0\)"),
    "threshold": ({"threshold": 1.5}, ValueError, "threshold is 1.5; expected a share"),
    "threshold_0": ({"threshold": 0.0}, ValueError, "threshold is 0.0"),
    "threshold_str": ({"threshold": "x"}, TypeError, "threshold is str"),
    "threshold_static": (
        {"threshold": 0.9, "pattern": "strided"}, ValueError, "with sparse_pattern .*STRIDED; use",
    ),
    "both": ({"threshold": 0.9, "sparsity_ratio": 0.5}, ValueError, "give one of them"),
    "stride": ({"stride": 3}, ValueError, "stride is 3; supported: 1, 2, 4, 8"),
    "stride_of": ({"stride": 8, "pattern": "random"}, ValueError, "stride is 8 with .*RANDOM"),
    "seed": ({"seed": 1.0, "pattern": "random"}, TypeError, "seed is float"),
    "seed_of": ({"seed": 1}, ValueError, "seed is 1 with .*; only .*RANDOM takes it"),
    "mask_of": ({"block_mask": BLOCKS}, ValueError, "block_mask is given, and .*DYNAMIC"),
}  # fmt: skip
BAD_MASKS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "ratio": ({"block_mask": BLOCKS, "sparsity_ratio": 0.5}, ValueError, "leave the ratio out"),
    "size": ({"block_mask": BLOCKS, "block_size": 32}, ValueError, "block_size is 32"),
    "dtype": ({"block_mask": BLOCKS.int()}, TypeError, "block_mask is torch.int32"),
    "list": ({"block_mask": [[True]]}, TypeError, "block_mask is list"),
    "shape": ({"block_mask": BLOCKS[:3]}, ValueError, r"block_mask has shape \(3, 4\)"),
    "heads": ({"block_mask": BLOCKS.expand(3, 4, 4)}, ValueError, "has 3 heads; expected 1, 2"),
    "empty": ({"block_mask": BLOCKS.roll(1, 0), "causal": True}, ValueError, "without a visible"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options(name):
    fields, error, said = BAD[name]
    with pytest.raises(error, match=said) as raised:
        create_sparse_attention(**({"d_model": 64, "num_heads": 2} | fields))
    assert type(raised.value) is error


@pytest.mark.parametrize("name", BAD_MASKS)
def test_bad_maps(name):
    fields, error, said = BAD_MASKS[name]
    with pytest.raises(error, match=said) as raised:
        create_sparse_attention(64, 2, pattern="block_sparse", **fields)
    assert type(raised.value) is error


def test_bad_calls():
    layer = create_sparse_attention(D, HEADS)
    x = torch.randn(1, 300, D)
    for given in ({"key": x}, {"value": x}):
        with pytest.raises(NotImplementedError, match=r"key or value is given: .*AttentionLayer"):
            layer(x, **given)
    with pytest.raises(ValueError, match=r"hidden_states has shape \(300, 64\)"):
        layer(x[0])
    with pytest.raises(TypeError, match="hidden_states is list"):
        layer([x])
    with pytest.raises(ValueError, match=r"attention_mask has shape \(1, 299\)"):
        layer(x, torch.ones(1, 299, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"attention_mask has dtype torch.complex64"):
        layer(x, torch.ones(1, 300, dtype=torch.complex64))
    mapped = create_sparse_attention(D, HEADS, pattern="block_sparse", block_mask=BLOCKS)
    with pytest.raises(ValueError, match=r"4 blocks of 128 for 1 sequences; .* 300 tokens in 1"):
        mapped(x)


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("shape", [(5, 5), (2, 5, 5), (3, 2, 5, 5)])
def test_a_given_map_is_what_is_kept(device, shape, size):
    kept = (torch.rand(shape) < 0.5) | torch.eye(5, dtype=torch.bool)
    layer = create_sparse_attention(
        D, HEADS, pattern=SparsePattern.BLOCK_SPARSE, block_mask=kept, block_size=size,
        device=device,
    )  # fmt: skip
    seqlen = 4 * size + 7
    x = torch.randn(3, seqlen, D, device=device, requires_grad=True)
    layer(x)
    whole = kept.expand(3, 2, 5, 5).repeat_interleave(size, -1).repeat_interleave(size, -2)
    assert layer.last_sparsity == pytest.approx(
        1 - whole[..., :seqlen, :seqlen].float().mean().item(), abs=1e-6
    )
    for row in range(5):
        at = min(row * size + 3, seqlen - 1)
        (grad,) = torch.autograd.grad(layer(x)[0, at].sum(), x)
        seen = grad[0].abs().sum(-1).cpu() > 0
        expected = kept.expand(3, 2, 5, 5)[0].any(0)[row].repeat_interleave(size)[:seqlen]
        assert torch.equal(seen | (torch.arange(seqlen) == at), expected)
    assert "block_mask" not in layer.state_dict()
    assert layer.explain(seqlen).endswith(f"blocks of {size} x {size} that block_mask keeps")


def test_runs_dense_where_nothing_is_won_and_says_so():
    layer = create_sparse_attention(D, HEADS, 0.05)
    dense = create_sparse_attention(D, HEADS, 0.0)
    dense.load_state_dict(layer.state_dict())
    x = torch.randn(1, 2048, D)
    assert torch.equal(layer(x), dense(x)) and layer.last_sparsity == dense.last_sparsity == 0.0
    assert "runs dense (dense below a sparsity of 0.06)" in layer.explain(2048)
    assert "asked 0.0; runs dense" in dense.explain(100_000)
    layer = create_sparse_attention(D, HEADS, 0.9)
    layer(x[:, :1])
    assert layer.last_sparsity == 0.0 and "runs dense" in layer.explain(1)
    for seqlen in (16, 129):
        layer(x[:, :seqlen])
        assert layer.last_sparsity is not None and abs(layer.last_sparsity - 0.9) <= 0.06
    said = layer.explain(2048, is_causal=True)
    assert said.startswith("dynamic_threshold, 2048 tokens, causal, 32 blocks of 64 a side")
    assert "leaves out 0.900 of the visible pairs, asked 0.9; runs sparse" in said
    assert "4096 tokens, 32 blocks of 128" in layer.explain(4096)


@pytest.mark.parametrize("pattern", ["dynamic_threshold", "learned"])
def test_a_threshold_bounds_the_loss(pattern):
    """Of attention to few tokens it keeps little, of attention to all nearly everything."""
    spread = create_sparse_attention(D, 1, pattern=pattern, threshold=0.95)
    assert "keeps the fewest that hold 0.95" in spread.explain(2000)
    x = torch.randn(1, 2000, D)
    with torch.no_grad():
        spread.in_proj_weight[: 2 * D] *= 0.1
    spread(x)
    assert spread.last_sparsity is not None and spread.last_sparsity < 0.15
    with torch.no_grad():
        spread.in_proj_weight[: 2 * D] = torch.eye(D).repeat(2, 1) * 10
    blocks = torch.nn.functional.one_hot(torch.arange(2000) // 64, D).float()
    spread(blocks[None])
    assert spread.last_sparsity > 0.85


@pytest.mark.parametrize("pattern", SparsePattern)
@pytest.mark.parametrize("masked", [False, True])
def test_compiled(device, pattern, masked):
    layer = create_sparse_attention(D, HEADS, 0.7, pattern, device=device)
    x = torch.randn(2, 300, D, device=device, requires_grad=True)
    args = (x, torch.rand(2, 300, device=device) < 0.8)[: 1 + masked]
    expected = layer(*args)
    (grad,) = torch.autograd.grad(expected.square().sum(), x)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out = compiled(*args)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), x)[0], grad)
    assert layer.last_sparsity is not None and layer.last_sparsity > 0.4


@pytest.mark.parametrize("pattern", SparsePattern)
def test_exported(device, pattern):
    layer = create_sparse_attention(D, HEADS, 0.7, pattern, device=device)
    x = torch.randn(1, 300, D, device=device)
    expected = layer(x)
    torch.testing.assert_close(torch.export.export(layer, (x,)).module()(x), expected)


@pytest.mark.parametrize("pattern", SparsePattern)
def test_meta_and_autocast(device, pattern):
    layer = create_sparse_attention(D, HEADS, 0.9, pattern, device="meta")
    x = torch.empty(2, 20_000, D, device="meta")
    mask = torch.empty(2, 20_000, device="meta", dtype=torch.bool)
    assert layer(x).shape == layer(x, mask).shape == x.shape
    layer = create_sparse_attention(D, HEADS, 0.7, pattern, device=device)
    x = torch.randn(1, 500, D, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def products(layer: DynamicSparseAttention, x: torch.Tensor) -> int:
    """Operations of the matrix products that a call runs, but those of the two projections."""
    with torch.profiler.profile(record_shapes=True) as profile, torch.no_grad():
        layer(x)
    found = 0
    for event in profile.events():
        shapes = [shape for shape in event.input_shapes if shape]
        if event.name in ("aten::bmm", "aten::baddbmm_", "aten::baddbmm"):
            (batch, rows, inner), (_, _, columns) = shapes[-2:] if "add" in event.name else shapes
            found += 2 * batch * rows * inner * columns
        assert event.name != "aten::_scaled_dot_product_flash_attention_for_cpu"
    return found


def test_products_follow_the_ratio():
    x = torch.randn(1, 4096, D)
    dense = 4 * 4096**2 * D
    for pattern in SparsePattern:
        sparse = products(create_sparse_attention(D, HEADS, 0.9, pattern), x)
        assert 0.05 * dense < sparse < 0.35 * dense, pattern


def test_less_time_than_dense():
    x = torch.randn(1, 4096, 512)
    times = {}
    for ratio in (0.0, 0.9):
        layer = create_sparse_attention(512, 8, ratio)
        with torch.no_grad():
            layer(x)
            measured = []
            for _ in range(5):
                start = time.perf_counter()
                layer(x)
                measured.append(time.perf_counter() - start)
        times[ratio] = min(measured)
    assert times[0.9] < 0.7 * times[0.0], times


def test_scores_are_not_stored():
    layer = create_sparse_attention(D, HEADS)
    x = torch.randn(1, 4096, D, requires_grad=True)
    with torch.profiler.profile(profile_memory=True) as profile:
        layer(x).sum().backward()
    events = profile.profiler.kineto_results.events()
    assert max(event.nbytes() for event in events) < 4096**2 * 4 / 3


@pytest.mark.parametrize(("given", "error"), [
    (("a",), TypeError), ((1.5,), TypeError), ((True,), TypeError), ((10, 3), TypeError),
    ((-1,), ValueError), ((0,), ValueError),
])  # fmt: skip
def test_explain_wants_a_number_of_tokens(given, error):
    with pytest.raises(error, match="seqlen is"):
        create_sparse_attention(64, 4).explain(*given)
