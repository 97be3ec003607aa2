"""FLASH_CUTE_CHECK: what it finds in index tensors and shapes, and what it leaves alone."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import fresh
import pytest
import torch
from bad_arguments import BF16, INT32, good_arguments, pages
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_cute
from flash_cute import check


@pytest.fixture(autouse=True)
def checks() -> Iterator[None]:
    """All tests here run with checks, and no warning goes unseen."""
    with check.switched(), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*exchanged|.*belong to no sequence")
        yield


def integers(device: str, *values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=INT32, device=device)


VARLEN: dict[str, tuple[dict[str, Any], str]] = {
    "lengths": ({"cu_seqlens_q": (5, 3, 0)}, r"cu_seqlens_q\[0\] is 5; offsets begin with 0.*pad"),
    "lengths_k": ({"cu_seqlens_k": (2, 3, 3)}, r"cu_seqlens_k\[0\] is 2; offsets begin with 0"),
    "starts_late": ({"cu_seqlens_q": (1, 5, 8)}, r"cu_seqlens_q\[0\] is 1"),
    "starts_below": ({"cu_seqlens_q": (-1, 5, 8)}, r"cu_seqlens_q\[0\] is -1"),
    "descends": ({"cu_seqlens_q": (0, 5, 3)}, r"cu_seqlens_q\[1:3\] is \[5, 3\]"),
    "ends_beyond": ({"cu_seqlens_k": (0, 5, 9)}, r"cu_seqlens_k\[1:3\] is \[5, 9\].*\[0, 8\]"),
    "ends_short": (
        {"cu_seqlens_q": (0, 5, 7)},
        r"cu_seqlens_q\[2\] is 7, and rows \[7, 8\] belong to no sequence.*zero_tensors=True",
    ),
    "ends_short_k": ({"cu_seqlens_k": (0, 3, 4)}, r"cu_seqlens_k\[2\] is 4, and rows \[4, 8\]"),
    "max_q": ({"max_seqlen_q": 4}, r"cu_seqlens_q\[0:2\] is \[0, 5\]; max_seqlen_q is 4, which"),
    "max_k": ({"max_seqlen_k": 2}, r"cu_seqlens_k\[0:2\] is \[0, 5\]; max_seqlen_k is 2, which"),
    "used_q": ({"seqused_q": (5, 4)}, r"seqused_q\[1\] is 4; sequence 1 has 3 rows"),
    "used_k": ({"seqused_k": (6, 3)}, r"seqused_k\[0\] is 6; sequence 0 has 5 rows"),
    "used_below_0": ({"seqused_k": (-1, 3)}, r"seqused_k\[0\] is -1"),
}


def changed(arguments: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    device = next(iter(arguments.values())).device
    tuples = {x: integers(device, *y) for x, y in changes.items() if isinstance(y, tuple)}
    return arguments | changes | tuples


@pytest.mark.parametrize("name", VARLEN)
def test_varlen(device, name):
    changes, said = VARLEN[name]
    arguments = good_arguments("varlen_func", device)
    call = flash_cute.flash_attn_varlen_func
    call(**arguments)
    with pytest.raises(ValueError, match=said):
        call(**changed(arguments, changes))
    packed = good_arguments("varlen_kvpacked_func", device)
    with pytest.raises(ValueError, match=said):
        flash_cute.flash_attn_varlen_kvpacked_func(**changed(packed, changes))
    with check.switched(False):
        call(**changed(arguments, changes))


@pytest.mark.parametrize("name", ["lengths", "descends", "ends_short", "max_q", "used_q"])
def test_packed_sequences_of_all(device, name):
    """cu_seqlens, max_seqlen and seqused go by these names."""
    changes, said = VARLEN[name]
    arguments = good_arguments("varlen_qkvpacked_func", device)
    flash_cute.flash_attn_varlen_qkvpacked_func(**arguments)
    changes = {x.removesuffix("_q"): y for x, y in changes.items()}
    with pytest.raises(ValueError, match=said.replace("_q", "").replace("_q", "")):
        flash_cute.flash_attn_varlen_qkvpacked_func(**changed(arguments, changes))


GOOD: dict[str, dict[str, Any]] = {
    "padding": {"cu_seqlens_q": (0, 5, 7), "cu_seqlens_k": (0, 2, 2), "zero_tensors": True},
    "longer_max": {"max_seqlen_q": 100, "max_seqlen_k": 2**20},
    "used": {"seqused_q": (5, 0), "seqused_k": (1, 3)},
    "empty_sequences": {"cu_seqlens_q": (0, 0, 8), "cu_seqlens_k": (0, 8, 8), "max_seqlen_q": 8,
                        "max_seqlen_k": 8},
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_what_is_right_passes(device, name):
    flash_cute.flash_attn_varlen_func(**changed(good_arguments("varlen_func", device), GOOD[name]))


PAGED: dict[str, tuple[dict[str, Any], str]] = {
    "page_beyond": ({"block_table": ((0, 4), (2, 3))}, r"block_table\[0, 1\] is 4; there are 4"),
    "page_below": ({"block_table": ((0, 1), (-1, 3))}, r"block_table\[1, 0\] is -1"),
    "length": (
        {"seqused_k": (9, 3), "max_seqlen_k": 9},
        "seqused_k gives sequence 0 a length of 9",
    ),
    "max_k": ({"seqused_k": (5, 3), "max_seqlen_k": 4}, "seqused_k.*max_seqlen_k is 4"),
    "step": ({"cu_seqlens_k": (0, 9, 12), "max_seqlen_k": 9}, "cu_seqlens_k gives sequence 0"),
    "descends": ({"cu_seqlens_k": (0, 5, 3)}, r"cu_seqlens_k\[1:3\] is \[5, 3\]"),
    "late": ({"cu_seqlens_q": (2, 5, 8)}, r"cu_seqlens_q\[0\] is 2"),
}


@pytest.mark.parametrize("name", PAGED)
def test_pages(name):
    changes, said = PAGED[name]
    arguments = good_arguments("varlen_func", "cpu")
    arguments |= pages(arguments)
    flash_cute.flash_attn_varlen_func(**arguments)
    with pytest.raises(ValueError, match=said):
        flash_cute.flash_attn_varlen_func(**changed(arguments, changes))


def test_pages_that_no_row_is_read_from_may_be_anything():
    """Sequence 0 uses 5 rows of 2 pages, sequence 1 of 3 rows one; with seqused_k the offsets of k
    say nothing."""
    arguments = good_arguments("varlen_func", "cpu")
    arguments |= pages(arguments, block_table=integers("cpu", (0, 1), (3, 99)))
    flash_cute.flash_attn_varlen_func(**arguments)
    changes = {"cu_seqlens_k": (7, 3, 900), "seqused_k": (4, 0), "block_table": ((0, -1), (9, 9))}
    flash_cute.flash_attn_varlen_func(**changed(arguments, changes))


def cached(device: str) -> dict[str, Any]:
    caches = {
        x: torch.zeros(2, 8, 2, 16, dtype=BF16, device=device) for x in ("k_cache", "v_cache")
    }
    q = torch.zeros(2, 1, 4, 16, dtype=BF16, device=device)
    return {"q": q, **caches, "cache_seqlens": integers(device, 3, 8)}


def test_a_cache(device):
    arguments, call = cached(device), flash_cute.flash_attn_with_kvcache
    call(**arguments)
    for changes, said in (
        ({"cache_seqlens": (3, 9)}, r"cache_seqlens\[1\] is 9"),
        ({"cache_batch_idx": (0, 2)}, r"cache_batch_idx\[1\] is 2"),
        ({"cache_leftpad": (4, 0)}, r"cache_leftpad\[0\] is 4"),
        ({"block_table": ((0,), (2,))}, r"block_table\[1, 0\] is 2; there are 2 pages"),
    ):
        with pytest.raises(ValueError, match=said):
            call(**changed(arguments, changes))
        with check.switched(False):
            call(**changed(arguments, changes))


def test_offsets_over_a_cache(device):
    arguments, call = cached(device), flash_cute.flash_attn_with_kvcache
    arguments |= {"q": arguments["q"][:, 0].repeat(2, 1, 1), "max_seqlen_q": 2}
    call(**changed(arguments, {"cu_seqlens_q": (0, 2, 4)}))
    with pytest.raises(ValueError, match=r"cu_seqlens_q\[0\] is 2; offsets begin with 0"):
        call(**changed(arguments, {"cu_seqlens_q": (2, 2, 4)}))
    with pytest.warns(UserWarning, match=r"cu_seqlens_q\[2\] is 3, and rows \[3, 4\]") as caught:
        call(**changed(arguments, {"cu_seqlens_q": (0, 2, 3)}))
    assert caught[0].filename == __file__
    with check.switched(False):
        call(**changed(arguments, {"cu_seqlens_q": (0, 2, 3)}))


def exchanged(seqlens: tuple[int, int], heads: tuple[int, int], device: str) -> list[torch.Tensor]:
    """q, k and v of these sizes as (batch, heads, seqlen, dim)."""
    shapes = [(2, heads[0], seqlens[0], 8)] + 2 * [(2, heads[1], seqlens[1], 8)]
    return [torch.zeros(shape, dtype=BF16, device=device) for shape in shapes]


@pytest.mark.parametrize(
    ("seqlens", "heads"),
    [((512, 512), (8, 8)), ((512, 512), (8, 2)), ((1024, 512), (4, 4)), ((40, 40), (32, 8))],
)
def test_exchanged_dimensions_are_warned_of(device, seqlens, heads):
    q, k, v = exchanged(seqlens, heads, device)
    with pytest.warns(UserWarning, match="Are seqlen and heads exchanged") as caught:
        flash_cute.flash_attn_func(q, k, v)
    assert [w.filename for w in caught] == [__file__]
    with pytest.warns(UserWarning, match="exchanged") as caught:
        flash_cute.flash_attn_kvpacked_func(q, torch.stack((k, v), 2))
    assert caught[0].filename == __file__
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    flash_cute.flash_attn_func(q, k, v)
    if seqlens[0] == seqlens[1] and heads[0] == heads[1]:
        qkv = torch.stack((q, k, v), 2)
        flash_cute.flash_attn_qkvpacked_func(qkv)
        with pytest.warns(UserWarning, match="exchanged"):
            flash_cute.flash_attn_qkvpacked_func(qkv.transpose(1, 3))


@pytest.mark.parametrize(
    ("seqlens", "heads"),
    [
        ((1, 1), (32, 8)),  # short prompts, and decoding
        ((1, 4096), (128, 128)),
        ((10, 10), (64, 64)),
        ((5, 5), (128, 128)),
        ((12, 12), (96, 8)),
        ((7, 7), (71, 1)),
        ((16, 16), (20, 20)),  # frames of a video
        ((64, 4), (20, 20)),  # few keys for many queries
        ((4, 64), (20, 20)),
        ((8192, 8192), (128, 1)),
        ((0, 4), (8, 8)),
        ((4, 0), (8, 8)),
    ],
)
def test_usual_calls_are_not_warned_of(device, seqlens, heads):
    q, k, v = (x.transpose(1, 2) for x in exchanged(seqlens, heads, device))
    check.dense(q, k)
    if seqlens[0] * seqlens[1] <= 4096:
        flash_cute.flash_attn_func(q, k, v)


def bad_lengths(device: str) -> dict[str, Any]:
    return changed(good_arguments("varlen_func", device), {"cu_seqlens_q": (5, 3, 0)})


def test_compiled_calls_are_left_alone(device):
    arguments = bad_lengths(device)
    compiled = torch.compile(flash_cute.flash_attn_varlen_func, fullgraph=True, backend="eager")
    compiled(**arguments)
    q, k, v = exchanged((512, 512), (8, 8), device)
    torch.compile(flash_cute.flash_attn_func, fullgraph=True, backend="eager")(q, k, v)


def test_fakes_are_left_alone(device):
    with FakeTensorMode() as mode:
        fake = {
            x: mode.from_tensor(y) if isinstance(y, torch.Tensor) else y
            for x, y in bad_lengths("cpu").items()
        }
        flash_cute.flash_attn_varlen_func(**fake)
    meta = {
        x: y.to("meta") if isinstance(y, torch.Tensor) else y for x, y in bad_lengths("cpu").items()
    }
    flash_cute.flash_attn_varlen_func(**meta)


def test_captured_calls_are_left_alone(cuda):
    arguments = bad_lengths(cuda)
    with check.switched(False):
        flash_cute.flash_attn_varlen_func(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flash_cute.flash_attn_varlen_func(**arguments)


def test_the_environment_switches_it_on():
    """Read when flash_cute is imported, or its module again."""
    code = """
