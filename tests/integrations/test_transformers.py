"""Models of transformers with attn_implementation="flash_cute" against their eager attention."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers", minversion="5.20")
import hf_models
from hf_models import DECODERS, ENCODERS, assert_equal, model, results, tokens

from flash_cute.integrations import transformers as integration

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(autouse=True)
def registered():
    integration.register()
    yield
    integration.unregister()


def padding(kind: str) -> torch.Tensor:
    mask = torch.ones(3, 12, dtype=torch.long)
    if kind == "left":
        mask[0, :5], mask[2, :1] = 0, 0
    if kind == "right":
        mask[0, 7:], mask[2, 11:] = 0, 0
    if kind == "gaps":
        mask[0, 3:5], mask[1, :2], mask[2, 9:] = 0, 0, 0
    return mask


def both(name: str, inputs: dict, mask: torch.Tensor | None = None, **changes) -> None:
    got, expected = (
        results(model(name, implementation, **changes), inputs, mask)
        for implementation in ("flash_cute", "eager")
    )
    assert_equal(got, expected)


@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_logits_and_gradients(name):
    both(name, {"input_ids": tokens(2, 12)})


@pytest.mark.parametrize("kind", ["left", "right"])
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_padding(name, kind):
    mask = padding(kind)
    both(name, {"input_ids": tokens(3, 12), "attention_mask": mask}, mask)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "bert"])
def test_padding_between_tokens(name):
    mask = padding("gaps")
    both(name, {"input_ids": tokens(3, 12), "attention_mask": mask}, mask)


def test_packed_with_lengths():
    cu = torch.tensor([0, 5, 13], dtype=torch.int32)
    positions = torch.cat([torch.arange(5), torch.arange(8)])[None]
    inputs = {"input_ids": tokens(1, 13), "position_ids": positions, "use_cache": False}
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 8, "max_length_k": 8}
    got = results(model("llama", "flash_cute"), inputs | lengths)
    assert_equal(got, results(model("llama", "eager"), inputs))


def test_cross_attention_to_padded_keys():
    """As many queries as keys, whose padding says nothing of the queries."""
    mask = padding("right")
    inputs = {"input_ids": tokens(3, 12), "decoder_input_ids": tokens(3, 12, seed=4)}
    both("bart", inputs | {"attention_mask": mask})


@pytest.mark.parametrize("is_cached", [False, True])
def test_whisper(is_cached):
    features = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(3))
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    inputs = {"input_features": features, "decoder_input_ids": ids, "use_cache": is_cached}
    both("whisper", inputs)
    both("whisper", inputs | {"decoder_attention_mask": mask}, mask)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generate(name, cache):
    """Token for token, from prompts that are padded on the left."""
    mask = padding("left")
    inputs = {"input_ids": tokens(3, 12) * mask, "attention_mask": mask}
    settings = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
    if cache == "static":
        settings["disable_compile"] = True
    got, expected = (model(name, x).generate(**inputs, **settings) for x in ("flash_cute", "eager"))
    assert torch.equal(got, expected)
    assert len(set(got[:, 12:].flatten().tolist())) > 3


def test_whisper_generates():
    features = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(3))
    got, expected = (
        model("whisper", x).generate(features, max_new_tokens=8, do_sample=False)
        for x in ("flash_cute", "eager")
    )
    assert torch.equal(got, expected)


def test_static_cache_without_mask():
    """transformers' own flash path would attend to the empty rest of the cache."""
    from transformers import StaticCache

    ids = tokens(2, 10)
    logits = []
    for implementation in ("flash_cute", "eager"):
        made = model("llama", implementation)
        cache = StaticCache(config=made.config, max_cache_len=32)
        with torch.no_grad():
            first = made(ids[:, :7], cache=cache, use_cache=True).logits
            second = made(ids[:, 7:], cache=cache, use_cache=True).logits
        logits.append(torch.cat([first, second], 1))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_static_cache_in_a_graph(name):
    """Which is not told how much of the cache is in use, but by a mask."""
    from transformers import StaticCache

    ids = tokens(2, 10)
    made, eager = model(name, "flash_cute"), model(name, "eager")
    whole = torch.compile(made, fullgraph=True, backend="eager")
    mask = torch.ones(2, 8, dtype=torch.long)
    for each, options in ((whole, {"attention_mask": mask}), (whole, {}), (eager, {})):
        cache = StaticCache(config=made.config, max_cache_len=32)
        with torch.no_grad():
            (eager if each is eager else made)(ids[:, :7], past_key_values=cache)
            inputs = {"input_ids": ids[:, 7:8], "past_key_values": cache} | options
            if each is whole and not options:
                with pytest.raises(Exception, match="give attention_mask"):
                    each(**inputs)
                continue
            logits = each(**inputs).logits
        if each is whole:
            got = logits
    torch.testing.assert_close(got, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_continuous_batching(name):
    from transformers import ContinuousBatchingConfig, GenerationConfig

    prompts = [tokens(n, seed=n).tolist() for n in (4, 9, 6)]
    settings = GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=-1)
    made = model(name, "flash_cute")
    batched = made.generate_batch(
        inputs=prompts, generation_config=settings,
        continuous_batching_config=ContinuousBatchingConfig(block_size=16, num_blocks=16),
    )  # fmt: skip
    eager = model(name, "eager")
    for prompt, output in zip(prompts, batched.values(), strict=True):
        expected = eager.generate(torch.tensor([prompt]), generation_config=settings)
        assert output.generated_tokens == expected[0, len(prompt) :].tolist()


