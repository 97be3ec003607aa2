"""Tiny models of transformers with random weights, one of each kind of attention."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BertConfig,
    BioGptConfig,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    OPTConfig,
    PhimoeConfig,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

VOCABULARY = 64
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def config(name: str) -> Any:
    sizes = dict(_SIZES)
    if name == "llama":
        return LlamaConfig(**sizes)
    if name == "mistral":  # a window in all layers
        return MistralConfig(**sizes, sliding_window=5)
    if name == "gemma2":  # a window in every second layer, softcap in all
        return Gemma2Config(
            **sizes, head_dim=16, sliding_window=5, query_pre_attn_scalar=16,
            attn_logit_softcapping=2.0, tie_word_embeddings=False,
        )  # fmt: skip
    if name == "gpt_oss":  # sinks, and a window in every second layer
        return GptOssConfig(
            **sizes, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=5
        )
    if name == "deepseek_v3":  # a head dim of v other than q's
        return DeepseekV3Config(
            **sizes | {"num_key_value_heads": 4}, moe_intermediate_size=16, n_routed_experts=4,
            n_group=1, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1,
            q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
        )  # fmt: skip
    if name == "phimoe":  # a window that its mask has, and its layers do not know
        return PhimoeConfig(**sizes, sliding_window=5, num_local_experts=2, num_experts_per_tok=1)
    if name == "bert":
        return BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    if name == "gpt2":
        return GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    if name == "modernbert":  # a window on both sides in every second layer
        return ModernBertConfig(
            **sizes, local_attention=6, global_attn_every_n_layers=2, cls_token_id=1,
            sep_token_id=2,
        )  # fmt: skip
    if name == "bart":
        return BartConfig(
            vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
            decoder_ffn_dim=48, max_position_embeddings=64,
        )  # fmt: skip
    if name == "whisper":
        return WhisperConfig(
            vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
            decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=20, max_target_positions=40,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
            suppress_tokens=None, begin_suppress_tokens=None,
        )  # fmt: skip
    if name == "opt":
        return OPTConfig(
            vocab_size=VOCABULARY, hidden_size=32, ffn_dim=48, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=32, dropout=0.0,
            pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
    if name == "biogpt":
        return BioGptConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=64, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            tie_word_embeddings=False, layerdrop=0.0,
        )  # fmt: skip
    raise KeyError(name)


DECODERS = (
    "llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "gpt2", "phimoe", "opt", "biogpt",
)  # fmt: skip
ENCODERS = ("bert", "modernbert")
_CLASSES = {
    "bert": AutoModel,
    "modernbert": AutoModel,
    "bart": AutoModelForSeq2SeqLM,
    "whisper": WhisperForConditionalGeneration,
}


def model(name: str, implementation: str, **changes: Any) -> Any:
    """Of seed 0, in evaluation; wide weights, so that attention is far from uniform."""
    torch.manual_seed(0)
    kind, settings = _CLASSES.get(name, AutoModelForCausalLM), config(name)
    for key, value in changes.items():
        setattr(settings, key, value)
    make = getattr(kind, "_from_config", None) or kind.from_config
    made = make(settings, attn_implementation=implementation).eval()
    with torch.no_grad():
        for parameter_name, x in made.named_parameters():
            if x.dim() > 1 or "sinks" in parameter_name:
                x.normal_(0, 0.3)
    return made


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, shape, generator=generator)


def results(made: Any, inputs: dict[str, Any], mask: Any = None) -> list[torch.Tensor]:
    """Logits (or hidden states) where ``mask`` is 1, and the gradients of all parameters."""
    made.zero_grad()
    out = _output(made(**inputs))
    kept = out if mask is None else out[mask.bool()]
    weights = torch.randn(kept.shape, generator=torch.Generator().manual_seed(2))
    (kept * weights.to(kept)).sum().backward()
    return [kept.detach()] + [x.grad for x in made.parameters() if x.grad is not None]


def results_one_by_one(
    made: Any, ids: torch.Tensor, documents: list[list[range]], **inputs: Any
) -> list[torch.Tensor]:
    """:func:`results` of packed documents, each a range of a row of ``ids``, from one call each."""
    made.zero_grad()
    found = [(row, r) for row, ranges in enumerate(documents) for r in ranges]
    kept = torch.cat([_output(made(ids[None, row, r], **inputs))[0] for row, r in found])
    weights = torch.randn(kept.shape, generator=torch.Generator().manual_seed(2))
    (kept * weights).sum().backward()
    return [kept.detach()] + [x.grad for x in made.parameters() if x.grad is not None]


def _output(out: Any) -> torch.Tensor:
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def assert_equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Up to fp32's rounding, also of gradients that are a sum of large ones and nearly 0."""
    assert len(got) == len(expected)
    largest = max(y.abs().max().item() for y in expected)
    for x, y in zip(got, expected, strict=True):
        atol = 2e-5 * (1 + y.abs().max().item()) + 1e-6 * largest
        torch.testing.assert_close(x, y, rtol=2e-4, atol=atol)
