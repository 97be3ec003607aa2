"""Names, defaults and refusals of flash_cute.attention."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
from typing import Any

import fresh
import pytest
import torch
from torch import nn

from flash_cute import kernels
from flash_cute.attention import (
    AttentionConfig,
    AttentionPatterns,
    ContextParallelAttention,
    FlashAttention3,
    FP8Attention,
    FP8AttentionConfig,
    RingAttentionLayer,
    create_attention,
)
from flash_cute.native import library

CONFIGS = [AttentionConfig, FP8AttentionConfig]


@pytest.mark.parametrize("kind", CONFIGS)
def test_fields_and_defaults(kind):
    config = kind(512, 8)
    expected = {
        "d_model": 512, "num_heads": 8, "pattern": AttentionPatterns.FULL, "num_kv_heads": None,
        "dropout": 0.0, "bias": True, "window_size": (-1, -1), "softmax_scale": None,
        "softcap": 0.0, "deterministic": False, "device": None, "dtype": None,
        "context_parallel_size": 1, "max_sequence_length": 1_000_000,
    }  # fmt: skip
    if kind is FP8AttentionConfig:
        expected |= {"format": "e4m3", "scaling": "tensor"}
    assert dataclasses.asdict(config) == expected
    assert config.head_dim == 64
    assert kind(embed_dim=512, num_heads=8) == config == kind(512, 8, embed_dim=512)
    assert config == pickle.loads(pickle.dumps(config)) == copy.deepcopy(config)
    assert len({config, kind(512, 8)}) == 1
    causal = dataclasses.replace(config, pattern="causal", d_model=256)
    assert causal.pattern is AttentionPatterns.CAUSAL and causal.head_dim == 32
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.d_model = 3


def test_patterns():
    assert {x.name: x.value for x in AttentionPatterns} == {
        "FULL": "full", "CAUSAL": "causal", "RING": "ring", "CONTEXT_PARALLEL": "context_parallel",
        "SPARSE": "sparse",
    }  # fmt: skip


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no_width": ({"d_model": 0}, ValueError, "d_model is 0"),
    "heads": ({"num_heads": 7}, ValueError, "d_model is 64 and num_heads 7"),
    "no_heads": ({"num_heads": -1}, ValueError, "num_heads is -1"),
    "float": ({"d_model": 64.0}, TypeError, "d_model is float"),
    "groups": ({"num_kv_heads": 3}, ValueError, "num_heads is 4 and num_kv_heads 3"),
    "names": ({"embed_dim": 32}, ValueError, "d_model is 64 and embed_dim 32"),
    "pattern": ({"pattern": "spiral"}, ValueError, "pattern is 'spiral'; supported: .*CAUSAL"),
    "dropout": ({"dropout": 1.5}, ValueError, "dropout is 1.5"),
    "dropout_str": ({"dropout": "x"}, TypeError, "dropout is str"),
    "bias": ({"bias": 3}, TypeError, "bias is int"),
    "window": ({"window_size": (-2, 0)}, ValueError, r"window_size is \(-2, 0\)"),
    "window_int": ({"window_size": 4}, TypeError, "window_size is int"),
    "scale": ({"softmax_scale": float("nan")}, ValueError, "softmax_scale"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap is -1"),
    "deterministic": ({"deterministic": "no"}, TypeError, "deterministic is str"),
    "size": ({"context_parallel_size": 0}, ValueError, "context_parallel_size is 0"),
    "longest": ({"max_sequence_length": 1e6}, TypeError, "max_sequence_length is float"),
    "dtype": ({"dtype": torch.int32}, TypeError, "dtype is torch.int32; supported: None, .*float"),
}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("name", BAD)
def test_bad_fields(kind, name):
    fields, error, said = BAD[name]
    with pytest.raises(error, match=said) as raised:
        kind(**({"d_model": 64, "num_heads": 4} | fields))
    assert type(raised.value) is error


def test_bad_fp8_fields():
    with pytest.raises(ValueError, match="format is 'e3m4'; supported: e4m3, e5m2"):
        FP8AttentionConfig(64, 4, format="e3m4")
    with pytest.raises(ValueError, match="scaling is 'row'; supported: tensor, head"):
        FP8AttentionConfig(64, 4, scaling="row")


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [(FP8AttentionConfig, pattern) for pattern in ("RING", "CONTEXT_PARALLEL", "SPARSE")],
)
def test_patterns_without_a_system_are_refused_by_name(kind, pattern):
    config = kind(64, 4, AttentionPatterns[pattern])
    with pytest.raises(
        NotImplementedError, match=f"AttentionPatterns.{pattern}.*supported: .*FULL"
    ):
        create_attention(config)


def test_patterns_of_several_devices():
    ring = create_attention(AttentionConfig(64, 4, "ring", max_sequence_length=100))
    assert type(ring) is RingAttentionLayer and ring.max_sequence_length == 100
    shared = create_attention(AttentionConfig(64, 4, "context_parallel", context_parallel_size=3))
    assert type(shared) is ContextParallelAttention and len(shared.device_mesh) == 3
    with pytest.raises(ValueError, match=r"pattern is .*FULL; expected .*RING"):
        RingAttentionLayer(AttentionConfig(64, 4))


def test_create_attention_makes_what_the_config_says():
    assert type(create_attention(AttentionConfig(64, 4))) is FlashAttention3
    assert type(create_attention(FP8AttentionConfig(64, 4))) is FP8Attention
    layer = create_attention(
        AttentionConfig(64, 4, num_kv_heads=2, bias=False, dtype=torch.bfloat16, device="meta")
    )
    shapes = {name: tuple(x.shape) for name, x in layer.state_dict().items()}
    assert shapes == {"in_proj_weight": (128, 64), "out_proj.weight": (64, 64)}
    assert {(x.dtype, x.device.type) for x in layer.parameters()} == {(torch.bfloat16, "meta")}
    for given in (512, {"d_model": 512}, None):
        with pytest.raises(TypeError, match=f"config is {type(given).__name__}"):
            create_attention(given)
    with pytest.raises(
        TypeError, match="config is AttentionConfig; expected an FP8AttentionConfig"
    ):
        FP8Attention(AttentionConfig(64, 4))


def test_flash_attention_3_takes_a_config_or_sizes():
    config = AttentionConfig(64, 4, "causal", num_kv_heads=2)
    made = [
        FlashAttention3(config),
        FlashAttention3(config=config),
        FlashAttention3(64, 4, pattern="causal", num_kv_heads=2),
        FlashAttention3(d_model=64, num_heads=4, pattern="causal", num_kv_heads=2),
        FlashAttention3(embed_dim=64, num_heads=4, pattern="causal", num_kv_heads=2),
    ]
    assert {layer.config for layer in made} == {config}
    assert all(isinstance(layer, nn.Module) for layer in made)
    with pytest.raises(TypeError, match="a config holds all fields"):
        FlashAttention3(config, 4)
    with pytest.raises(ValueError, match="d_model is 65 and num_heads 4"):
        FlashAttention3(65, 4)


def test_says_which_kernels_it_takes(monkeypatch):
    layer = FlashAttention3(64, 4, dtype=torch.bfloat16)
    assert layer.kernels() == layer.kernels("cpu") == "ATen's on the CPU"
    assert 'kernels="ATen\'s on the CPU"' in repr(layer) and "pattern=full" in repr(layer)
    assert layer.kernels("meta") == "none on meta"
    module = sys.modules[FlashAttention3.__module__]
    monkeypatch.setattr(module, "has_cuda_kernels", lambda: False)
    assert layer.kernels("cuda").startswith("none on CUDA")
    monkeypatch.setattr(module, "has_cuda_kernels", lambda: True)
    h100 = kernels.GPUS["h100"]
    for capability, expected in ((90, "Hopper's own"), (80, "Ampere's"), (100, "Amp")):
        gpu = dataclasses.replace(h100, capability=capability)
        monkeypatch.setattr(module, "supports", lambda call, _, x=gpu: kernels.supports(call, x))
        assert layer.kernels("cuda").startswith(expected)
        assert layer.kernels("cuda", torch.float32).startswith("Ampere's")
        assert layer.kernels("cuda", torch.float64).startswith("none")


def test_kernels_are_those_that_run(cuda):
    layer = FlashAttention3(64, 4, dtype=torch.bfloat16, device=cuda)
    x = torch.randn(1, 64, 64, dtype=torch.bfloat16, device=cuda)
    arch = "sm90" if layer.kernels().startswith("Hopper") else "sm80"
    with torch.no_grad():
        expected = layer(x)
        with library.only(f"fwd_{arch}_"):
            assert torch.equal(layer(x), expected)


NOT_LOADED = """
import sys
import flash_cute
loaded = [x for x in sys.modules if x.startswith(("flash_cute.attention", "flash_cute.core"))]
assert not loaded, loaded
before = set(sys.modules)
import flash_cute.attention, flash_cute.core
new = {name.split(".")[0] for name in set(sys.modules) - before}
assert "torch._dynamo" not in sys.modules and "triton" not in sys.modules
assert flash_cute.attention.__all__ and flash_cute.core.__all__
for module in (flash_cute.attention, flash_cute.core):
    assert all(hasattr(module, name) for name in module.__all__)
"""


def test_lazy_import():
    result = fresh.run(NOT_LOADED)
    assert result.returncode == 0, result.stderr
