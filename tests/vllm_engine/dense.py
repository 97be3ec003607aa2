"""Tiny models with random weights, and what they say of tokens: dense attention in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
)

VOCABULARY, WINDOW = 128, 20
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**_SIZES),
    "mistral": MistralConfig(**_SIZES, sliding_window=WINDOW),  # in all layers
    "gemma2": Gemma2Config(  # in every second layer; a softcap in all
        **_SIZES, sliding_window=WINDOW, query_pre_attn_scalar=32, attn_logit_softcapping=5.0
    ),
}


def save(name: str, folder: Path) -> None:
    """A model of seed 0, whose wide weights make attention far from uniform."""
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(CONFIGS[name])
    with torch.no_grad():
        for x in made.parameters():
            if x.dim() > 1:
                x.normal_(0, 0.2)
    made.save_pretrained(folder)


def _attention(module, q, k, v, _, scaling, sliding_window=None, softcap=None, **__):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    places = torch.arange(q.shape[2])
    behind = places[:, None] - places
    seen = (behind >= 0) & (behind < (sliding_window or len(places)))
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2), None


@contextmanager
def loaded(folder: Path) -> Iterator[Any]:
    """The model of a folder in fp64, with dense attention."""
    AttentionInterface.register("dense", _attention)
    try:
        options: Any = {"attn_implementation": "dense", "dtype": torch.float64}
        yield AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    finally:
        AttentionInterface._global_mapping.pop("dense")


@torch.no_grad()
def logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """fp64 (tokens - 1,): of each token from the second on, given those before it."""
    ids = torch.tensor([tokens])
    found = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    return found.gather(1, ids[0, 1:, None])[:, 0]
