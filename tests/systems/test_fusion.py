"""Fused encoder layers compute what torch's do: outputs, gradients, masks, every strategy."""

from __future__ import annotations

import copy
import gc
import re
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import fresh
import pytest
import torch
from fusion_models import (
    BATCH,
    HEADS,
    LAYERS,
    SEQLEN,
    WIDTH,
    assert_same,
    encoder_layer,
    tokens,
)
from torch import nn

import flash_cute.attention
from flash_cute.attention import fusion
from flash_cute.attention.fusion import (
    FusionConfig,
    FusionStrategy,
    OptimizationLevel,
    UnifiedAttentionFusion,
    benchmark_fusion_performance,
    create_unified_attention_fusion,
)
from flash_cute.attention.fusion import attention as attention_step
from flash_cute.attention.fusion import masks as fusion_masks


def test_both_packages_export_the_same_function():
    assert flash_cute.attention.create_unified_attention_fusion is create_unified_attention_fusion


def test_flash_cute_does_not_import_attention():
    code = "import sys, flash_cute; assert 'flash_cute.attention' not in sys.modules"
    assert fresh.run(code).returncode == 0


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers(kind, mode, device):
    layer = encoder_layer(device, **LAYERS[kind]).train(mode == "train")
    fused = create_unified_attention_fusion(layer)
    assert fused.training == fused.model.norm1.training == (mode == "train")
    assert_same(layer, fused, tokens(layer, device))


@contextmanager
def names_of_called(model: nn.Module):
    """Gives a set that gets the names of the submodules whose forward runs inside. Hooks would
    change which are called."""
    called: set[str] = set()
    with ExitStack() as stack:
        for name in ("self_attn", "linear1", "norm2"):
            module = model.get_submodule(name)

            own = type(module).forward

            def noted(self, *args, wanted=module, name=name, own=own, **named):
                called.update({name} if self is wanted else ())
                return own(self, *args, **named)

            stack.enter_context(mock.patch.object(type(module), "forward", noted))
        yield called


@pytest.mark.parametrize("level", OptimizationLevel)
@pytest.mark.parametrize("strategy", FusionStrategy)
def test_strategies_fuse_what_their_name_says(strategy, level, device):
    """A submodule is called if, and only if, its step is not fused."""
    for kind in ("as_documented", "norm_first_batch_first"):
        layer = encoder_layer(device, **LAYERS[kind])
        fused = create_unified_attention_fusion(layer, strategy, level)
        with names_of_called(fused.model) as called:
            assert_same(layer, fused, tokens(layer, device))
        fused_parts = {
            FusionStrategy.FULL_BLOCK: {"self_attn", "linear1", "norm2"},
            FusionStrategy.ATTENTION_ONLY: {"self_attn"},
            FusionStrategy.FFN_ONLY: {"linear1"},
            FusionStrategy.NORM_ONLY: {"norm2"},
        }[strategy]
        assert called == {"self_attn", "linear1", "norm2"} - fused_parts
        assert list(fused.report) == [""] and fused.report[""].startswith("fused: ")


@pytest.mark.parametrize("level", OptimizationLevel)
def test_levels_choose_kernels(level):
    """From BALANCED on, steps other than attention run fused autograd functions (AddNorm)."""
    layer = encoder_layer()
    fused = create_unified_attention_fusion(layer, optimization_level=level)
    out = fused(tokens(layer))
    assert ("AddNorm" in out.grad_fn.name()) == (level is not OptimizationLevel.CONSERVATIVE)


def masks(batch_first: bool, device: str) -> dict[str, dict]:
    """Calls' keyword arguments with masks, by the name of the case."""
    torch.manual_seed(5)
    later = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).triu(1)
    general = torch.rand(SEQLEN, SEQLEN) < 0.3
    general.fill_diagonal_(False)
    padding = torch.tensor([[i >= n for i in range(SEQLEN)] for n in (SEQLEN, 4, 1)])
    holes = torch.rand(BATCH, SEQLEN) < 0.4
    holes[:, 2] = False
    as_float = nn.Transformer.generate_square_subsequent_mask(SEQLEN)
    found = {
        "causal_float": {"src_mask": as_float},
        "causal_bool": {"src_mask": later},
        "causal_hint": {"src_mask": as_float, "is_causal": True},
        "bool": {"src_mask": general},
        "float": {"src_mask": torch.randn(SEQLEN, SEQLEN)},
        "of_heads": {"src_mask": torch.randn(BATCH * HEADS, SEQLEN, SEQLEN)},
        "padding": {"src_key_padding_mask": padding},
        "holes": {"src_key_padding_mask": holes},
        "float_padding": {"src_key_padding_mask": torch.randn(BATCH, SEQLEN)},
        "causal_padding": {"src_mask": later, "src_key_padding_mask": padding},
        "bool_holes": {"src_mask": general & ~holes.any(0), "src_key_padding_mask": holes},
    }
    return {
        name: {k: v.to(device) if torch.is_tensor(v) else v for k, v in arguments.items()}
        for name, arguments in found.items()
    }


