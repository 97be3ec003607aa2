"""Tiny models of transformers that see images, and dense attention in their place, in fp64, with
masks made here of what tokens are."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
)
from transformers.models.gemma.modeling_gemma import GemmaAttention
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention

VOCABULARY, IMAGE, WINDOW = 64, 62, 5
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
_LAYERS = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
_SIGLIP = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip


def config(name: str) -> Any:
    if name == "gemma3":
        return Gemma3Config(
            text_config=_SIZES | _LAYERS | {"query_pre_attn_scalar": 16}, vision_config=_SIGLIP,
            mm_tokens_per_image=4, image_token_id=IMAGE, boi_token_id=60, eoi_token_id=61,
        )  # fmt: skip
    if name == "gemma4":  # keys that layers share, a head dim of global layers, one head of keys
        text = _SIZES | _LAYERS | {
            "num_hidden_layers": 4, "use_bidirectional_attention": "vision", "global_head_dim": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
        }  # fmt: skip
        ids = {"image_token_id": IMAGE, "video_token_id": 59, "audio_token_id": 58}
        return Gemma4Config(text_config=text, vision_config=None, audio_config=None, **ids)
    if name in ("paligemma", "paligemma2"):  # the second's layers have windows and softcaps
        layers = {"model_type": "gemma"}
        if name == "paligemma2":
            layers = _LAYERS | {"model_type": "gemma2", "query_pre_attn_scalar": 16}
            layers["sliding_window"] = 25  # longer than prompts, which Gemma's need not be
        return PaliGemmaConfig(
            text_config=_SIZES | layers, vision_config=_SIGLIP | {"projection_dim": 32},
            image_token_id=IMAGE, projection_dim=32,
        )  # fmt: skip
    raise KeyError(name)


_CLASSES = {
    "paligemma": PaliGemmaForConditionalGeneration,
    "paligemma2": PaliGemmaForConditionalGeneration,
    "gemma3": Gemma3ForConditionalGeneration,
    "gemma4": Gemma4ForConditionalGeneration,
}


def model(name: str, implementation: str, dtype: torch.dtype = torch.float64) -> Any:
    """Of seed 0, in evaluation; wide weights, so that attention is far from uniform."""
    torch.manual_seed(0)
    made = _CLASSES[name]._from_config(config(name), attn_implementation=implementation)
    with torch.no_grad():
        for x in made.parameters():
            if x.dim() > 1:
                x.normal_(0, 0.3)
    return made.eval().to(dtype)


class Text:
    """Random tokens with runs of random lengths that are images, and padding on one side. Of
    PaliGemma's the first run is the prompt, and the only one."""

    def __init__(self, name: str, seed: int, batch: int, seqlen: int, side: str | None) -> None:
        draw = random.Random(seed)
        self.name, self.has_prompt = name, name.startswith("paligemma")
        self.padding = torch.ones(batch, seqlen, dtype=torch.long)
        self.is_image = torch.zeros(batch, seqlen, dtype=torch.bool)
        for row in range(batch):
            count = draw.randrange(seqlen // 3) if side else 0
            kept = range(count, seqlen) if side == "left" else range(seqlen - count)
            self.padding[row] = 0
            self.padding[row, kept.start : kept.stop] = 1
            at = kept.start + (0 if self.has_prompt else draw.randrange(3))
            for _ in range(1 if self.has_prompt else 3):
                end = min(at + draw.randint(1, seqlen // 2), kept.stop)
                self.is_image[row, at:end] = True
                at = end + draw.randint(1, 3)
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, 50, (batch, seqlen), generator=generator) * self.padding

    def inputs(self) -> dict[str, torch.Tensor]:
        """Images are told by types alone: no pixels, which only some lengths would do for."""
        given = {"input_ids": self.ids, "attention_mask": self.padding}
        types = "mm_token_type_ids" if self.name == "gemma4" else "token_type_ids"
        if self.has_prompt:  # 0 in prompts and padding, 1 behind
            return given | {types: (~self.is_image & (self.padding > 0)).long()}
        return given | {types: self.is_image.long()}

    def append(self, tokens: torch.Tensor) -> None:
        """Appends a text token to each row."""
        self.ids = torch.cat([self.ids, tokens[:, None]], 1)
        self.padding, self.is_image = (
            torch.nn.functional.pad(x, (0, 1), value=value)
            for x, value in ((self.padding, 1), (self.is_image, 0))
        )

    def part(self, end: int) -> Text:
        """The first ``end`` tokens of each row."""
        found = copy.copy(self)
        for name in ("ids", "padding", "is_image"):
            setattr(found, name, getattr(self, name)[:, :end])
        return found

    def seen(self, window: int | None) -> torch.Tensor:
        """bool (batch, 1, seqlen, seqlen): which keys a query of a layer sees."""
        places = torch.arange(self.ids.shape[1])
        behind = places[:, None] - places
        seen = (behind >= 0).expand(len(self.ids), -1, -1)
        if window is not None and self.has_prompt:
            seen = seen & (behind < window)
        if self.name != "gemma4" or window is not None:  # Gemma 4's global layers are causal
            begins = self.is_image & ~torch.nn.functional.pad(self.is_image, (1, 0))[:, :-1]
            number = torch.where(self.is_image, begins.cumsum(1), 0)
            seen = seen | ((number[:, :, None] == number[:, None]) & (number > 0)[:, None])
        if window is not None and not self.has_prompt:
            seen = seen & (behind < window)
        return (seen & (self.padding > 0)[:, None])[:, None]


@contextmanager
def dense(text: Text, cut: int = 0) -> Iterator[None]:
    """``attn_implementation="dense"``: softmax over all scores, masked as ``text`` says, of which
    the first ``cut`` tokens come before all others."""

    def attention(module, q, k, v, _, scaling=None, sliding_window=None, softcap=None, **__):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if module.is_causal or isinstance(module, (GemmaAttention, Gemma2Attention)):
            seen = text.seen(sliding_window)
            seen[:, :, :cut, cut:] = False
            scores = scores.masked_fill(~seen, -torch.inf)
        weights = torch.nan_to_num(scores.softmax(-1))  # rows of padding see nothing
        return (weights @ v).transpose(1, 2), None

    AttentionInterface.register("dense", attention)
    try:
        yield
    finally:
        AttentionInterface._global_mapping.pop("dense")


def results(made: Any, text: Text, **inputs: Any) -> list[torch.Tensor]:
    """Logits of tokens that take part, and the gradients of all parameters."""
    made.zero_grad()
    kept = made(**text.inputs(), **inputs).logits[text.padding > 0]
    weights = torch.randn(kept.shape, generator=torch.Generator().manual_seed(2))
    (kept * weights.to(kept)).sum().backward()
    return [kept.detach()] + [x.grad for x in made.parameters() if x.grad is not None]
