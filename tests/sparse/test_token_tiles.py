"""Choices of each query, run with all query heads of a kv head as rows of one head."""

from __future__ import annotations

import random

import pytest
import torch
from sparse.masks import band, mask_of
from sparse.oracle import oracle_of

from flash_cute import Sparse, flash_attn_func, flash_attn_varlen_func
from flash_cute.functional import pack_gqa
from flash_cute.ops.typed import FwdCall
from flash_cute.sparse import token_tiles
from flash_cute.sparse.lists import TILE


@pytest.fixture(autouse=True)
def patterns_of_small_calls(monkeypatch):
    """As many as a long call is worth."""
    monkeypatch.setattr(token_tiles, "_FEW_PATTERNS", 1 << 16)


class Chosen:
    """A random case: ``blocks`` (batch, seqlen_q, heads_k, k), some twice, none or behind the end,
    and the pairs that they mean."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.group = draw.choice([8, 16, 32, 64, 128])
        self.granularity = draw.choice([128, 64] if self.group > 8 else [128])
        self.seqlen_q = draw.choice([1, 7, 40, 129, 300])
        self.seqlen_k = max(1, self.seqlen_q + draw.choice([0, 0, 5, 8, 300, -3]))
        self.causal = draw.random() < 0.6
        self.batch, self.heads_k = draw.choice([1, 2]), draw.choice([1, 2])
        blocks, k = -(-self.seqlen_k // self.granularity), draw.choice([1, 3, 5])
        shape = (self.batch, self.seqlen_q, self.heads_k, k)
        self.blocks = torch.randint(-2, blocks + 2, shape)
        self.sparse = Sparse.topk(self.blocks, self.granularity, seqlen_k=self.seqlen_k)
        of_key = torch.arange(self.seqlen_k) // self.granularity
        self.seen = (self.blocks[..., None] == of_key).any(-2).transpose(1, 2)

    def call(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> FwdCall:
        shape = (self.batch, self.seqlen_q, self.heads_k * self.group, 16)
        of_keys = (2, self.batch, self.seqlen_k, self.heads_k, 16)
        q, *kv = torch.randn(shape), *torch.randn(of_keys).unbind()
        tensors = (x.to(device, dtype).requires_grad_() for x in (q, *kv))
        return FwdCall(*tensors, is_causal=self.causal)


@pytest.mark.parametrize("seed", range(24))
def test_lists_show_what_tokens_chose(seed):
    case = Chosen(seed)
    lists = case.sparse.token_lists(case.group, case.causal)
    seen = case.seen & band(case.seqlen_q, case.seqlen_k, case.causal)
    rows = seen.repeat_interleave(case.group, 2)
    assert torch.equal(mask_of(lists), rows)  # no entry of which nothing is visible, either


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("seed", range(100, 112))
def test_attention_and_gradients_are_those_of_the_mask(seed, softcap):
    case = Chosen(seed)
    call = case.call(torch.float64)._replace(softcap=softcap)
    assert pack_gqa.pack(call, case.sparse) is not None
    out, lse = flash_attn_func(
        call.q, call.k, call.v, causal=case.causal, softcap=softcap, sparse=case.sparse,
        return_lse=True,
    )  # fmt: skip
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    expected, gradients = oracle_of(call, case.seen, dout, dlse)
    torch.testing.assert_close(out, expected.out)
    torch.testing.assert_close(lse, expected.lse)
    found = torch.autograd.grad((out, lse), (call.q, call.k, call.v), (dout, dlse))
    for mine, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_tiles_are_of_few_tokens():
    """8 tokens a tile of 128 rows, of which each chose 2 blocks far from the others' ones."""
    token = torch.arange(64)[:, None]
    blocks = torch.cat((token // 8 * 2, token // 8 * 2 + 1), -1)[None, :, None]
    sparse = Sparse.topk(blocks, seqlen_k=16 * TILE)
    lists = sparse.token_lists(16, causal=False).tile_lists
    assert lists[0, 0, :, 0, 0].tolist() == [2] * 8
    assert sparse.tile_lists[0, 0, 0, 0, 0] == 16  # of 64 tokens


def test_what_rows_of_tokens_cannot_hold_runs_by_tiles_of_128_queries():
    case = Chosen(1)
    call = case.call()
    heads = call.q.shape[2]
    for change in (
        {"alibi_slopes": torch.rand(heads)}, {"sink": torch.randn(heads)}, {"dropout_p": 0.1},
        {"window_size_left": 3}, {"return_row_max": True},
    ):  # fmt: skip
        assert pack_gqa.pack(call._replace(**change), case.sparse) is None
    assert case.sparse.token_lists(3, causal=False) is None  # 128 rows are no multiple
    assert case.sparse.token_lists(2, causal=False) is None  # 64 tokens have too many patterns
    sinks = torch.randn(heads, dtype=torch.float64)
    call = case.call(torch.float64)
    out = flash_attn_func(*call[:3], causal=case.causal, sink=sinks, sparse=case.sparse)
    expected, _ = oracle_of(call._replace(sink=sinks), case.seen, out, out[..., 0].transpose(1, 2))
    torch.testing.assert_close(out, expected.out)


def test_patterns_of_16_tokens_are_not_made_for_a_short_call(monkeypatch):
    monkeypatch.setattr(token_tiles, "_FEW_PATTERNS", 256)
    few, many = (1, 2, 100, 4), (1, 2, 65536, 4)  # 7 and 4,096 rows of tiles a head
    assert not token_tiles.exist(few, 128, 65536, 8, causal=True)
    assert token_tiles.exist(many, 128, 65536, 8, causal=True)
    assert token_tiles.exist(few, 128, 65536, 16, causal=True)  # 8 tokens


def test_out_is_filled():
    case = Chosen(3)
    q, k, v = (x.detach() for x in case.call()[:3])
    out = torch.full_like(q, torch.nan)
    found = flash_attn_func(q, k, v, causal=case.causal, sparse=case.sparse, out=out)
    assert found is out
    assert torch.equal(out, flash_attn_func(q, k, v, causal=case.causal, sparse=case.sparse))


def test_in_a_graph():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 200, 32, 16), *torch.randn(2, 1, 200, 2, 16).unbind()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q, k, v, blocks):
        return flash_attn_func(q, k, v, causal=True, sparse=Sparse.topk(blocks))

    blocks = torch.randint(0, 2, (1, 200, 2, 2))
    expected = flash_attn_func(q, k, v, causal=True, sparse=Sparse.topk(blocks))
    torch.testing.assert_close(attend(q, k, v, blocks), expected)
    late = Sparse.topk(blocks)
    with pytest.raises(Exception, match="ask for sparse"):
        torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")(
            q, k, v, sink=torch.zeros(32), sparse=late
        )