@pytest.mark.parametrize("name", masks(False, "cpu"))
@pytest.mark.parametrize("strategy", [FusionStrategy.FULL_BLOCK, FusionStrategy.FFN_ONLY])
def test_masks(name, strategy, device):
    for kind in ("as_documented", "norm_first_batch_first"):
        layer = encoder_layer(device, **LAYERS[kind])
        fused = create_unified_attention_fusion(layer, strategy)
        arguments = masks(layer.self_attn.batch_first, device)[name]
        assert_same(layer, fused, tokens(layer, device), **arguments)


@pytest.mark.parametrize("name", ["causal_float", "causal_bool", "causal_hint", "padding", "holes"])
def test_masks_that_kernels_support(name, monkeypatch):
    """Calls with these masks do not go to torch's SDPA; calls with other masks do."""

    def refuse(*_):
        raise AssertionError("SDPA was called")

    monkeypatch.setattr(attention_step, "_sdpa", refuse)
    layer = encoder_layer()
    fused = create_unified_attention_fusion(layer)
    fused(tokens(layer), **masks(False, "cpu")[name])
    with pytest.raises(AssertionError, match="SDPA was called"):
        fused(tokens(layer), **masks(False, "cpu")["float"])


@pytest.mark.parametrize("name", masks(False, "cpu"))
def test_sdpa_runs_all_calls_that_no_kernel_supports(name, monkeypatch):
    """With masks and without. As for head dims that no kernel has."""
    monkeypatch.setattr(attention_step, "kernels_support", lambda _: False)
    layer = encoder_layer()
    fused = create_unified_attention_fusion(layer)
    assert_same(layer, fused, tokens(layer))
    assert_same(layer, fused, tokens(layer), **masks(False, "cpu")[name])


class OnGPU(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


def test_masks_on_gpus_are_read_once_until_they_change(monkeypatch):
    reads = mock.Mock(side_effect=fusion_masks._equals_causal)
    monkeypatch.setattr(fusion_masks, "_equals_causal", reads)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    known = len(fusion_masks._known)
    mask, other = (torch.ones(5, 5, dtype=torch.bool).triu(1).as_subclass(OnGPU) for _ in range(2))
    assert [fusion_masks.is_causal_mask(mask) for _ in range(3)] == [True] * 3
    assert reads.call_count == 1
    assert fusion_masks.is_causal_mask(other) and reads.call_count == 2
    mask[0, 0] = True
    assert [fusion_masks.is_causal_mask(mask) for _ in range(2)] == [False] * 2
    assert reads.call_count == 3 and len(fusion_masks._known) == known + 2
    reads.reset_mock()
    del mask, other
    gc.collect()
    assert len(fusion_masks._known) == known


def test_a_mask_that_changes_is_read_again():
    layer = encoder_layer()
    fused = create_unified_attention_fusion(layer)
    mask = nn.Transformer.generate_square_subsequent_mask(SEQLEN)
    assert_same(layer, fused, tokens(layer), mask)
    mask[0, 3] = 0.5
    assert_same(layer, fused, tokens(layer), mask)


def test_is_causal_alone_is_the_causal_mask():
    layer = encoder_layer()
    fused = create_unified_attention_fusion(layer)
    mask = nn.Transformer.generate_square_subsequent_mask(SEQLEN)
    wanted = layer(tokens(layer), mask)
    torch.testing.assert_close(fused(tokens(layer), is_causal=True), wanted, rtol=1e-4, atol=1e-4)


def test_padding_never_leaks(device):
    """Not even NaN: what stands in padded tokens is not read by the others."""
    layer = encoder_layer(device, batch_first=True)
    fused = create_unified_attention_fusion(layer)
    hidden = masks(True, device)["holes"]["src_key_padding_mask"]
    x = tokens(layer, device)
    clean, dirty = x.masked_fill(hidden[..., None], 0), x.masked_fill(hidden[..., None], torch.nan)
    outs = [fused(y, src_key_padding_mask=hidden)[~hidden] for y in (clean, dirty)]
    assert torch.equal(*outs) and bool(outs[0].isfinite().all())


def test_unbatched_and_empty_rows(device):
    layer = encoder_layer(device)
    fused = create_unified_attention_fusion(layer)
    assert_same(layer, fused, tokens(layer, device)[:, 0])
    hidden = torch.zeros(SEQLEN, dtype=torch.bool, device=device)
    hidden[4:] = True
    assert_same(layer, fused, tokens(layer, device)[:, 0], src_key_padding_mask=hidden)


@pytest.mark.parametrize("kind", ["as_documented", "norm_first_batch_first"])
@pytest.mark.parametrize("name", ["none", "causal_float", "holes", "float", "causal_padding"])
def test_whole_encoder(kind, name, device):
    layer = encoder_layer(device, **LAYERS[kind])
    norm = nn.LayerNorm(WIDTH).to(device)
    encoder = nn.TransformerEncoder(layer, 3, norm, enable_nested_tensor=False)
    fused = create_unified_attention_fusion(encoder)
    arguments = dict(masks(True, device).get(name, {}))
    if "src_mask" in arguments:
        arguments["mask"] = arguments.pop("src_mask")
    assert_same(encoder, fused, tokens(layer, device), **arguments)


def test_blocks_inside_of_a_model(device):
    """They are replaced, and nothing else; the report names them."""
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        encoder_layer(batch_first=True),
        nn.ModuleDict({"a": nn.Linear(WIDTH, 3)})["a"],
    ).to(device)
    fused = create_unified_attention_fusion(model)
    assert fused.report == {"1": "fused: attention, ffn, norm"}
    assert type(model[1]) is nn.TransformerEncoderLayer
    assert_same(model, fused, torch.randn(BATCH, SEQLEN, WIDTH, device=device))


