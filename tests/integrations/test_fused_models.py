"""Models of Hugging Face with fused blocks: equal, or refused by name."""

from __future__ import annotations

import pytest
import torch

from flash_cute.attention.fusion import FusionStrategy, create_unified_attention_fusion

transformers = pytest.importorskip("transformers", minversion="5.20")

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
IDS = torch.randint(3, 50, (2, 8), generator=torch.Generator().manual_seed(0))


def model(kind: str, **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **options)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def logits(one, **options):
    return one(IDS, use_cache=False, **options).logits


@pytest.mark.parametrize(
    ("kind", "options"), [("Llama", {}), ("Mistral", {"sliding_window": 4}), ("Qwen2", {})]
)
def test_same_logits_and_tokens(kind, options):
    plain = model(kind, **options)
    fused = create_unified_attention_fusion(plain)
    assert list(fused.report.values()) == ["fused: attention, ffn, norm"] * 4
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    for given in ({}, {"attention_mask": mask}):
        difference = (logits(fused, **given) - logits(plain, **given))[:, 3:].abs().max()
        assert difference < 1e-4
    written = {"max_new_tokens": 6, "do_sample": False, "use_cache": False}
    assert torch.equal(fused.model.generate(IDS, **written), plain.generate(IDS, **written))


@pytest.mark.parametrize(
    ("kind", "options", "left"),
    [
        ("Granite", {"residual_multiplier": 0.22}, range(4)),
        ("Helium", {"head_dim": 16}, range(4)),
        ("Ernie4_5", {"head_dim": 16}, range(4)),
        ("SmolLM3", {}, (3,)),  # a layer without rotary
    ],
)
def test_blocks_that_compute_something_else_are_left(kind, options, left):
    plain = model(kind, **options)
    if len(left) == 4:
        with pytest.raises(NotImplementedError, match="computes something else than a Llama block"):
            create_unified_attention_fusion(plain)
        return
    fused = create_unified_attention_fusion(plain)
    found = [name for name, text in fused.report.items() if text.startswith("left")]
    assert found == [f"model.layers.{number}" for number in left]
    assert (logits(fused) - logits(plain)).abs().max() < 1e-4


def test_a_cache_is_refused():
    fused = create_unified_attention_fusion(model("Llama"))
    with pytest.raises(NotImplementedError, match="no key/value cache; call with use_cache=False"):
        fused(IDS)
    with pytest.raises(NotImplementedError, match="no key/value cache"):
        fused.model.generate(IDS, max_new_tokens=2, do_sample=False)


def test_a_cache_where_attention_is_not_fused():
    plain = model("Llama")
    fused = create_unified_attention_fusion(plain, FusionStrategy.FFN_ONLY)
    written = {"max_new_tokens": 6, "do_sample": False}
    assert fused(IDS).past_key_values.get_seq_length() == IDS.shape[1]
    assert torch.equal(fused.model.generate(IDS, **written), plain.generate(IDS, **written))


def test_masks_of_other_implementations_are_refused():
    from flash_cute.integrations.transformers import register, unregister

    plain = model("Llama")
    fused = create_unified_attention_fusion(plain)
    register()
    try:
        fused.model.set_attn_implementation("flash_cute")
        with pytest.raises(NotImplementedError, match="set_attn_implementation\\('sdpa'\\) first"):
            logits(fused)
        with pytest.raises(NotImplementedError, match="attn_implementation is 'flash_cute'"):
            create_unified_attention_fusion(fused.model)
    finally:
        fused.model.set_attn_implementation("sdpa")
        unregister()


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_what_blocks_would_record_is_refused(name):
    plain = model("Llama")
    fused = create_unified_attention_fusion(plain)
    with pytest.raises(NotImplementedError, match=f"{name}: fused blocks record nothing"):
        logits(fused, **{name: True})