def test_set_attn_implementation_and_checkpointing():
    made = model("llama", "eager")
    inputs = {"input_ids": tokens(2, 12)}
    expected = results(made, inputs)
    made.set_attn_implementation("flash_cute")
    made.train()
    made.gradient_checkpointing_enable()
    assert_equal(results(made, inputs), expected)


def test_autocast():
    logits = {}
    for name in ("flash_cute", "eager"):
        made = model("llama", name)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits[name] = made(tokens(2, 12)).logits
    with torch.no_grad():
        exact = made(tokens(2, 12)).logits
    errors = {name: (x - exact).abs().mean().item() for name, x in logits.items()}
    assert errors["flash_cute"] < 1.5 * errors["eager"] < 0.1 * exact.abs().mean().item()


def test_vmap():
    """One call for models of several weights."""
    made = model("llama", "flash_cute")
    names, weights = zip(*made.named_parameters(), strict=True)
    stacked = {x: torch.stack([w, w * 1.1]).detach() for x, w in zip(names, weights, strict=True)}
    ids = tokens(2, 9)

    def logits(parameters):
        named = {"input_ids": ids, "use_cache": False}
        return torch.func.functional_call(made, parameters, (), named).logits

    got = torch.vmap(logits)(stacked)
    for i in range(2):
        expected = logits({name: x[i] for name, x in stacked.items()})
        torch.testing.assert_close(got[i], expected, rtol=1e-4, atol=1e-4)


def test_queries_of_norms_in_fp32():
    """A model in bf16 whose norms were cast to fp32, as PEFT does."""
    made = model("llama", "flash_cute").bfloat16()
    q, k = torch.randn(2, 1, 4, 6, 8), torch.randn(2, 1, 2, 6, 8)
    layer = made.model.layers[0].self_attn
    out, _ = integration.attention(layer, q[0], k[0], k[1].bfloat16(), None)
    assert out.dtype == torch.bfloat16


def test_is_bidirectional_if_the_config_says_so():
    both("llama", {"input_ids": tokens(2, 12)}, is_causal=False)


def test_compiled():
    made = model("llama", "flash_cute")
    mask = padding("left")
    inputs = {"input_ids": tokens(3, 12), "attention_mask": mask, "use_cache": False}
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    got = compiled(**inputs).logits[mask.bool()]
    torch.testing.assert_close(got, made(**inputs).logits[mask.bool()], rtol=1e-5, atol=1e-5)
    plain = {"input_ids": tokens(2, 9), "use_cache": False}
    got, expected = compiled(**plain).logits, made(**plain).logits
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    restarts = torch.cat([torch.arange(4), torch.arange(5)])[None]
    with pytest.raises(RuntimeError, match="cu_seq_lens_q"):
        compiled(**plain, position_ids=restarts)