# --- the original --------------------------------------------------------------------------------


def test_parameters_are_the_originals():
    layer = encoder_layer(dropout=0.1)
    before = copy.deepcopy(layer)
    fused = create_unified_attention_fusion(layer)
    assert [id(p) for p in fused.parameters()] == [id(p) for p in layer.parameters()]
    assert list(fused.state_dict()) == list(layer.state_dict())
    fused.eval()
    assert layer.training and layer.self_attn.training and layer.dropout1.training
    for name, value in before.state_dict().items():
        assert torch.equal(layer.state_dict()[name], value)
    other = encoder_layer()
    nn.init.ones_(other.linear1.weight)
    fused.load_state_dict(other.state_dict())
    assert torch.equal(layer.linear1.weight, other.linear1.weight)
    outer = nn.Sequential(fused)
    assert "0.linear1.weight" in outer.state_dict()
    outer.load_state_dict(outer.state_dict())


def test_deepcopy_and_dtypes():
    layer = encoder_layer()
    fused = create_unified_attention_fusion(layer, optimization_level=OptimizationLevel.AGGRESSIVE)
    copied = copy.deepcopy(fused).double()
    x = tokens(layer)
    torch.testing.assert_close(copied(x.double()).float(), layer(x), rtol=1e-4, atol=1e-4)
    assert layer.linear1.weight.dtype == torch.float32


class OtherLayer(nn.TransformerEncoderLayer):
    """One that computes something else."""

    def _ff_block(self, x):
        return x


@pytest.mark.parametrize(
    "model, reason",
    [
        (nn.Linear(4, 4), "Linear has no block"),
        (nn.TransformerDecoderLayer(8, 2), "TransformerDecoderLayer has no block"),
        (OtherLayer(8, 2), "OtherLayer has a _ff_block of its own"),
    ],
)
def test_others_are_refused_by_name(model, reason):
    with pytest.raises(NotImplementedError, match=rf"{reason}.*torch\.nn\.TransformerEncoderLayer"):
        create_unified_attention_fusion(model)


def test_changed_parts_are_refused():
    layer = encoder_layer()
    layer.linear1.register_forward_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match="hooks of linear1"):
        create_unified_attention_fusion(layer)
    layer = encoder_layer()
    nn.utils.parametrizations.weight_norm(layer.linear2)
    with pytest.raises(NotImplementedError, match="linear2 is ParametrizedLinear"):
        create_unified_attention_fusion(layer)


def test_bad_arguments():
    fused = create_unified_attention_fusion(encoder_layer())
    with pytest.raises(ValueError, match=r"src has shape \(3, 5\)"):
        fused(torch.randn(3, 5))
    x = torch.randn(SEQLEN, BATCH, WIDTH)
    with pytest.raises(ValueError, match="src_mask has shape"):
        fused(x, torch.zeros(2, 2))
    with pytest.raises(TypeError, match="src_key_padding_mask has dtype"):
        fused(x, src_key_padding_mask=torch.zeros(BATCH, SEQLEN, dtype=torch.int64))
    with pytest.raises(TypeError, match="strategy"):
        FusionConfig(strategy="full_block")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="target_sequence_length is 0"):
        FusionConfig(target_sequence_length=0)
    with pytest.raises(TypeError, match="model is int"):
        UnifiedAttentionFusion(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="config is dict"):
        UnifiedAttentionFusion(encoder_layer(), {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="baseline_model is NoneType"):
        benchmark_fusion_performance(None, fused, x)  # type: ignore[arg-type]


def test_the_example_of_the_docs_runs(capsys):
    page = Path(__file__).resolve().parents[2] / "docs" / "fusion.md"
    (example,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    exec(example.replace("num_runs=20", "num_runs=1"), {})
    printed = capsys.readouterr().out
    assert re.match(r"[\d.]+x, -?\d+% fewer kernels, (one|separate)", printed), printed


def test_names_are_all_there():
    assert [name for name in fusion.__all__ if not hasattr(fusion, name)] == []
