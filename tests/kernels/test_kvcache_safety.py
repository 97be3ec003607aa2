"""Bad indices over a key/value cache, and memory that no call may touch or show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvcache_calls import call, check_same

import flash_cute
from flash_cute.testing import bounds, memory
from flash_cute.testing.kvcache import CacheCase, check, make_cache_inputs

BF16 = torch.bfloat16
BAD = [-1, -(2**31), 2**31 - 1]


@pytest.mark.parametrize("length", BAD)
def test_bad_lengths_are_clamped(make_cache, length):
    sizes = {"lengths": (33, 64, 64), "capacity": 64, "dim": 64, "dtype": BF16}
    inputs = make_cache(CacheCase(**sizes, seqlens_q=2, seqlens_new=2, rotary="halves"))
    meant = [33, 0 if length < 0 else 64, 64]
    check_same(inputs.changed(cache_seqlens=[33, length, 64]), inputs.changed(cache_seqlens=meant))


@pytest.mark.parametrize("length", BAD)
def test_bad_paddings_are_clamped(make_cache, length):
    inputs = make_cache(CacheCase(lengths=(33, 64), leftpad=True, dim=64, dtype=BF16))
    meant = inputs.changed(cache_leftpad=[0, 0 if length < 0 else 64])
    meant["k_cache"].nan_to_num_(), meant["v_cache"].nan_to_num_()
    check_same(inputs.changed(cache_leftpad=[0, length]), meant)


@pytest.mark.parametrize("page", [-1, -(2**31), 2**31 - 1, "pages"])
@pytest.mark.parametrize("new", [0, 1, 3])
def test_bad_pages_read_as_zeros_and_are_not_written(make_cache, page, new):
    case = CacheCase(
        lengths=(62, 100), page_size=16, seqlens_q=2, seqlens_new=new, dim=64, dtype=BF16
    )
    inputs = make_cache(case)
    page = len(inputs["k_cache"]) if page == "pages" else page
    inputs["block_table"][0, 1] = page
    inputs["block_table"][1, 6] = page  # where new rows go
    check(inputs)


@pytest.mark.parametrize("bad", [-1, 2**31 - 1, "pages"])
@pytest.mark.parametrize("pages", [{"page_size": 16}, {"batch_idx": True}], ids=str)
def test_bad_pages_under_long_queries(cuda, pages, bad):
    """As many queries as a GPU takes for an ordinary forward."""
    sizes = {"lengths": (600, 1000), "seqlens_q": 600, "heads": 16, "heads_k": 4, "dim": 64}
    inputs = make_cache_inputs(CacheCase(**sizes, **pages, is_causal=True, dtype=BF16), cuda)
    bad = len(inputs["k_cache"]) if bad == "pages" else bad
    if "page_size" in pages:
        inputs["block_table"][0, ::5] = inputs["block_table"][1, -2] = bad
    else:
        inputs["cache_batch_idx"][1] = bad
    check(inputs)


@pytest.mark.parametrize("bad", [-1, 2**31 - 1, "pages"])
def test_bad_pages_of_many_keys(cuda, bad):
    """So many sequences that a CTA loads pages before it has read the table."""
    sizes = {"lengths": (16_000,) * 8, "heads": 8, "heads_k": 2, "dim": 64}
    inputs = make_cache_inputs(CacheCase(**sizes, page_size=16, dtype=BF16), cuda)
    inputs["block_table"][:, ::5] = len(inputs["k_cache"]) if bad == "pages" else bad
    check(inputs)


@pytest.mark.parametrize("row", [-1, 2**31 - 1, "rows"])
def test_bad_rows_of_the_cache_read_as_zeros_and_are_not_written(make_cache, row):
    case = CacheCase(
        lengths=(62, 40), batch_idx=True, seqlens_q=2, seqlens_new=3, dim=64, dtype=BF16
    )
    inputs = make_cache(case)
    inputs["cache_batch_idx"][1] = len(inputs["k_cache"]) if row == "rows" else row
    check(inputs)


def test_bad_offsets_of_queries_are_clamped(make_cache):
    inputs = make_cache(CacheCase(lengths=(62, 40), seqlens_q=(3, 4), dim=64, dtype=BF16))
    bad = inputs.changed(cu_seqlens_q=[-5, 3, 2**31 - 1])
    check_same(bad, inputs.changed(cu_seqlens_q=[0, 3, 7]))


@pytest.mark.parametrize("tail", [0, -1, 4])
def test_offsets_after_the_last_sequence(make_cache, tail):
    """As in a buffer for more sequences, of which some are none."""
    case = CacheCase(
        lengths=(62, 40, 3, 5, 7, 9), seqlens_q=(3, 2, 0, 0, 0, 0), seqlens_new=(3, 2, 0, 0, 0, 0),
        rotary="halves", dim=64, dtype=BF16,
    )  # fmt: skip
    inputs = make_cache(case)
    offsets = [0, 3, 5, *[tail] * 4]
    check(inputs.changed(cu_seqlens_q=offsets, cu_seqlens_k_new=offsets))


def test_rotary_positions_under_windows_that_hide_nothing(make_cache):
    sizes = {"lengths": (62, 40), "seqlens_q": 3, "seqlens_new": 3, "dim": 64, "dtype": BF16}
    case = CacheCase(**sizes, rotary="interleaved", window=(2**40, 2**40))
    check(make_cache(case))


def test_positions_of_rotary_embedding_are_clamped(make_cache):
    case = CacheCase(
        lengths=(62, 40), seqlens_q=2, seqlens_new=2, rotary="interleaved", rotary_seqlens=True,
        dim=64, dtype=BF16,
    )  # fmt: skip
    inputs = make_cache(case)
    for position in BAD:
        check(inputs.changed(rotary_seqlens=[3, position]))


def test_status_names_what_is_clamped(make_cache):
    case = CacheCase(lengths=(62, 40, 7), page_size=16, capacity=64, dim=64, dtype=BF16)
    inputs = make_cache(case)
    inputs["block_table"][1, 2] = -1
    inputs["block_table"][2, 1] = 9999  # not in use

    def status(**changes: Any) -> list[int]:
        names = ("k_cache", "cache_seqlens", "cache_leftpad", "block_table")
        arguments = {name: inputs.changed(**changes)[name] for name in names}
        return flash_cute.kvcache_status(**arguments, seqlen_new=2).tolist()

    assert status() == [0, 2, 0]
    assert status(cache_seqlens=[63, -1, 15]) == [1, 1, 2]
    assert status(cache_leftpad=[63, 5, -1]) == [4, 2, 4]
    most = 2**31 - 1
    assert status(cache_seqlens=[most, most, -most]) == [1, 3, 1]
    inputs["block_table"][2, 0] = 9999
    assert status(cache_seqlens=[62, 0, -most]) == [0, 0, 3]
    dense = make_cache(CacheCase(lengths=(62, 40), batch_idx=True, dim=64, dtype=BF16))
    dense["cache_batch_idx"][0] = 2**30
    names = ("k_cache", "cache_seqlens", "cache_batch_idx")
    assert flash_cute.kvcache_status(**{name: dense[name] for name in names}).tolist() == [2, 0]
    whole = {"k_cache": dense["k_cache"], "cache_batch_idx": dense["cache_batch_idx"]}
    for length, expected in ((None, [2, 0]), (5, [2, 0]), (-1, [3, 1])):
        assert flash_cute.kvcache_status(**whole, cache_seqlens=length).tolist() == expected


CHECKED = {
    "cache_seqlens[1] is 65": {"cache_seqlens": [3, 65, 0]},
    "cache_seqlens[2] is -1": {"cache_seqlens": [3, 60, -1]},
    "cache_leftpad[0] is 70": {"cache_leftpad": [70, 0, 0]},
    "block_table[1, 0] is 99": {"block_table": [[0, 1, 2, 3], [99, 0, 0, 0], [4, 5, 6, 7]]},
}


@pytest.mark.parametrize("message", CHECKED)
def test_checked_indices_raise_by_name(make_cache, message):
    case = CacheCase(lengths=(62, 40, 7), page_size=16, capacity=64, dim=64, dtype=BF16)
    inputs = make_cache(case)
    call(inputs, check_indices=True)
    with pytest.raises(ValueError) as caught:
        call(inputs.changed(**CHECKED[message]), check_indices=True)
    assert message in str(caught.value)


LAST = {
    "length_62": ({"cache_seqlens": [62, 16]}, 0),
    "length_63": ({"cache_seqlens": [63, 16]}, 1),
    "padding_62": ({"cache_leftpad": [62, 16]}, 0),
    "padding_63": ({"cache_leftpad": [63, 16]}, 4),
    "page_in_use": ({"bad_page": (0, 3)}, 2),
    "page_of_new_rows": ({"bad_page": (1, 1)}, 2),
    "page_behind_them": ({"bad_page": (1, 2)}, 0),
}


@pytest.mark.parametrize("name", LAST)
def test_the_last_index_that_fits_and_the_next(make_cache, name):
    """In what is checked, and in the status."""
    changes, status = LAST[name]
    sizes = {"lengths": (62, 16), "page_size": 16, "capacity": 64, "dim": 64, "dtype": BF16}
    inputs = make_cache(CacheCase(**sizes, seqlens_new=2))
    if "bad_page" in changes:
        inputs["block_table"][changes["bad_page"]] = len(inputs["k_cache"])
    else:
        inputs = inputs.changed(**changes)
    names = ("k_cache", "cache_seqlens", "cache_leftpad", "block_table")
    found = flash_cute.kvcache_status(**{name: inputs[name] for name in names}, seqlen_new=2)
    assert sorted(found.tolist()) == [0, status]
    if status == 0:
        call(inputs, check_indices=True)
    else:
        with pytest.raises(ValueError):
            call(inputs, check_indices=True)


def test_a_page_that_begins_where_a_sequence_ends_is_not_used(make_cache):
    sizes = {"lengths": (62, 16), "page_size": 16, "capacity": 64, "dim": 64, "dtype": BF16}
    inputs = make_cache(CacheCase(**sizes))
    inputs["block_table"][1, 1] = 999
    call(inputs, check_indices=True)
    names = ("k_cache", "cache_seqlens", "block_table")
    assert flash_cute.kvcache_status(**{name: inputs[name] for name in names}).tolist() == [0, 0]


def test_check_indices_refuses_the_row_after_the_cache(make_cache):
    inputs = make_cache(CacheCase(lengths=(20, 20), batch_idx=True, dim=64, dtype=BF16))
    rows = len(inputs["k_cache"])
    call(inputs.changed(cache_batch_idx=[rows - 1, 0]), check_indices=True)
    with pytest.raises(ValueError, match=rf"cache_batch_idx\[1\] is {rows}"):
        call(inputs.changed(cache_batch_idx=[0, rows]), check_indices=True)


def test_status_has_an_entry_for_each_length_of_new_rows(make_cache):
    inputs = make_cache(CacheCase(lengths=(20, 20, 20), capacity=64, dim=64, dtype=BF16))
    new = torch.tensor([60, 4], dtype=torch.int32, device=inputs["q"].device)
    assert flash_cute.kvcache_status(inputs["k_cache"], 5, seqlen_new=new).tolist() == [1, 0]
    padding = new - 1
    status = flash_cute.kvcache_status(inputs["k_cache"], 5, cache_leftpad=padding)
    assert status.tolist() == [4, 0]


@pytest.mark.parametrize(
    ("options", "rows"), [({"is_causal": True}, 3), ({"window": (9, -1)}, 3), ({}, 1)], ids=str
)
def test_positions_up_to_the_last(make_cache, options, rows):
    """Queries take a position each under a mask, and else one for all."""
    sizes = {"lengths": (40,), "seqlens_q": 3, "seqlens_new": 1, "dim": 64, "dtype": BF16}
    inputs = make_cache(CacheCase(**sizes, rotary="halves", rotary_seqlens=True, **options))
    last = len(inputs["rotary_cos"]) - rows
    call(inputs.changed(rotary_seqlens=[last]), check_indices=True)
    with pytest.raises(ValueError, match=r"rotary_seqlens\[0\]"):
        call(inputs.changed(rotary_seqlens=[last + 1]), check_indices=True)


def test_two_sequences_may_share_a_row_of_the_cache_but_not_append_to_it(make_cache):
    sizes = {"lengths": (20, 20), "batch_idx": True, "capacity": 64, "dim": 64, "dtype": BF16}
    inputs = make_cache(CacheCase(**sizes))
    row = int(inputs["cache_batch_idx"][1])
    call(inputs.changed(cache_batch_idx=[row, row]), check_indices=True)
    joining = make_cache(CacheCase(**sizes, seqlens_new=1))
    row = int(joining["cache_batch_idx"][1])
    call(joining, check_indices=True)
    with pytest.raises(ValueError, match=rf"x\[1\] is {row}, and so is cache_batch_idx\[0\]"):
        call(joining.changed(cache_batch_idx=[row, row]), check_indices=True)


def test_two_sequences_may_share_pages_but_not_append_to_one(make_cache):
    """Pages before the appended row are only read."""
    inputs = make_cache(
        CacheCase(lengths=(20, 20), seqlens_new=1, page_size=16, dim=64, dtype=BF16)
    )
    table = inputs["block_table"].tolist()
    table[1][0] = table[0][0]
    call(inputs.changed(block_table=table), check_indices=True)
    table[1][1] = table[0][1]
    expected = rf"block_table\[1, 1\] is {table[0][1]}, and so is block_table\[0, 1\]"
    with pytest.raises(ValueError, match=expected):
        call(inputs.changed(block_table=table), check_indices=True)


CHECKED_OFFSETS = {
    "cu_seqlens_q[1:3] is [3, 9]": {"cu_seqlens_q": [0, 3, 9]},
    "max_seqlen_q is 4": {"cu_seqlens_q": [0, 6, 7]},
    "cu_seqlens_k_new[0:2] is [5, 0]": {"cu_seqlens_k_new": [5, 0, 1]},
    "cu_seqlens_k_new[1:3] is [2, 99]": {"cu_seqlens_k_new": [0, 2, 99]},
    "rotary_seqlens[1] is 4096": {"rotary_seqlens": [3, 4096]},
    "rotary_seqlens[0] is -1": {"rotary_seqlens": [-1, 3]},
}


@pytest.mark.parametrize("message", CHECKED_OFFSETS)
def test_checked_offsets_and_positions_raise_by_name(make_cache, message):
    case = CacheCase(
        lengths=(50, 40), seqlens_q=(3, 4), seqlens_new=(2, 3), is_causal=True, rotary="halves",
        rotary_seqlens=True, dim=64, dtype=BF16,
    )  # fmt: skip
    inputs = make_cache(case)
    call(inputs, check_indices=True)
    no_rows = {"cu_seqlens_q": [0, 0, 4], "cu_seqlens_k_new": [0, 0, 3]}
    call(inputs.changed(**no_rows, rotary_seqlens=[4096, 3]), check_indices=True)
    with pytest.raises(ValueError) as caught:
        call(inputs.changed(**CHECKED_OFFSETS[message]), check_indices=True)
    assert message in str(caught.value)


def test_nothing_else_of_the_cache_is_written(make_cache, device):
    """Canaries around the caches, and every row that is not appended, keep their bits."""
    case = CacheCase(
        lengths=(62, 40, 0), seqlens_q=3, seqlens_new=3, page_size=16, rotary="halves", dim=64,
        dtype=BF16,
    )  # fmt: skip
    inputs = make_cache(case)
    guards = {
        name: memory.GuardedTensor(inputs[name].shape, BF16, device)
        for name in ("k_cache", "v_cache")
    }
    for name, guard in guards.items():
        guard.tensor.copy_(inputs[name])
    guarded = inputs.changed(**{name: guard.tensor for name, guard in guards.items()})
    expected = inputs.fresh()
    for name, got, right in zip(("out", "softmax_lse"), guarded.run(), expected.run(), strict=True):
        bounds.check_same_bits(name, got, right)
    for name, guard in guards.items():
        guard.check(name)
        bounds.check_same_bits(name, guard.tensor, expected[name])


def test_uninitialized_memory_never_shows(make_cache, device):
    case = CacheCase(
        lengths=(257, 0, 1000, 64, 1), heads=8, heads_k=2, dim=128, dtype=BF16,
        seqlens_q=(1, 3, 2, 0, 5), num_splits=7,
    )  # fmt: skip
    inputs = make_cache(case)
    if device == "cuda":
        memory.fill_freed_memory(device)
        check(inputs)
    else:
        with memory.uninitialized_is_nan():
            check(inputs)
