"""vLLM's whole engine on the CPU with flash_cute's backend: ``make test-vllm``.

vLLM has one place for a backend on the CPU, and takes what is registered there.
"""

from __future__ import annotations

import gc
import importlib
import random
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", minversion="0.32")
import dense
import vllm
from vllm.config.attention import AttentionConfig
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from flash_cute.integrations.vllm import backend as ours
from flash_cute.integrations.vllm import plugin, register

PAGE, BUDGET, MOST_REQUESTS = 32, 64, 3


@pytest.fixture(scope="module", params=dense.CONFIGS)
def served(request, tmp_path_factory):
    """An engine with few tokens a step, so that prompts are cut and requests wait; its model."""
    register()
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{ours.__name__}.Backend")
    folder = tmp_path_factory.mktemp(request.param)
    dense.save(request.param, folder)
    engine = vllm.LLM(
        str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
        max_model_len=256, block_size=PAGE, max_num_batched_tokens=BUDGET,
        max_num_seqs=MOST_REQUESTS, enable_prefix_caching=True, enable_chunked_prefill=True,
    )  # fmt: skip
    with dense.loaded(folder) as model:
        yield engine, model
    AttentionBackendEnum.CPU_ATTN.clear_override()
    del engine
    gc.collect()
    vllm.distributed.cleanup_dist_env_and_memory()


@pytest.fixture
def steps(monkeypatch):
    """The metadata of each call of the backend."""
    found = []
    forward = ours.Implementation.forward

    def recorded(self, layer, query, key, value, kv_cache, attn_metadata, *args, **named):
        if attn_metadata is not None:
            found.append(attn_metadata)
        return forward(self, layer, query, key, value, kv_cache, attn_metadata, *args, **named)

    monkeypatch.setattr(ours.Implementation, "forward", recorded)
    return found


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, dense.VOCABULARY) for _ in range(n)] for n in lengths]


def generate(engine, given: list[list[int]], tokens: list[int], **options):
    settings = [
        vllm.SamplingParams(
            temperature=0, max_tokens=n, ignore_eos=True, detokenize=False, logprobs=0, **options
        )
        for n in tokens
    ]
    inputs = [{"prompt_token_ids": x} for x in given]
    return engine.generate(inputs, settings, use_tqdm=False)


def assert_right(model, outputs) -> None:
    """What the engine says of its tokens, and of prompts where it was asked, is the model's."""
    for output in outputs:
        made = output.outputs[0]
        tokens = [*output.prompt_token_ids, *made.token_ids]
        expected = dense.logprobs(model, tokens)
        said = [x[y].logprob for x, y in zip(made.logprobs, made.token_ids, strict=True)]
        if output.prompt_logprobs is not None:
            given = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
            said = [x[y].logprob for x, y in given] + said
        said = torch.tensor(said, dtype=torch.float64)
        torch.testing.assert_close(said, expected[-len(said) :], rtol=0, atol=2e-4)


def test_prompts_in_chunks(served, steps):
    engine, model = served
    outputs = generate(engine, prompts(1, 97, 3, 150), [6, 9, 4], prompt_logprobs=0)
    assert_right(model, outputs)
    chunks = [x for x in steps if x.max_query_len > 1 and x.max_seq_len > x.max_query_len]
    assert chunks and max(x.num_actual_tokens for x in steps) == BUDGET


def test_cached_prefixes(served):
    engine, model = served
    first, other = prompts(2, 110, 30)
    assert_right(model, generate(engine, [first], [3]))
    again = generate(engine, [first, first[:70] + other], [5, 5])
    assert_right(model, again)
    assert again[0].num_cached_tokens == 3 * PAGE
    if "sliding_window" not in model.config.to_dict():  # else vLLM drops what no window reaches
        assert again[1].num_cached_tokens == 2 * PAGE


def test_batches_that_change(served, steps):
    """More requests than run at once, which end at different steps."""
    engine, model = served
    draw = random.Random(3)
    lengths, tokens = ([draw.randint(1, most) for _ in range(8)] for most in (90, 12))
    assert_right(model, generate(engine, prompts(3, *lengths), tokens))
    assert {len(x.seq_lens) for x in steps} >= {1, 2, 3}


def test_pages_left_of_the_window_are_not_read(served):
    """vLLM replaces them by page 0, which may hold anything."""
    engine, model = served
    core = engine.llm_engine.engine_core.engine_core
    layers = core.vllm_config.compilation_config.static_forward_context
    for layer in layers.values():
        layer.kv_cache[0].fill_(torch.nan)
    assert_right(model, generate(engine, prompts(4, 140, 20), [8, 8]))


def test_plugin(tmp_path, monkeypatch):
    """vLLM finds the entry point of an installed flash_cute by itself."""
    tomllib = importlib.import_module("tomllib")  # of Python 3.11, which vLLM needs
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    group = project["entry-points"]["vllm.general_plugins"]
    info = tmp_path / "flash_cute-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash_cute\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in group.items()]
    (info / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines, ""]))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    loaded = vllm.plugins.load_plugins_by_group("vllm.general_plugins")
    assert loaded["flash_cute"] is plugin
    plugin()
    plugin()  # vLLM may, in one process
    assert AttentionBackendEnum["FLASH_CUTE"].get_class() is ours.Backend


def test_choice_by_kind():
    register()
    chosen = AttentionConfig(backend_per_kind={"sliding_window": "FLASH_CUTE"})
    assert chosen.backend is None
    assert chosen.backend_per_kind["sliding_window"].get_class() is ours.Backend


ASKED = {
    "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16,
    "use_mla": False, "has_sink": False, "use_sparse": False, "use_mm_prefix": False,
    "use_per_head_quant_scales": False, "device_capability": DeviceCapability(9, 0),
    "attn_type": "decoder",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, None),
        ({"has_sink": True, "has_sliding_window": True}, None),
        ({"use_non_causal": True}, None),
        ({"attn_type": "encoder_only"}, None),
        ({"device_capability": DeviceCapability(8, 0)}, None),
        ({"device_capability": DeviceCapability(7, 5)}, "compute capability"),
        ({"use_batch_invariant": True}, "batch invariance"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype"),
        ({"head_size": 512}, "head_size"),
        ({"dtype": torch.float32}, "dtype"),
        ({"block_size": 8}, "block_size"),
        ({"use_mla": True}, "MLA"),
        ({"use_mm_prefix": True}, "multimodal"),
        ({"use_dcp": True}, "DCP"),
        ({"use_pcp": True}, "PCP"),
        ({"use_rswa": True}, "R-SWA"),
    ],
)
def test_answers(changes, refused):
    reasons = ours.Backend.validate_configuration(**ASKED | changes)
    assert [refused in x for x in reasons] == [True] if refused else reasons == []
