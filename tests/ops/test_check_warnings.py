"""What varlen calls on the CPU warn of while checks are off: once, and in no graph."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from bad_arguments import INT32, good_arguments, pages

import flash_cute
from flash_cute import check

CALLS = {
    "varlen_func": flash_cute.flash_attn_varlen_func,
    "varlen_kvpacked_func": flash_cute.flash_attn_varlen_kvpacked_func,
}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "lengths": ({"cu_seqlens_q": (5, 3, 0)}, r"cu_seqlens_q\[0\] is 5; .*cumsum.*given once"),
    "lengths of keys": ({"cu_seqlens_k": (5, 3, 0)}, r"cu_seqlens_k\[0\] is 5; .*cumsum"),
    "lengths behind 0": ({"cu_seqlens_q": (0, 3, 5)}, r"cu_seqlens_q sums up to the 8 rows"),
    "falling lengths": ({"cu_seqlens_k": (0, 5, 3)}, r"cu_seqlens_k\[1:3\] is \[5, 3\]; .*ascend"),
    "beyond the rows": (
        {"cu_seqlens_q": (0, 5, 9)},
        r"cu_seqlens_q\[1:3\] is \[5, 9\]; .*\[0, 8\]",
    ),
    "cut": ({"max_seqlen_q": 4}, r"cu_seqlens_q\[0:2\] is \[0, 5\]; max_seqlen_q is 4, which"),
    "cut keys": ({"max_seqlen_k": 3}, r"\[0:2\] is \[0, 5\]; max_seqlen_k is 3, which"),
    "used": ({"seqused_k": (6, 3)}, r"seqused_k\[0\] is 6; sequence 0 has 5 rows"),
}
RIGHT: dict[str, dict[str, Any]] = {
    "as they are": {},
    "padding": {"cu_seqlens_q": (0, 5, 7)},
    "declared padding": {"cu_seqlens_q": (0, 3, 5), "zero_tensors": True},
    "longer": {"max_seqlen_q": 8, "max_seqlen_k": 2**20},
    "none": {"cu_seqlens_q": (0, 0, 8), "max_seqlen_q": 8},
}


@pytest.fixture(autouse=True)
def nothing_was_warned_of(monkeypatch):
    monkeypatch.setattr(check, "_warned", set())
    with check.switched(False):
        yield


def changed(function: str, changes: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    tensors = {
        name: torch.tensor(x, dtype=INT32, device=device) if isinstance(x, tuple) else x
        for name, x in changes.items()
    }
    return good_arguments(function, device) | tensors


def warned(call: Any, **arguments: Any) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(**arguments)
    return [x for x in caught if "given once" in str(x.message)]


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["direct", "validated"])
@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize("name", WRONG)
def test_once(name, function, options):
    """Of each mistake, whatever its numbers; the line of the caller is named."""
    changes, text = WRONG[name]
    arguments = changed(function, changes) | options
    with pytest.warns(UserWarning, match=text) as caught:
        CALLS[function](**arguments)
    (one,) = [x for x in caught if "given once" in str(x.message)]
    assert one.filename == __file__
    assert warned(CALLS[function], **arguments) == []
    other = changed(function, WRONG["cut" if "cut" not in name else "lengths"][0])
    assert len(warned(CALLS[function], **other)) == 1


def test_sequences_of_all():
    call = flash_cute.flash_attn_varlen_qkvpacked_func
    arguments = changed("varlen_qkvpacked_func", {"cu_seqlens": (5, 3, 0)})
    with pytest.warns(UserWarning, match=r"cu_seqlens\[0\] is 5"):
        call(**arguments)
    assert warned(call, **changed("varlen_qkvpacked_func", {"cu_seqlens": (4, 1, 3)})) == []


@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_not_warned_of(name, function):
    assert warned(CALLS[function], **changed(function, RIGHT[name])) == []


def test_pages():
    """Of queries alone: offsets of keys say how many rows of the pages count."""
    arguments = changed("varlen_func", {"cu_seqlens_k": (0, 3, 5)})
    arguments |= pages(arguments)
    assert warned(flash_cute.flash_attn_varlen_func, **arguments) == []
    arguments["max_seqlen_q"] = 3
    assert len(warned(flash_cute.flash_attn_varlen_func, **arguments)) == 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"cu_seqlens_q": (5, 3, 0)}, r"cu_seqlens_q\[0\] is 5; .*cumsum"),
        ({"max_seqlen_q": 4}, r"\[0, 5\]; max_seqlen_q is 4, which"),
        ({"cu_seqlens_k_new": (1, 2, 3)}, r"cu_seqlens_k_new\[0\] is 1; .*cumsum"),
    ],
)
def test_over_a_cache(changes, text):
    a = good_arguments("varlen_func", "cpu")
    new = torch.randn(3, 2, 16).to(a["k"])

    def call(**changes: Any) -> None:
        cache = torch.zeros(2, 8, 2, 16, dtype=new.dtype)
        arguments: dict[str, Any] = {
            "cache_seqlens": 3, "cu_seqlens_q": (0, 5, 8), "max_seqlen_q": 5,
            "cu_seqlens_k_new": (0, 1, 3), **changes,
        }  # fmt: skip
        for name, x in arguments.items():
            if isinstance(x, tuple):
                arguments[name] = torch.tensor(x, dtype=INT32)
        flash_cute.flash_attn_with_kvcache(a["q"], cache, cache.clone(), new, new, **arguments)

    assert warned(call) == warned(call, cu_seqlens_k_new=(0, 1, 2)) == []
    with pytest.warns(UserWarning, match=text):
        call(**changes)
    assert warned(call, **changes) == []


def test_not_in_graphs():
    call = torch.compile(flash_cute.flash_attn_varlen_func, fullgraph=True, backend="aot_eager")
    arguments = changed("varlen_func", WRONG["lengths"][0])
    assert warned(call, **arguments) == []
    assert len(warned(flash_cute.flash_attn_varlen_func, **arguments)) == 1


def test_not_under_vmap():
    a = changed("varlen_func", WRONG["lengths"][0])
    rest = {x: y for x, y in a.items() if x != "q"}

    def batched(**_: Any) -> None:
        torch.vmap(lambda q: flash_cute.flash_attn_varlen_func(q, **rest))(
            torch.stack([a["q"]] * 2)
        )

    assert warned(batched) == []


def test_not_on_cuda(cuda):
    for name in WRONG:
        arguments = changed("varlen_func", WRONG[name][0], cuda)
        assert warned(flash_cute.flash_attn_varlen_func, **arguments) == []


def test_checks_that_are_on_refuse_instead():
    arguments = changed("varlen_func", WRONG["cut"][0])
    with check.switched(), pytest.raises(ValueError, match="max_seqlen_q is 4, which"):
        flash_cute.flash_attn_varlen_func(**arguments)
    assert len(warned(flash_cute.flash_attn_varlen_func, **arguments)) == 1
