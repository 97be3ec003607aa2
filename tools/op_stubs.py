"""Generates ``flash_cute/ops/typed.py`` from the ops' schemas: a NamedTuple of each op's arguments,
and types of ``torch.ops.flash_cute``.

``python tools/op_stubs.py --write`` writes it, ``--check`` exits with 1 if it is out of date.
``--freeze`` writes the schemas to ``flash_cute/ops/schemas.txt``: later releases must accept calls
by these (docs/install.md).
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import flash_cute  # noqa: E402, F401  loads the ops

TYPED = ROOT / "flash_cute" / "ops" / "typed.py"
FROZEN = ROOT / "flash_cute" / "ops" / "schemas.txt"
PUBLIC = (
    "fwd", "bwd", "varlen_fwd", "varlen_bwd", "fwd_kvcache", "attend_kvcache",
    "attend_quantized_kvcache", "fp8_fwd", "fp8_varlen_fwd", "quantize_e4m3", "dequantize_e4m3",
    "combine",
)  # fmt: skip
HEAD = '''"""Calls as values, and ``torch.ops.flash_cute`` with types: made of the ops' schemas by
tools/op_stubs.py.

A call has the op's arguments as its fields, in their order and with their defaults; what an out
overload writes into is not among them.

Example::

    import torch
    from flash_cute.ops.typed import OPS, FwdCall

    q, k, v = torch.randn(3, 2, 100, 8, 64).unbind()
    call = FwdCall(q, k, v, is_causal=True)
    out, softmax_lse, _, _ = OPS.fwd(*call._replace(softcap=30.0))
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

'''


def schemas() -> list[Any]:
    """The schemas of all overloads of the public ops."""
    packets = [getattr(torch.ops.flash_cute, name) for name in PUBLIC]
    return [getattr(p, overload)._schema for p in packets for overload in p.overloads()]


def python_type(kind: Any) -> str:
    """The Python annotation of a schema's type."""
    name = str(kind)
    if name.startswith("Optional["):
        return f"{python_type(kind.getElementType())} | None"
    return {"SymInt": "int", "ScalarType": "torch.dtype", "number": "float"}.get(name, name)


def declared(argument: Any) -> str:
    """An argument with its type, and its default if it has one."""
    default = f" = {argument.default_value!r}" if argument.has_default_value() else ""
    return f"{argument.name}: {python_type(argument.real_type)}{default}"


def call(schema: Any, title: str) -> str:
    """The arguments of a functional op as a class."""
    fields = "".join(f"    {declared(argument)}\n" for argument in schema.arguments)
    return f"class {title}Call(NamedTuple):\n{fields}\n"


def method(schema: Any, name: str) -> str:
    """One overload as a method."""
    words = ["self"]
    for argument in schema.arguments:
        if argument.kwarg_only and "*" not in words:
            words.append("*")
        words.append(declared(argument))
    results = [python_type(result.real_type) for result in schema.returns]
    returned = results[0] if len(results) == 1 else f"tuple[{', '.join(results)}]"
    if not results:
        returned = "None"
    return f"    def {name}({', '.join(words)}) -> {returned}: ...\n"


def text() -> str:
    """The whole module, before it is formatted."""
    calls, classes, fields = [], [], []
    for name in PUBLIC:
        own = [schema for schema in schemas() if schema.name == f"flash_cute::{name}"]
        title = name.title().replace("_", "")
        body = "".join(method(schema, schema.overload_name or "__call__") for schema in own)
        calls.append(call(getattr(torch.ops.flash_cute, name).default._schema, title))
        classes.append(f"class {title}(Protocol):\n{body}\n")
        fields.append(f"    {name}: {title}\n")
    ops = f"class Ops(Protocol):\n{''.join(fields)}\n"
    typed = "OPS = cast(Ops, cast(Any, torch.ops.flash_cute))\n"
    return HEAD + "\n".join([*calls, *classes, ops, typed])


def formatted() -> str:
    """The module, formatted by ruff."""
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(TYPED), "-"]
    return subprocess.run(command, input=text(), capture_output=True, text=True, check=True).stdout


def is_current() -> bool:
    """Whether typed.py matches these schemas, apart from its format."""
    return ast.dump(ast.parse(TYPED.read_text())) == ast.dump(ast.parse(text()))


def frozen() -> str:
    """The schemas, a line each."""
    return "".join(f"{schema}\n" for schema in schemas())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true")
    action.add_argument("--check", action="store_true")
    action.add_argument("--freeze", action="store_true")
    options = parser.parse_args(argv)
    if options.freeze:
        FROZEN.write_text(frozen())
        return 0
    if options.write:
        TYPED.write_text(formatted())
        return 0
    if not is_current():
        print(f"{TYPED.name} is out of date: python tools/op_stubs.py --write")
    return 0 if is_current() else 1


if __name__ == "__main__":
    sys.exit(main())
