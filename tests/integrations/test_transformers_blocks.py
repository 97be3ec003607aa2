"""Layers whose indexer chooses blocks of keys: MiniMax-M3 against its own eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.24")
from hf_models import assert_equal, results, tokens
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLTextModel

from flash_cute.integrations import transformers as integration

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(autouse=True)
def registered():
    integration.register()
    yield
    integration.unregister()


def minimax(implementation: str, block_size: int = 4, **changes: Any) -> MiniMaxM3VLTextModel:
    """Two layers, of which the second is sparse, of seed 0."""
    sizes = {"index_topk_blocks": 2} | changes
    config = MiniMaxM3VLTextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, rotary_dim=8, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, dense_intermediate_size=24, shared_intermediate_size=24,
        num_local_experts=2, num_experts_per_tok=1, mlp_layer_types=["dense", "dense"],
        index_n_heads=2, index_head_dim=16, index_block_size=block_size,
        layer_types=["full_attention", "minimax_m3_sparse"], max_position_embeddings=1024,
        **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    made = MiniMaxM3VLTextModel._from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for x in made.parameters():
            if x.dim() > 1:
                x.normal_(0, 0.3)
    return made


def both(inputs: dict[str, Any], mask: torch.Tensor | None = None, **changes: Any) -> None:
    got, expected = (
        results(minimax(implementation, **changes), inputs, mask)
        for implementation in ("flash_cute", "eager")
    )
    assert_equal(got, expected)


@pytest.mark.parametrize(("block_size", "length"), [(1, 20), (4, 50), (16, 300), (128, 600)])
def test_hidden_states_and_gradients(block_size, length):
    both({"input_ids": tokens(2, length)}, block_size=block_size)


def test_the_choice_matters():
    ids = {"input_ids": tokens(1, 50)}
    with torch.no_grad():
        few, all_blocks = (
            minimax("flash_cute", index_topk_blocks=k)(**ids).last_hidden_state for k in (1, 99)
        )
    assert (few - all_blocks).abs().max() > 0.1


def test_padding_on_the_right():
    mask = torch.ones(3, 40, dtype=torch.long)
    mask[0, 31:] = 0
    both({"input_ids": tokens(3, 40), "attention_mask": mask}, mask)


@pytest.mark.parametrize("kind", ["left", "gaps"])
def test_padding_counts_nowhere(kind):
    """In a layer's call: a model's indexer chooses by what padding holds."""
    mask = (
        torch.rand(2, 40) < 0.6 if kind == "gaps" else torch.arange(40) >= torch.tensor([[9], [0]])
    )
    q, k, v = torch.randn(2, 4, 40, 8), *torch.randn(2, 2, 2, 40, 8).unbind()
    chosen = torch.rand(2, 2, 40, 10).topk(3).indices.masked_fill(torch.rand(2, 2, 40, 3) < 0.2, -1)
    layer = torch.nn.Identity()
    layer.config = type("Config", (), {"index_block_size": 4, "sliding_window": None})()
    out, _ = integration.attention(layer, q, k, v, mask, block_indices=chosen)
    seen = (chosen[..., None] == torch.arange(40) // 4).any(-2).repeat_interleave(2, 1)
    seen = seen & torch.ones(40, 40).bool().tril() & mask[:, None, None]
    scores = (q @ k.repeat_interleave(2, 1).transpose(-1, -2)) * 8**-0.5
    p = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0)
    expected = p @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out.transpose(1, 2), expected)


def test_a_cache_gives_the_same():
    from transformers import DynamicCache

    ids, found = tokens(2, 30), []
    for implementation in ("flash_cute", "eager"):
        made = minimax(implementation)
        past = DynamicCache(config=made.config)
        with torch.no_grad():
            parts = [ids[:, :17], ids[:, 17:18], ids[:, 18:]]
            out = [made(x, cache=past, use_cache=True).last_hidden_state for x in parts]
        found.append(torch.cat(out, 1))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", [None, "static"])
def test_generate(cache):
    """Token for token, of the model with a head."""
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

    settings = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
    if cache == "static":
        settings["disable_compile"] = True
    found = []
    for implementation in ("flash_cute", "eager"):
        config = minimax(implementation).config
        config.eos_token_id = None
        torch.manual_seed(0)
        made = MiniMaxM3VLForCausalLM._from_config(config, attn_implementation=implementation)
        with torch.no_grad():
            for x in made.parameters():
                if x.dim() > 1:
                    x.normal_(0, 0.3)
        found.append(made.eval().generate(tokens(2, 21), **settings))
    assert torch.equal(*found)
    assert len(set(found[0][:, 21:].flatten().tolist())) > 3


def test_what_blocks_do_not_go_with():
    q, k, v = torch.randn(1, 4, 20, 8), *torch.randn(2, 1, 2, 20, 8).unbind()
    chosen = torch.zeros(1, 2, 20, 1, dtype=torch.long)
    layer = torch.nn.Identity()
    with pytest.raises(ValueError, match="how many keys a block has"):
        integration.attention(layer, q, k, v, None, block_indices=chosen)
    layer.config = type("Config", (), {"index_block_size": 4, "sliding_window": None})()
    out, _ = integration.attention(layer, q, k, v, None, block_indices=chosen)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k[:, :, :4], v[:, :, :4], torch.ones(20, 4).bool().tril(), enable_gqa=True
    )
    torch.testing.assert_close(out.transpose(1, 2), expected)
    offsets = torch.tensor([0, 20], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    positions = torch.cat((torch.arange(12), torch.arange(8)))[None]
    for given, message in ((lengths, "cu_seq_lens_q"), ({"position_ids": positions}, "documents")):
        with pytest.raises(NotImplementedError, match=f"block_indices is given with {message}"):
            integration.attention(layer, q, k, v, None, block_indices=chosen, **given)
