"""Packed documents in models of transformers, against calls of one document each."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("transformers", minversion="5.20")
from hf_models import (
    DECODERS,
    assert_equal,
    model,
    results,
    results_one_by_one,
    tokens,
)

from flash_cute.integrations import transformers as integration
from flash_cute.integrations.transformers import mask_cache

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
SEQLEN = 13


@pytest.fixture(autouse=True)
def registered():
    integration.register()
    yield
    integration.unregister()


def cut(seed: int, begin: int = 0, end: int = SEQLEN) -> list[range]:
    """Documents of random lengths that fill [begin, end)."""
    at = sorted(random.Random(seed).sample(range(begin + 1, end), 2))
    return [range(a, b) for a, b in zip([begin, *at], [*at, end], strict=True)]


def positions(documents: list[list[range]], padding: int = 1) -> torch.Tensor:
    found = torch.full((len(documents), SEQLEN), padding)
    for row, ranges in enumerate(documents):
        for r in ranges:
            found[row, r] = torch.arange(len(r))
    return found


def taking_part(documents: list[list[range]]) -> torch.Tensor:
    mask = torch.zeros(len(documents), SEQLEN, dtype=torch.long)
    for row, ranges in enumerate(documents):
        for r in ranges:
            mask[row, r] = 1
    return mask


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", DECODERS)
def test_positions_that_restart(name, batch, use_cache):
    documents = [cut(seed) for seed in range(batch)]
    ids = tokens(batch, SEQLEN)
    inputs = {"input_ids": ids, "position_ids": positions(documents), "use_cache": use_cache}
    got = results(model(name, "flash_cute"), inputs, taking_part(documents))
    assert_equal(got, results_one_by_one(model(name, "eager"), ids, documents))


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_encoders_that_keep_positions_to_themselves(name):
    """Their layers learn of documents by offsets alone."""
    documents = [cut(6)]
    ids, longest = tokens(1, SEQLEN), max(map(len, documents[0]))
    cu = torch.tensor([0, *(r.stop for r in documents[0])], dtype=torch.int32)
    inputs = {
        "input_ids": ids, "position_ids": positions(documents), "cu_seq_lens_q": cu,
        "cu_seq_lens_k": cu, "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip
    got = results(model(name, "flash_cute"), inputs, taking_part(documents))
    assert_equal(got, results_one_by_one(model(name, "eager"), ids, documents))


@pytest.mark.parametrize("begin, end", [(4, SEQLEN), (0, 9), (2, 11)])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "opt", "biogpt"])
def test_documents_and_padding(name, begin, end):
    """Of one row on either side; the other row is full."""
    documents = [cut(3, begin, end), cut(4)]
    ids, mask = tokens(2, SEQLEN), taking_part(documents)
    inputs = {"input_ids": ids, "position_ids": positions(documents), "attention_mask": mask}
    got = results(model(name, "flash_cute"), inputs, mask)
    assert_equal(got, results_one_by_one(model(name, "eager"), ids, documents))


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_padding_between_documents(name):
    documents = [[range(1, 5), range(7, 12)], [range(0, 6), range(6, SEQLEN)]]
    ids, mask = tokens(2, SEQLEN), taking_part(documents)
    inputs = {"input_ids": ids, "position_ids": positions(documents), "attention_mask": mask}
    got = results(model(name, "flash_cute"), inputs, mask)
    assert_equal(got, results_one_by_one(model(name, "eager"), ids, documents))


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "opt", "biogpt"])
def test_positions_that_do_not_restart_are_one_document(name):
    """They begin where a cache ends, or anywhere else."""
    made, eager = model(name, "flash_cute"), model(name, "eager")
    ids, logits = tokens(2, SEQLEN), []
    for each in (made, eager):
        with torch.no_grad():
            first = each(ids[:, :7], use_cache=True)
            later = torch.arange(7, SEQLEN)[None].expand(2, -1)
            second = each(
                ids[:, 7:], position_ids=later, use_cache=True,
                past_key_values=first.past_key_values,
            )  # fmt: skip
        logits.append(torch.cat([first.logits, second.logits], 1))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    shifted = {"input_ids": ids, "position_ids": torch.arange(5, 5 + SEQLEN)[None]}
    assert_equal(results(made, shifted), results(eager, shifted))


def test_positions_from_0_after_a_cache_see_it():
    ids, logits = tokens(1, SEQLEN), []
    for implementation in ("flash_cute", "eager"):
        made = model("gpt_oss", implementation)
        with torch.no_grad():
            cache = made(ids[:, :7], use_cache=True).past_key_values
            more = {"past_key_values": cache, "position_ids": torch.arange(6)[None]}
            logits.append(made(ids[:, 7:], **more).logits)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "opt"])
def test_documents_after_a_cache_are_refused(name):
    made, ids = model(name, "flash_cute"), tokens(1, SEQLEN)
    with torch.no_grad():
        cache = made(ids[:, :7], use_cache=True).past_key_values
        with pytest.raises(
            ValueError, match=r"position_ids restart .* behind a cache of \d+ tokens"
        ):
            restarts = torch.tensor([[7, 8, 0, 1, 2, 3]])
            made(ids[:, 7:], position_ids=restarts, past_key_values=cache)


def test_positions_that_are_written_between_calls():
    """One tensor for all batches, as a static input is."""
    made, eager = model("gpt_oss", "flash_cute"), model("gpt_oss", "eager")
    ids, buffer = tokens(1, SEQLEN), torch.arange(SEQLEN)[None].clone()
    for mode in (torch.no_grad, torch.inference_mode):
        for seed in range(3):
            documents = [cut(seed)]
            with mode():
                buffer.copy_(positions(documents))
                got = made(ids, position_ids=buffer).logits[0]
            expected = results_one_by_one(eager, ids, documents)[0]
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_inference_mode_looks_once_a_forward(packed, monkeypatch):
    """Also of positions that are written between calls, which are looked at again."""
    stored = []
    store = mask_cache.store

    def recorded(*args):
        stored.append(args)
        store(*args)

    monkeypatch.setattr(mask_cache, "store", recorded)
    one = model("llama", "flash_cute")
    layers = one.config.num_hidden_layers
    with torch.inference_mode():
        ids, places = tokens(1, SEQLEN), torch.arange(SEQLEN)[None].clone()
        for seed in range(3):
            documents = [cut(seed)] if packed else [[range(SEQLEN)]]
            places.copy_(positions(documents))
            stored.clear()
            got = one(input_ids=ids, position_ids=places, use_cache=False).logits
            assert len(stored) == 1 < layers
            for rows in documents[0]:
                alone = one(input_ids=ids[:, rows], use_cache=False).logits
                torch.testing.assert_close(got[:, rows], alone, atol=1e-4, rtol=1e-4)


def test_numbers_of_documents():
    """``seq_idx``, as models with state space layers take it."""
    made, documents = model("llama", "flash_cute"), [cut(5)]
    numbers = torch.zeros(1, SEQLEN, dtype=torch.int32)
    for i, r in enumerate(documents[0]):
        numbers[0, r] = i
    layer = made.model.layers[0].self_attn
    q, k, v = torch.randn(3, 1, 4, SEQLEN, 8)
    out, _ = integration.attention(layer, q, k, v, None, seq_idx=numbers)
    for r in documents[0]:
        alone, _ = integration.attention(layer, *(x[:, :, r] for x in (q, k, v)), None)
        torch.testing.assert_close(out[:, r], alone)


@pytest.mark.parametrize("name", ["gpt_oss", "opt"])
def test_compiled(name):
    made = model(name, "flash_cute")
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    plain = {"input_ids": tokens(2, 9), "use_cache": False}
    got, expected = compiled(**plain).logits, made(**plain).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    restarts = torch.cat([torch.arange(4), torch.arange(5)])[None]
    with pytest.raises(RuntimeError, match="cu_seq_lens_q"):
        compiled(**plain, position_ids=restarts)


class TestArguments:
    """Those of one layer that belong together, or have another name elsewhere."""

    cu = torch.tensor([0, 5, SEQLEN], dtype=torch.int32)

    def attend(self, mask=None, **named):
        layer = model("llama", "flash_cute").model.layers[0].self_attn
        q, k, v = torch.randn(3, 1, 4, SEQLEN, 8, generator=torch.Generator().manual_seed(0))
        return integration.attention(layer, q, k, v, mask, **named)[0]

    def test_offsets_without_lengths(self):
        offsets = {"cu_seq_lens_q": self.cu, "cu_seq_lens_k": self.cu}
        expected = self.attend(**offsets, max_length_q=8, max_length_k=8)
        assert torch.equal(self.attend(**offsets), expected)
        assert torch.equal(self.attend(**offsets, max_length_k=8), expected)
        assert not torch.allclose(self.attend(), expected)

    @pytest.mark.parametrize("names", [["cu_seq_lens_q"], ["cu_seq_lens_k"], ["max_length_q"]])
    def test_offsets_alone(self, names):
        given = {n: self.cu if n.startswith("cu") else 8 for n in names}
        with pytest.raises(ValueError, match="expected both offsets"):
            self.attend(**given)

    def test_offsets_and_padding(self):
        mask = torch.ones(1, SEQLEN, dtype=torch.bool)
        mask[0, :2] = False
        with pytest.raises(ValueError, match="leave attention_mask out"):
            self.attend(mask, cu_seq_lens_q=self.cu, cu_seq_lens_k=self.cu)

    @pytest.mark.parametrize("name", ["block_table", "k_cache"])
    def test_pages_alone(self, name):
        with pytest.raises(ValueError, match="only some of block_table"):
            self.attend(**{name: torch.zeros(1, 1, dtype=torch.int32)})

    @pytest.mark.parametrize(
        "name, here",
        [("softmax_scale", "scaling"), ("window_size", "sliding_window"), ("causal", "is_causal"),
         ("dropout_p", "dropout"), ("learnable_sink", "s_aux"), ("cu_seqlens_q", "cu_seq_lens_q")],
    )  # fmt: skip
    def test_names_of_other_libraries(self, name, here):
        with pytest.raises(TypeError, match=f"{name} is given.*{here}"):
            self.attend(**{name: 1})

    @pytest.mark.parametrize("name", ["head_mask", "alibi", "position_bias", "sinks"])
    def test_what_is_not_computed(self, name):
        with pytest.raises(NotImplementedError, match=name):
            self.attend(**{name: torch.ones(4)})

    @pytest.mark.parametrize("window", [0, -1, float("nan")])
    def test_windows(self, window):
        with pytest.raises(ValueError, match="sliding_window is"):
            self.attend(sliding_window=window)

    def test_padding_of_other_dtypes(self):
        """A mask of a model's own, which no function of transformers has made."""
        mask = torch.ones(1, SEQLEN, dtype=torch.bool)
        mask[0, 4:6] = False
        expected = self.attend(mask)
        for dtype in (torch.int64, torch.float32, torch.uint8):
            assert torch.equal(self.attend(mask.to(dtype)), expected)
        with pytest.raises(ValueError, match="int32 numbers documents from 1"):
            self.attend(mask.int())