@pytest.mark.parametrize("more_keys", [0, 5, None])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_are_each_their_own(causal, more_keys):
    """With as many keys as queries, which one tensor of offsets says, or a few more, or any."""
    queries = [1, 130, 40, 300]
    draw = random.Random(7)
    keys = [x + (draw.randint(0, 200) if more_keys is None else more_keys) for x in queries]
    group, heads_k = 16, 2
    offsets = torch.tensor([0, *queries]).cumsum(0, dtype=torch.int32)
    offsets_k = torch.tensor([0, *keys]).cumsum(0, dtype=torch.int32)
    q = torch.randn(sum(queries), group * heads_k, 16, dtype=torch.float64, requires_grad=True)
    k, v = torch.randn(2, sum(keys), heads_k, 16, dtype=torch.float64).requires_grad_().unbind()
    blocks = torch.randint(-1, 5, (sum(queries), heads_k, 3), dtype=torch.int32)
    sparse = Sparse.topk(
        blocks, seqlen_k=max(keys), cu_seqlens_q=offsets, max_seqlen_q=max(queries)
    )
    assert sparse.token_lists(group, causal) is not None
    sizes = (offsets, offsets if more_keys == 0 else offsets_k, max(queries), max(keys))
    out, lse = flash_attn_varlen_func(
        q, k, v, *sizes, causal=causal, sparse=sparse, return_lse=True
    )
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    for i, length in enumerate(keys):
        rows, cols = (slice(int(x[i]), int(x[i + 1])) for x in (offsets, offsets_k))
        of_key = torch.arange(length) // 128
        seen = (blocks[rows, :, :, None] == of_key).any(-2).transpose(0, 1)[None]
        call = FwdCall(*(x.detach()[None] for x in (q[rows], k[cols], v[cols])), is_causal=causal)
        of_call = (dout[rows][None], dlse[:, rows][None])
        expected, gradients = oracle_of(call, seen, *of_call)
        torch.testing.assert_close(out[rows][None], expected.out)
        torch.testing.assert_close(lse[:, rows][None], expected.lse)
        mine = (found[0][rows], found[1][cols], found[2][cols])
        for x, y in zip(mine, gradients, strict=True):
            torch.testing.assert_close(x[None], y)


