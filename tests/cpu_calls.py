"""The CPU's functions of the ops, by the ops' own arguments."""

from __future__ import annotations

from functools import partial
from typing import Any

from flash_cute import cpu
from flash_cute.ops import typed


def _run(function: Any, call_of: Any, *args: Any, **named: Any) -> Any:
    return function(call_of(*args, **named))


fwd = partial(_run, cpu.fwd, typed.FwdCall)
bwd = partial(_run, cpu.bwd, typed.BwdCall)
varlen_fwd = partial(_run, cpu.varlen_fwd, typed.VarlenFwdCall)
varlen_bwd = partial(_run, cpu.varlen_bwd, typed.VarlenBwdCall)