class TestRefusals:
    def test_graphs_of_layers_that_do_not_know_their_window(self):
        made = model("phimoe", "flash_cute")
        layer = made.model.layers[0].self_attn

        @torch.compile(backend="eager", fullgraph=True)
        def attend(q):
            return integration.attention(layer, q, q, q, None)[0]

        with pytest.raises(Exception, match="does not pass its sliding window"):
            attend(torch.randn(1, 4, 9, 8))

    def test_models_without_flash_attention(self):
        from transformers import AutoModel, T5Config

        with pytest.raises(ValueError, match="T5"):
            AutoModel.from_config(
                T5Config(d_model=32, d_kv=8, num_layers=1, num_heads=4),
                attn_implementation="flash_cute",
            )

    def test_models_with_flash_attention_of_their_own(self):
        from transformers import AutoModelForCausalLM, FalconConfig

        settings = FalconConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1)
        with pytest.raises(ValueError, match="Falcon"):
            AutoModelForCausalLM.from_config(settings, attn_implementation="flash_cute")

    def test_masks_of_four_dimensions(self):
        mask = torch.ones(2, 1, 12, 12, dtype=torch.bool).tril()
        with pytest.raises(NotImplementedError, match="attention_mask has shape"):
            model("llama", "flash_cute")(tokens(2, 12), attention_mask=mask)

    def test_mask_functions_of_a_model_s_own(self):
        from transformers.masking_utils import (
            create_causal_mask,
            create_sliding_window_causal_mask,
        )

        config = model("llama", "flash_cute").config
        x = torch.zeros(2, 12, 32)

        def own(batch, head, q, kv):
            return kv < 3

        with pytest.raises(NotImplementedError, match="or_mask_function"):
            create_causal_mask(config, x, None, None, or_mask_function=own)
        blocks = torch.zeros(2, 12, dtype=torch.long)
        with pytest.raises(NotImplementedError, match="or_mask_function"):
            create_causal_mask(
                config, x, None, None, or_mask_function=own, block_sequence_ids=blocks
            )
        config.sliding_window = 3
        with pytest.raises(NotImplementedError, match="beyond the sliding window"):
            create_sliding_window_causal_mask(config, x, None, None, block_sequence_ids=blocks)

    def test_padding_between_tokens_under_a_window(self):
        with pytest.raises(ValueError, match="between tokens"):
            model("mistral", "flash_cute")(tokens(3, 12), attention_mask=padding("gaps"))

    def test_attention_weights(self):
        with pytest.raises(ValueError, match="output_attentions"):
            model("llama", "flash_cute")(tokens(2, 12), output_attentions=True)

    def test_biases(self):
        q = torch.randn(1, 2, 4, 8)
        with pytest.raises(NotImplementedError, match="position_bias"):
            integration.attention(torch.nn.Module(), q, q, q, None, position_bias=torch.ones(1))


@pytest.mark.parametrize("release", ["5.19.9", "5.17.0", "4.57.3", "4.57.0.dev0"])
def test_older_releases_are_refused(release, monkeypatch):
    integration.unregister()
    monkeypatch.setattr("transformers.__version__", release)
    with pytest.raises(ImportError, match=rf"transformers {release} is installed.*5\.20"):
        integration.register()
    with pytest.raises(ValueError, match="flash_cute"):
        model("llama", "flash_cute")


@pytest.mark.parametrize("release", ["4.30.2", "4.57.3", None])
def test_old_releases_are_refused_though_they_lack_names(release, tmp_path):
    """In a process whose transformers has the version alone, and in one that has none."""
    source = "raise ModuleNotFoundError('none', name=__name__)"
    if release is not None:
        source = f"__version__ = {release!r}"
    (tmp_path / "transformers.py").write_text(source)
    program = (
        "from flash_cute.integrations import transformers as integration\n"
        "try:\n    integration.register()\n"
        "except ImportError as error:\n    print(type(error).__name__, error)"
    )
    paths = [str(tmp_path), *sys.path]
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = "is not installed" if release is None else f"{release} is installed"
    assert f"transformers {found}; flash_cute supports 5.20 and newer" in result.stdout
    assert "pip install 'transformers>=5.20'" in result.stdout


@pytest.mark.parametrize("release", ["5.20.0", "5.24.0", "5.100.1", "6.0.0.dev0"])
def test_releases_that_are_supported(release, monkeypatch):
    integration.unregister()
    monkeypatch.setattr("transformers.__version__", release)
    integration.register()
    assert model("llama", "flash_cute").config._attn_implementation == "flash_cute"


def test_unregister():
    integration.unregister()
    with pytest.raises(ValueError, match="flash_cute"):
        model("llama", "flash_cute")
    integration.register()
    integration.register()
    made = model("llama", "flash_cute")
    assert made.config._attn_implementation == "flash_cute"
    integration.unregister()
    with pytest.raises(KeyError):
        made(hf_models.tokens(1, 3))


@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_on_cuda_in_bf16(cuda, name):
    """Errors against fp32 are those of eager attention in bf16, and it generates."""
    mask = padding("left").to(cuda)
    inputs = {"input_ids": tokens(3, 12).to(cuda), "attention_mask": mask}
    found = {}
    for implementation, dtype in (
        ("eager", torch.float32), ("eager", torch.bfloat16), ("flash_cute", torch.bfloat16)
    ):  # fmt: skip
        made = model(name, implementation).to(cuda, dtype)
        found[implementation, dtype] = results(made, inputs, mask)
        if name in DECODERS:
            made.generate(**inputs, max_new_tokens=4, do_sample=False)
    exact, eager, ours = found.values()
    largest = max(x.norm().item() for x in exact[1:])
    for x, y, z in zip(ours, eager, exact, strict=True):
        error, allowed = ((w - z).float().norm().item() for w in (x, y))
        assert error <= 1.5 * allowed + 1e-2 * z.norm().item() + 1e-3 * largest
