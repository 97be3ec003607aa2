"""examples/generate.py: text from a paged cache is that of the full forward."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("rich")


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    return importlib.import_module("generate")


def worst_of_random_texts(generate: ModuleType, device: str) -> float:
    """The worst choice over requests of unequal lengths, to a model that was never trained."""
    torch.manual_seed(1)
    model = generate.GPT(2, 256, 2, 128, generate.flash_cute_attention, heads_k=1).to(device)
    engine = generate.Engine(model, pages=11, most_at_once=3)
    prompts = [bytes(torch.randint(256, (n,)).tolist()) for n in (5, 33, 1, 16, 70, 17)]
    requests = [engine.add(prompt, 20 + 3 * i) for i, prompt in enumerate(prompts)]
    engine.run()
    assert sorted(engine.free) == list(range(11))
    assert all(len(r.tokens) == len(p) + 20 + 3 * i
               for i, (r, p) in enumerate(zip(requests, prompts, strict=True)))  # fmt: skip
    return max(
        generate.worst_choice(model, request.tokens, len(prompt))
        for request, prompt in zip(requests, prompts, strict=True)
    )


def test_generates_what_the_full_forward_would(generate, device):
    assert worst_of_random_texts(generate, device) <= (0.0 if device == "cpu" else 0.1)


def test_notices_a_wrong_cache(generate, monkeypatch):
    right = generate.flash_attn_with_kvcache

    def wrong(*args, **options):
        return right(*args, **(options | {"rotary_interleaved": True}))

    monkeypatch.setattr(generate, "flash_attn_with_kvcache", wrong)
    assert worst_of_random_texts(generate, "cpu") > 0.1


def test_the_command(generate, capsys):
    assert generate.main(["--device", "cpu", "--steps", "3", "--tokens", "40"]) == 0
    printed = capsys.readouterr().out
    assert "0 of 6 texts differ" in printed and "135 tokens in" in printed


def test_a_request_that_never_fits_is_refused(generate):
    model = generate.GPT(1, 32, 2, 64, generate.flash_cute_attention)
    engine = generate.Engine(model, pages=2, most_at_once=2)
    engine.add(b"a" * 20, 12)
    with pytest.raises(ValueError, match="do not fit"):
        engine.add(b"a" * 20, 13)
    with pytest.raises(ValueError, match="a prompt of 0 bytes"):
        engine.add(b"", 4)
    with pytest.raises(ValueError, match="0 tokens to generate"):
        engine.add(b"a", 0)
    engine.free.clear()  # others have them now, and give them back
    engine.add(b"a" * 20, 12)
