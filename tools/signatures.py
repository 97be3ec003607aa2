"""Generates ``flash_cute/signatures.pyi``: results of the public functions by the call's flags.

``python tools/signatures.py --write`` writes it from the functions' own signatures, ``--check``
exits with 1 if it is out of date. A function has one overload for each kind of result, and lists
other libraries' spellings, so that type checkers find misspelt arguments.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import flash_cute  # noqa: E402
from flash_cute.call import spellings  # noqa: E402

STUB = ROOT / "flash_cute" / "signatures.pyi"
FLAGS = ("return_attn_probs", "return_lse", "return_rng", "return_max_logits")
ATTENTION = (
    "flash_attn_func", "flash_attn_varlen_func", "flash_attn_qkvpacked_func",
    "flash_attn_kvpacked_func", "flash_attn_varlen_qkvpacked_func",
    "flash_attn_varlen_kvpacked_func",
)  # fmt: skip
LSE = "return_softmax_lse"  # another name of return_lse
ANY = "Tensor | tuple[Tensor | None, ...]"
# For each overload: flags that are True, flags that may be, and results. Other flags are False.
OF_ATTENTION: list[tuple[set[str], set[str], str]] = [
    (set(), set(), "Tensor"),
    ({"return_lse"}, set(), "tuple[Tensor, Tensor]"),
    ({LSE}, set(), "tuple[Tensor, Tensor]"),
    ({"return_attn_probs"}, {"return_lse"}, "tuple[Tensor, Tensor, Tensor]"),
    (set(), {*FLAGS, LSE}, ANY),
]
RESULTS: dict[str, list[tuple[set[str], set[str], str]]] = {
    **{name: OF_ATTENTION for name in ATTENTION},
    "flash_attn_with_kvcache": [
        (set(), set(), "Tensor"),
        ({LSE}, set(), "tuple[Tensor, Tensor]"),
        (set(), {LSE}, "Tensor | tuple[Tensor, Tensor]"),
    ],
    "flash_attn_combine": [
        (set(), set(), "Tensor"),
        ({"return_lse"}, set(), "tuple[Tensor, Tensor]"),
        (set(), {"return_lse"}, "Tensor | tuple[Tensor, Tensor]"),
    ],
}
# The TypedDicts of other keywords, each with a function that accepts them.
KEYWORDS = {"Keywords": "flash_attn_func", "CacheKeywords": "flash_attn_with_kvcache"}
HEAD = '''"""What the public functions return, by the flags of a call. By tools/signatures.py."""

from typing import Literal, TypedDict, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from flash_cute.sparse.value import Sparse

'''


def keywords(title: str) -> str:
    """The TypedDict of a function's other keywords, from ``call/spellings.py``."""
    own = inspect.signature(getattr(flash_cute, KEYWORDS[title])).parameters
    kinds = {name: f"{kind.__name__} | None" for name, kind in spellings.HINTS.items()}
    kinds |= {
        name: "None" if x is None else f"Literal[{x}]" for name, x in spellings.ABSENT.items()
    }
    fields = "".join(f"    {name}: {kind}\n" for name, kind in kinds.items() if name not in own)
    return f"class {title}(TypedDict, total=False):\n{fields}\n"


def overloads(name: str) -> str:
    """A function, once for each kind of result."""
    parameters = inspect.signature(getattr(flash_cute, name)).parameters
    known = [*FLAGS, LSE]
    return "".join(
        f"@overload\ndef {name}({arguments(name, parameters, known, on, free)}) -> {results}: ...\n"
        for on, free, results in RESULTS[name]
    )


def arguments(
    name: str, parameters: Mapping[str, Any], known: list[str], on: set[str], free: set[str]
) -> str:
    """The parameters of an overload. A flag without its default value is given by name."""
    before: list[str] = []
    behind: list[str] = []
    for x in parameters.values():
        if x.kind is x.VAR_KEYWORD:
            continue
        declared, by_name = f"{x.name}: {x.annotation}", x.kind is x.KEYWORD_ONLY
        if x.name in known and x.name not in free:
            value = x.name in on
            declared = f"{x.name}: Literal[{value}]"
            by_name = by_name or value is not x.default
            declared += f" = {value}" if value is x.default else ""
        elif x.default is not x.empty:
            declared += f" = {x.default!r}"
        (behind if by_name else before).append(declared)
    if LSE in on | free and LSE not in parameters:
        behind.append(f"{LSE}: {'Literal[True]' if LSE in on else 'bool = False'}")
    title = "Keywords" if name in ATTENTION else "CacheKeywords"
    named = [f"**others: Unpack[{title}]"] if "others" in parameters else []
    return ", ".join([*before, *(["*", *behind] if behind else []), *named])


def text() -> str:
    """The stub, before it is formatted."""
    return HEAD + "".join([*map(keywords, KEYWORDS), *map(overloads, RESULTS)])


def formatted() -> str:
    """The stub, formatted by ruff."""
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(STUB), "-"]
    return subprocess.run(command, input=text(), capture_output=True, text=True, check=True).stdout


def is_current() -> bool:
    """Whether the stub matches the signatures, apart from its format."""
    return ast.dump(ast.parse(STUB.read_text())) == ast.dump(ast.parse(text()))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true")
    action.add_argument("--check", action="store_true")
    if parser.parse_args(argv).write:
        STUB.write_text(formatted())
    elif not is_current():
        print(f"{STUB.name} is out of date: python tools/signatures.py --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
