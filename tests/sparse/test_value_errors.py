"""Sparse: what its constructors and calls refuse, and how they say it."""

from __future__ import annotations

import pytest
import torch

from flash_cute import Sparse

INDEX = torch.zeros(1, 1, 2, 3, dtype=torch.int32)
COUNTS = torch.zeros(1, 1, 2, dtype=torch.int32)
MAP = torch.ones(1, 1, 2, 3, dtype=torch.bool)
CHOSEN = torch.zeros(1, 200, 2, 3, dtype=torch.int32)
ROWS = torch.zeros(1, 1, 200, dtype=torch.int32)
COLUMNS = torch.zeros(1, 1, 200, 1, dtype=torch.int32)
OFFSETS = torch.tensor([0, 200], dtype=torch.int32)

REFUSED = [
    (Sparse.blocks, (INDEX.float(), COUNTS), {}, TypeError, "index has dtype torch.float32"),
    (Sparse.blocks, ([0], COUNTS), {}, TypeError, "index is a list"),
    (Sparse.blocks, (INDEX[0], COUNTS), {}, ValueError, r"index has shape \(1, 2, 3\)"),
    (Sparse.blocks, (INDEX, COUNTS[..., :1]), {}, ValueError, "counts has shape"),
    (Sparse.blocks, (INDEX, COUNTS.to("meta")), {}, ValueError, "counts on meta"),
    (Sparse.blocks, (INDEX, COUNTS, INDEX), {}, ValueError, "full_counts go together"),
    (Sparse.blocks, (INDEX, COUNTS, INDEX[:, :, :1], COUNTS[:, :, :1]), {}, ValueError,
     "full_index has shape"),
    (Sparse.blocks, (INDEX, COUNTS), {"block": (32, 128)}, ValueError, r"block is \(32, 128\)"),
    (Sparse.blocks, (INDEX, COUNTS), {"block": (128, 192)}, ValueError, r"block is \(128, 192\)"),
    (Sparse.blocks, (INDEX, COUNTS), {"block": "128"}, TypeError, "block is '128'"),
    (Sparse.blocks, (INDEX, COUNTS), {"seqlens": (100, 300)}, ValueError, "lists for 2 blocks"),
    (Sparse.blocks, (INDEX, COUNTS), {"seqlens": (200.0, 300)}, TypeError, "is 200.0"),
    (Sparse.blocks, (INDEX, COUNTS), {"seqlens": 256}, TypeError, "seqlens is 256"),
    (Sparse.blocks, (INDEX, COUNTS + 1), {"mask_mod": lambda b, h, q, k: q * k}, TypeError,
     "mask function returned torch.int64"),
    (Sparse.blocks, (INDEX, COUNTS + 1), {"mask_mod": lambda b, h, q, k: True}, TypeError,
     "mask function returned bool"),
    (Sparse.blocks, (INDEX, COUNTS + 1), {"mask_mod": lambda b, h, q, k: (q == k)[:, :3]},
     ValueError, "mask function returned the shape"),
    (Sparse.from_block_map, (MAP.int(),), {}, TypeError, "map is torch.int32"),
    (Sparse.from_block_map, (MAP[0],), {}, ValueError, "map has shape"),
    (Sparse.from_block_map, (MAP,), {"seqlens": (256, 999)}, ValueError, "map has 3 blocks"),
    (Sparse.topk, (CHOSEN.float(),), {}, TypeError, "indices has dtype torch.float32"),
    (Sparse.topk, (CHOSEN[0],), {}, ValueError, "indices has shape"),
    (Sparse.topk, (CHOSEN, 96), {}, ValueError, "granularity is 96"),
    (Sparse.topk, (CHOSEN, 256), {}, ValueError, "granularity is 256"),
    (Sparse.topk, (CHOSEN,), {"layout": "bsh"}, ValueError, "layout is 'bsh'"),
    (Sparse.topk, (CHOSEN,), {"seqlen_k": -1}, ValueError, "seqlen_k is -1"),
    (Sparse.topk, (CHOSEN[0],), {"cu_seqlens_q": OFFSETS}, ValueError, "max_seqlen_q go together"),
    (Sparse.topk, (CHOSEN,), {"cu_seqlens_q": OFFSETS, "max_seqlen_q": 200}, ValueError,
     r"expected \(total_q, heads_k, k\)"),
    (Sparse.topk, (CHOSEN[0],),
     {"cu_seqlens_q": OFFSETS, "max_seqlen_q": 200, "layout": "bhsk"}, ValueError, "'bhsk'"),
    (Sparse.intervals, (ROWS.float(), ROWS), {}, TypeError, "first has dtype"),
    (Sparse.intervals, (ROWS, ROWS[..., None]), {}, ValueError, "last has shape"),
    (Sparse.intervals, (ROWS, ROWS[..., :9]), {}, ValueError, "last"),
    (Sparse.intervals, (ROWS[..., None].expand(1, 1, 200, 3),) * 2, {}, ValueError,
     "3 intervals a query; expected 1 or 2"),
    (Sparse.from_flashmask, (COLUMNS.float(), True), {}, TypeError, "indices has dtype"),
    (Sparse.from_flashmask, (COLUMNS, False), {}, ValueError, "has 1 numbers a key, and causal"),
    (Sparse.from_flashmask, (COLUMNS.expand(1, 1, 200, 4), True), {}, ValueError, "has 4 numbers"),
    (Sparse.from_flashmask, (COLUMNS, 1), {}, TypeError, "causal is 1"),
    (Sparse.from_mask_function, (max, 1, 1, 1.5, 3), {}, TypeError, "seqlen_q is 1.5"),
    (Sparse.from_mask_function, (max, 1, -1, 1, 3), {}, ValueError, "heads is -1"),
    (Sparse.from_mask_function, (max, 1, 1, 1, 3, "foo"), {}, ValueError, "device is 'foo'"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "args", "named", "kind", "message"), REFUSED)
