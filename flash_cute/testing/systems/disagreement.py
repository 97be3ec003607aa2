"""Ranks that do not make the same call: all raise one message, and none waits."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_cute.distributed import ContextParallel
from flash_cute.testing.distributed import context
from flash_cute.testing.systems import ranks
from flash_cute.testing.systems.findings import Findings

# The last rank's difference. "alone" runs backward only on the first rank.
DIFFER = (
    "softcap", "scale", "window", "causal", "dtype", "return_lse", "grad", "dropout_p", "slopes",
    "sink", "sink_none", "plan", "rows", "deterministic", "heads", "raises", "alone",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case(ranks.Case):
    """The call of all ranks, and the last one's difference."""

    differ: str = "softcap"


def draw(pick: random.Random) -> Case:
    fields = vars(ranks.draw(pick)) | {"argument": "", "value": ""}
    # "alone" is rare: it waits for a group's timeout, and needs new processes.
    fields["differ"] = pick.choice(DIFFER[:-1] if pick.random() < 0.85 else DIFFER)
    fields["with_grad"] |= fields["differ"] in ("grad", "alone")
    if fields["strategy"] != "ulysses":
        fields["dropout_p"] = 0.0
    return Case(**fields)


def check(case: Case, device: str) -> Findings:
    find = Findings()
    if case.ranks == 1 or not ranks.ranks_divide_heads(case):
        return find
    made = ranks.inputs_of(case, device)
    if case.differ == "alone":
        _check_alone(find, case, made)
    else:
        cp = context(case.strategy, case.layout, case.head_groups, device)
        _check_difference(find, case, cp, made)
    return find


def _check_difference(
    find: Findings, case: Case, cp: ContextParallel, made: dict[str, Tensor]
) -> None:
    """All ranks raise the same message, and none waits."""
    other, changes = case, dict[str, Any]()
    if cp.rank == case.ranks - 1:
        other, made, changes = _other(case, made)
    try:
        (result, *_) = ranks.call_of(other, cp, made, **changes)
        out = result[0] if isinstance(result, tuple) else result
        if out.requires_grad:
            out.double().sum().backward()
    except (ValueError, TypeError, NotImplementedError) as error:
        find.notes.append(f"{type(error).__name__}: {error}")
        return
    except RuntimeError as error:
        find.that(False, f"{case.differ} that differs: RuntimeError: {str(error)[:200]}")
        find.spent = True
        return
    is_same = case.differ in ("slopes", "sink", "sink_none") and not _has(case)
    find.that(is_same, f"{case.differ} that differs by rank is taken")


def _has(case: Case) -> bool:
    return bool(case.slopes) if case.differ == "slopes" else case.sink


def _other(case: Case, made: dict[str, Tensor]) -> tuple[Case, dict[str, Tensor], dict[str, Any]]:
    """The last rank's arguments."""
    name = case.differ
    of_call: dict[str, dict[str, Any]] = {
        "softcap": {"softcap": case.softcap + 1.0}, "scale": {"scale": 0.9},
        "return_lse": {"return_lse": not case.return_lse},
        "grad": {"with_grad": False}, "deterministic": {"deterministic": not case.deterministic},
        "plan": {"documents": (case.documents[0] + 1, *case.documents[1:])},
    }  # fmt: skip
    fields = of_call.get(name, {})
    made, changes = dict(made), dict[str, Any]()
    if name == "window":
        changes["window_size"] = (3, 1) if case.window != (3, 1) else (4, 1)
    elif name == "causal":
        changes["causal"] = not case.causal
    elif name == "dropout_p":
        changes["dropout_p"] = 0.3
    elif name in ("slopes", "sink") and name in made:
        made[name] = made[name] + 0.5
    elif name == "sink_none":
        changes["sink"] = None
    elif name == "raises":
        changes["softcap"] = -1.0
    elif name == "dtype":
        other = torch.float32 if case.dtype == "float64" else torch.float16
        for x in ("q", "k", "v", "dout"):
            made[x] = made[x].to(other)
    elif name == "heads":
        for x in ("q", "k", "v"):
            made[x] = torch.cat((made[x], made[x]), -2)
        changes |= {"alibi_slopes": None, "sink": None}
    elif name == "rows":
        changes["rows"] = -1
    if name == "plan":
        made = ranks.inputs_of(replace(case, **fields), str(made["q"].device.type))
    return replace(case, **fields), made, changes


def _check_alone(find: Findings, case: Case, made: dict[str, Tensor]) -> None:
    """Backward on only one rank is an error there, within the group's timeout."""
    group = dist.new_group(timeout=timedelta(seconds=4))
    strategy = "all_gather" if case.strategy == "two_dimensional" else case.strategy
    cp = ContextParallel(group, strategy=strategy, timeout=timedelta(seconds=4))
    find.spent = True
    single = replace(case, strategy=strategy, with_grad=True, return_lse=False, dropout_p=0.0)
    out, *_ = ranks.call_of(single, cp, made)
    if cp.rank:
        return
    try:
        out.double().sum().backward()
    except RuntimeError:
        return
    is_local = case.ranks == 1 or out.numel() == 0
    find.that(is_local, "backward on one rank alone ended without the others")