def two_packed(*lengths: int) -> tuple[torch.Tensor, ...]:
    """q, k and v of 16 query heads, and blocks that each query chose, of so many tokens."""
    tokens = sum(lengths)
    q, *kv = torch.randn(tokens, 16, 8), *torch.randn(2, tokens, 1, 8).unbind()
    return q, *kv, torch.randint(-1, 3, (tokens, 1, 2))


def test_one_choice_for_packed_sequences_of_several_lengths():
    q, k, v, blocks = two_packed(40, 260)
    offsets_q, offsets_k = (torch.tensor([0, x, 300], dtype=torch.int32) for x in (30, 40))
    one_choice = blocks[None, :270]
    out = flash_attn_varlen_func(
        q, k, v, offsets_q, offsets_k, 270, 260, causal=True,
        sparse=Sparse.topk(one_choice, seqlen_k=260),
    )  # fmt: skip
    for rows, keys in ((slice(30), slice(40)), (slice(30, 300), slice(40, 300))):
        own = one_choice[:, : rows.stop - (rows.start or 0)]
        sparse = Sparse.topk(own, seqlen_k=keys.stop - (keys.start or 0))
        one = (x[None] for x in (q[rows], k[keys], v[keys]))
        torch.testing.assert_close(
            out[rows][None], flash_attn_func(*one, causal=True, sparse=sparse)
        )


@pytest.mark.filterwarnings("ignore:.*cut to what fits")
@pytest.mark.parametrize(
    "given",
    [
        {"cu_seqlens_q": [0, 40, 2**31 - 1]},
        {"cu_seqlens_q": [-(2**31) + 1, 40, 300], "seqused_k": [2**31 - 1, -(2**31)]},
        {"cu_seqlens_k": [0, 40, 2**28]},
        {"seqused_q": [2**31 - 1, 2**28 + 1]},
        {"seqused_q": [1 - 2**31, 100], "seqused_k": [30, 500]},
        {"max_seqlen_q": 250},
        {"max_seqlen_k": 257},
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True])
def test_sequences_are_cut_as_by_tiles_of_128_queries(monkeypatch, causal, given):
    q, k, v, blocks = two_packed(40, 260)
    offsets = torch.tensor([0, 40, 300], dtype=torch.int32)
    sizes = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    sizes |= {"max_seqlen_q": 260, "max_seqlen_k": 260}
    for name, x in given.items():
        sizes[name] = torch.tensor(x, dtype=torch.int32) if isinstance(x, list) else x
    sparse = Sparse.topk(
        blocks, seqlen_k=sizes["max_seqlen_k"], cu_seqlens_q=sizes["cu_seqlens_q"],
        max_seqlen_q=sizes["max_seqlen_q"],
    )  # fmt: skip
    by_tokens = flash_attn_varlen_func(q, k, v, **sizes, causal=causal, sparse=sparse)
    monkeypatch.setattr(token_tiles, "exist", lambda *_: False)
    by_tiles = flash_attn_varlen_func(q, k, v, **sizes, causal=causal, sparse=sparse)
    torch.testing.assert_close(by_tokens, by_tiles)


