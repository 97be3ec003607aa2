"""Masks of images: tokens of one see each other in both directions, all else is causal."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5.24")
from hf_images import IMAGE, Text, dense, model, results

from flash_cute.integrations import transformers as integration
from flash_cute.integrations.transformers import blocks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
GEMMA = ("gemma3", "gemma4")
NAMES = (*GEMMA, "paligemma", "paligemma2")


@pytest.fixture(autouse=True)
def registered():
    integration.register()
    yield
    integration.unregister()


def assert_close(got: list[torch.Tensor], expected: list[torch.Tensor], error: float) -> None:
    """Up to ``error`` of the largest number of each tensor, and of all."""
    assert len(got) == len(expected)
    largest = max(x.abs().max().item() for x in expected)
    for x, y in zip(got, expected, strict=True):
        atol = error * (y.abs().max().item() + 0.01 * largest)
        torch.testing.assert_close(x.double(), y, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients(name, side, dtype, seed):
    text = Text(name, seed, 3, 23, side)
    with dense(text):
        expected = results(model(name, "dense"), text)
    got = results(model(name, "flash_cute", dtype), text)
    assert_close(got, expected, 1e-10 if dtype == torch.float64 else 2e-4)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("name", NAMES)
def test_generate(name, side, cache):
    """The same tokens as with dense attention without a cache."""
    if (name, cache) == ("paligemma2", "static"):
        pytest.skip("its forward does not take the dict of masks that transformers makes for it")
    text = Text(name, 7, 2, 23, side)
    settings = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    if cache == "static":
        settings["disable_compile"] = True
    got = model(name, "flash_cute").generate(**text.inputs(), **settings)[:, 23:]
    for i in range(got.shape[1]):
        with torch.no_grad(), dense(text):
            made = model(name, "dense")
            chosen = made(**text.inputs(), use_cache=False).logits[:, -1].argmax(-1)
        assert torch.equal(got[:, i], chosen)
        text.append(chosen)


@pytest.mark.parametrize("split", [4, 9, 15])
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("name", GEMMA)
def test_prompts_in_chunks(name, side, split):
    """The tokens of an image that a chunk boundary splits see those that are in the cache."""
    from transformers import DynamicCache

    text = Text(name, split, 2, 21, side)
    made, logits = model(name, "flash_cute"), []
    cache = DynamicCache(config=made.config.get_text_config())
    for chunk in (text.part(split), text.part(21)):
        begin = sum(x.shape[1] for x in logits)
        inputs = chunk.inputs() | {"input_ids": chunk.ids[:, begin:], "cache": cache}
        places = torch.arange(begin, chunk.ids.shape[1])[None]
        with torch.no_grad():
            logits.append(made(**inputs, position_ids=places).logits)
    with torch.no_grad(), dense(text, cut=split):
        expected = model(name, "dense")(**text.inputs(), use_cache=False).logits
    kept = text.padding > 0
    assert_close([torch.cat(logits, 1)[kept]], [expected[kept]], 1e-10)


def test_pixels():
    """Through the vision tower, whose attention is flash_cute's, too."""
    text = Text("gemma3", 3, 2, 23, None)
    text.is_image[:] = False
    text.is_image[0, 3:7], text.is_image[0, 9:13], text.is_image[1, 16:20] = True, True, True
    text.ids[text.is_image] = IMAGE
    pixels = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(3)).double()
    with dense(text):
        expected = results(model("gemma3", "dense"), text, pixel_values=pixels)
    got = results(model("gemma3", "flash_cute"), text, pixel_values=pixels)
    assert_close(got, expected, 1e-10)


def test_layers_look_once_a_forward(monkeypatch):
    """Each mask is looked at once, however many layers are given it."""
    looked = []
    of = blocks.Blocks.of
    monkeypatch.setattr(
        blocks.Blocks, "of", lambda mask, seqlen: looked.append(mask) or of(mask, seqlen)
    )
    text, made = Text("gemma3", 4, 2, 23, "left"), model("gemma3", "flash_cute")
    for forwards in (1, 2):
        made(**text.inputs())
        assert len(looked) == 2 * forwards  # of full layers, and of those with a window


def test_masks_are_values():
    """What is copied to another device keeps no attributes, and is the same mask."""
    text = Text("gemma3", 4, 2, 23, "left")
    layer = torch.nn.Identity()
    layer.is_causal = True
    q = torch.randn(2, 4, 23, 16, dtype=torch.float64)
    numbers = torch.where(text.is_image, text.is_image.long(), -1)
    mask = blocks.mask(text.padding > 0, numbers)
    given = {"sliding_window": 5}
    out, _ = integration.attention(layer, q, q, q, mask, **given)
    copied, _ = integration.attention(layer, q, q, q, mask.clone(), **given)
    plain, _ = integration.attention(layer, q, q, q, text.padding, **given)
    assert torch.equal(out, copied)
    assert (out - plain).abs().max() > 1e-3


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", ["paligemma", "paligemma2"])
def test_prompts_without_types_are_causal(name, side):
    """Layers of PaliGemma say that they are not causal; their masks are."""
    text = Text(name, 5, 2, 33, side)
    text.is_image[:] = False
    inputs = text.inputs() | {"token_type_ids": None}
    kept = text.padding > 0
    with torch.no_grad():
        with dense(text):
            expected = model(name, "dense")(**inputs).logits[kept]
        assert_close([model(name, "flash_cute")(**inputs).logits[kept]], [expected], 1e-10)


class TestRefusals:
    def test_packed_documents(self):
        text, made = Text("gemma3", 4, 1, 23, None), model("gemma3", "flash_cute")
        places = torch.cat([torch.arange(11), torch.arange(12)])[None]
        with pytest.raises(NotImplementedError, match="packed documents"):
            made(**text.inputs(), position_ids=places)
        inputs = text.inputs() | {"attention_mask": None, "use_cache": False}
        with pytest.raises(NotImplementedError, match="or_mask"):
            made(**inputs, position_ids=places)

    def test_layers_that_are_not_causal(self):
        q = torch.randn(1, 2, 6, 8)
        mask = blocks.mask(None, torch.zeros(1, 6, dtype=torch.long))
        with pytest.raises(NotImplementedError, match="not causal"):
            integration.attention(torch.nn.Identity(), q, q, q, mask, is_causal=False)

    def test_graphs(self):
        text, made = Text("gemma3", 4, 1, 23, None), model("gemma3", "flash_cute")
        compiled = torch.compile(made, fullgraph=True, backend="eager")
        with pytest.raises(Exception, match=r"without torch\.compile"):
            compiled(**text.inputs(), use_cache=False)

    def test_graphs_of_prompts(self):
        text, made = Text("paligemma", 4, 1, 23, None), model("paligemma", "flash_cute")
        compiled = torch.compile(made, fullgraph=True, backend="eager")
        with pytest.raises(Exception, match=r"without torch\.compile"):
            compiled(**text.inputs() | {"token_type_ids": None}, use_cache=False)

    def test_prompts_beyond_the_window(self):
        text = Text("paligemma2", 4, 1, 40, None)
        text.is_image[:, :30] = True
        with pytest.raises(NotImplementedError, match="beyond the sliding window"):
            model("paligemma2", "flash_cute")(**text.inputs())