def test_constructors_refuse(make, args, named, kind, message):
    with pytest.raises(kind, match=message):
        make(*args, **named)


KEYS = [
    (torch.ones(1, 400), TypeError, "keys is torch.float32"),
    (torch.ones(1, 300).bool(), ValueError, r"expected \(batch or 1, 400\)"),
    (torch.ones(400).bool(), ValueError, "keys has shape"),
    (torch.ones(3, 400).bool(), ValueError, "a batch of 1 or 2"),
    (torch.ones(0, 400).bool(), ValueError, "a batch of 1 or 2"),
    (torch.ones(1, 400, device="meta").bool(), ValueError, "keys is on meta"),
]


@pytest.mark.parametrize(("keys", "kind", "message"), KEYS)
def test_masks_of_other_keys_are_refused(keys, kind, message):
    sparse = Sparse.from_mask_function(lambda b, h, q, k: q + b > k, 2, 1, 300, 400)
    with pytest.raises(kind, match=message):
        sparse.with_key_mask(keys)


@pytest.mark.parametrize(("given", "message"), [
    ({"causal": 3}, "causal is 3"), ({"window_size": (1,)}, "window_size is"),
    ({"window_size": (1.5, 2)}, "window_size is"), ({"window_size": (True, 1)}, "window_size is"),
])  # fmt: skip
def test_bands_are_a_flag_and_two_ints(given, message):
    sparse = Sparse.from_block_map(MAP)
    for count in (sparse.visible_pairs, sparse.visible_pairs_of_dense):
        with pytest.raises(TypeError, match=message):
            count(**given)


@pytest.mark.parametrize("make", [
    lambda: Sparse.from_block_map(MAP), lambda: Sparse.topk(CHOSEN, seqlen_k=384),
])  # fmt: skip
def test_printed_in_a_line(make):
    words = repr(make())
    assert len(words) < 100 and "384 keys, batch 1" in words and "cpu" in words


CALLS = [
    ({"batch": 3}, "sparse is for a batch of 2; the call has 3"),
    ({"heads": 8, "heads_k": 2}, "sparse is for 4 heads; expected 1, those of k, 2, or those of q"),
    ({"seqlens": (301, 400)}, "sparse is for 300 queries, and the call has 301"),
    ({"seqlens": (256, 400)}, "sparse is for 300 queries, and the call has 256"),
    ({"seqlens": (300, 500)}, "sparse is for 400 keys, and the call has 500"),
    ({"device": torch.device("meta")}, "sparse is on cpu, and q on meta"),
]


@pytest.mark.parametrize(("given", "message"), CALLS)
def test_calls_of_other_sizes_are_refused(given, message):
    sparse = Sparse.from_mask_function(lambda b, h, q, k: q > k, 2, 4, 300, 400)
    right = {
        "batch": 2, "heads": 8, "heads_k": 4, "seqlens": (300, 400), "causal": False,
        "device": torch.device("cpu"),
    }  # fmt: skip
    sparse.check(**right)
    sparse.check(**right | {"heads": 4, "heads_k": 1})
    with pytest.raises(ValueError, match=message):
        sparse.check(**right | given)


def test_columns_of_causal_attention_need_a_causal_call():
    sparse = Sparse.from_flashmask(COLUMNS, causal=True)
    call = (1, 1, 1, (200, 200), torch.device("cpu"))
    sparse.check(*call, causal=True)
    with pytest.raises(ValueError, match="pass causal=True"):
        sparse.check(*call, causal=False)