import importlib, os
import flash_cute
print(flash_cute.check.is_on())
for value in ("0", "", None, "1"):
    os.environ["FLASH_CUTE_CHECK"] = value or ""
    if value is None:
        del os.environ["FLASH_CUTE_CHECK"]
    print(importlib.reload(flash_cute.check).is_on())
"""
    environment = os.environ | {"FLASH_CUTE_CHECK": "1"}
    run = fresh.run(code, env=environment, check=True)
    assert run.stdout.split() == ["True", "False", "False", "False", "True"]


def test_it_can_be_switched_back():
    with pytest.raises(KeyError), check.switched(False):
        assert not check.is_on()
        raise KeyError
    assert check.is_on()


@pytest.mark.parametrize(
    ("asked", "is_on"), [("", False), ("0", False), ("1", True), ("off", None)]
)
def test_the_environment_variable(asked, is_on):
    """Words are refused: `off` would else switch checks on."""
    code = "import flash_cute; print(flash_cute.check.is_on())"
    variables = os.environ | {"FLASH_CUTE_CHECK": asked}
    run = fresh.run(code, env=variables)
    if is_on is None:
        assert run.returncode != 0 and "FLASH_CUTE_CHECK is 'off'" in run.stderr
    else:
        assert run.stdout.strip() == str(is_on), run.stderr