def test_keys_behind_the_queries_are_no_part_of_the_last_sequence():
    """One tensor of offsets, which ends behind the keys: they are cut, and the queries not."""
    q, k, v, blocks = two_packed(40, 260)
    offsets = torch.tensor([0, 300], dtype=torch.int32)
    sparse = Sparse.topk(blocks[None])
    out = flash_attn_varlen_func(
        q, k[:290], v[:290], offsets, offsets, 300, 300, causal=True, sparse=sparse
    )
    own = Sparse.topk(blocks[None], seqlen_k=290)
    one = flash_attn_func(q[None], k[None, :290], v[None, :290], causal=True, sparse=own)
    torch.testing.assert_close(out[None], one)


def test_packed_tokens_of_no_sequence():
    q, k, v, blocks = two_packed(4)
    offsets = torch.zeros(2, dtype=torch.int32)
    sparse = Sparse.topk(blocks, seqlen_k=4, cu_seqlens_q=offsets, max_seqlen_q=0)
    offsets_k = torch.tensor([0, 4], dtype=torch.int32)
    assert not flash_attn_varlen_func(q, k, v, offsets, offsets_k, 0, 4, sparse=sparse).any()


def test_packed_in_a_graph_of_any_sizes():
    @torch.compile(fullgraph=True, dynamic=True, backend="eager")
    def attend(q, k, v, blocks, offsets, longest):
        sizes = {"cu_seqlens_q": offsets, "max_seqlen_q": longest}
        return flash_attn_varlen_func(
            q, k, v, offsets, offsets, longest, longest, causal=True,
            sparse=Sparse.topk(blocks, **sizes),
        )  # fmt: skip

    tensors = tuple(x.repeat(1, 2, 1) for x in two_packed(40, 90))
    offsets = torch.tensor([0, 40, 130], dtype=torch.int32)
    expected = attend._torchdynamo_orig_callable(*tensors, offsets, 90)
    torch.testing.assert_close(attend(*tensors, offsets, 90), expected)


def test_in_a_graph_of_any_sizes_of_whole_tiles():
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def lists(blocks):
        return Sparse.topk(blocks).token_lists(16, causal=False).tile_lists

    blocks = torch.randint(0, 2, (2, 200, 2, 2))
    expected = Sparse.topk(blocks).token_lists(16, causal=False).tile_lists
    assert torch.equal(lists(blocks), expected)


def test_on_a_gpu(cuda):
    for seed in range(40):
        case = Chosen(1000 + seed)
        call = case.call(torch.bfloat16, cuda)
        sparse = Sparse.topk(case.blocks.to(cuda), case.granularity, seqlen_k=case.seqlen_k)
        out, lse = flash_attn_func(
            call.q, call.k, call.v, causal=case.causal, sparse=sparse, return_lse=True
        )
        dout = torch.randn_like(out)
        found = torch.autograd.grad(out, (call.q, call.k, call.v), dout)
        on_cpu = FwdCall(*(x.detach().cpu() for x in call[:3]), is_causal=case.causal)
        expected, gradients = oracle_of(on_cpu, case.seen, dout.cpu(), torch.zeros_like(lse).cpu())
        for mine, theirs in zip((out, *found), (expected.out, *gradients), strict=True):
            torch.testing.assert_close(mine.cpu().double(), theirs.double(), atol=0.05, rtol=0.05)


def test_packed_on_a_gpu(cuda):
    lengths = [200, 1, 700]
    offsets = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    sizes = (offsets, offsets, max(lengths), max(lengths))
    q, k, v = torch.randn(901, 32, 64), *torch.randn(2, 901, 2, 64).unbind()
    blocks = torch.randint(-1, 6, (901, 2, 3), dtype=torch.int32)

    def gradients(device: torch.device | str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [
            x.to(dtype).to(device, torch.bfloat16).to(dtype).requires_grad_() for x in (q, k, v)
        ]
        here = (*(x.to(device) for x in sizes[:2]), *sizes[2:])
        sparse = Sparse.topk(blocks.to(device), cu_seqlens_q=here[0], max_seqlen_q=sizes[2])
        out = flash_attn_varlen_func(*leaves, *here, causal=True, sparse=sparse)
        dout = torch.ones_like(out)
        return (out, *torch.autograd.grad(out, leaves, dout))

    for mine, exact in zip(
        gradients(cuda, torch.bfloat16), gradients("cpu", torch.float64), strict=True
    ):
        torch.testing.assert_close(mine.cpu().double(), exact, atol=0.05, rtol=0.05)


def plain_call() -> FwdCall:
    q, k, v = torch.randn(1, 200, 32, 16), *torch.randn(2, 1, 200, 1, 16).unbind()
    return FwdCall(q, k, v)


def test_indices_beyond_int32_name_no_block():
    call = plain_call()
    for index in (2**32, 2**33 + 1, -(2**32)):
        sparse = Sparse.topk(torch.full((1, 200, 1, 1), index))
        assert not flash_attn_func(*call[:3], sparse=sparse).any()


def test_the_value_does_not_follow_its_indices():
    call, indices = plain_call(), torch.zeros(1, 200, 1, 1, dtype=torch.int32)
    sparse = Sparse.topk(indices)
    before = flash_attn_func(*call[:3], sparse=sparse)
    indices.fill_(1)
    torch.testing.assert_close(flash_attn_func(*call[:3], sparse=sparse), before)


def test_query_heads_that_chose_apart():
    call = plain_call()
    blocks = torch.randint(0, 2, (1, 200, 32, 1))
    out = flash_attn_func(*call[:3], sparse=Sparse.topk(blocks))
    seen = (blocks[..., None] == torch.arange(200) // TILE).any(-2).transpose(1, 2)
    expected, _ = oracle_of(call, seen, out, out[..., 0].transpose(1, 2))
    torch.testing.assert_close(out.double(), expected.out, atol=1e-5, rtol=1e-5)


def test_rng_is_returned_without_lse():
    call, sparse = plain_call(), Sparse.topk(torch.zeros(1, 200, 1, 1).long())
    out, rng = flash_attn_func(*call[:3], sparse=sparse, return_rng=True)
    assert rng is None and out.shape == call.q.shape


def test_lists_that_inference_made_serve_training():
    call, sparse = plain_call(), Sparse.topk(torch.zeros(1, 200, 1, 1).long())
    sinks = torch.zeros(32)
    with torch.inference_mode():
        flash_attn_func(*call[:3], sparse=sparse, sink=sinks)
    q = call.q.requires_grad_()
    flash_attn_func(q, call.k, call.v, sparse=sparse, sink=sinks).sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("seqlen", [40, 200])
def test_under_vmap_and_in_graphs_of_any_length(seqlen):
    q, k, v = torch.randn(1, seqlen, 32, 16), *torch.randn(2, 1, seqlen, 1, 16).unbind()

    def attend(indices):
        return flash_attn_func(q, k, v, causal=True, sparse=Sparse.topk(indices))

    indices = torch.randint(-1, 2, (3, 1, seqlen, 1, 2))
    expected = torch.stack([attend(x) for x in indices])
    torch.testing.assert_close(torch.func.vmap(attend)(indices), expected)
    graph = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(graph(indices[0]), expected[0])


def test_wrong_options_have_their_own_words():
    call, sparse = plain_call(), Sparse.topk(torch.zeros(1, 200, 1, 1).long())
    with pytest.raises(TypeError, match="dropout_p is str"):
        flash_attn_func(*call[:3], sparse=sparse, dropout_p="x")
