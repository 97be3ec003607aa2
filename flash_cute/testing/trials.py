"""Random trials of the ops, each of which one line of JSON describes."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from flash_cute.testing.cases import LAYOUTS, Case, VarlenCase, make_inputs, unsupported_on_cuda
from flash_cute.testing.verify import verify_families

if TYPE_CHECKING:
    from typing_extensions import Self

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_MOST_SCORES = 2**21  # of a trial, all heads and sequences together


@dataclass(frozen=True, kw_only=True)
class TrialOfCase:
    """A case, the seed of its tensors, and fields of the kind of trial, as one line of JSON."""

    KINDS: ClassVar[dict[str, type]]  # the cases by name

    case: Any
    seed: int = 0

    def to_json(self) -> str:
        """What differs from the defaults, in one line."""
        (kind,) = (name for name, cls in self.KINDS.items() if type(self.case) is cls)
        fields: dict[str, Any] = {"kind": kind, "seed": self.seed}
        for part in (self, self.case):
            for field in dataclasses.fields(part):
                value = getattr(part, field.name)
                if value != field.default and field.name not in ("case", "seed"):
                    named = isinstance(value, torch.dtype)
                    fields[field.name] = str(value).removeprefix("torch.") if named else value
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The trial that `to_json` wrote.

        Raises:
            ValueError: no JSON, or no trial; names the field that does not exist.
        """
        fields: Any = json.loads(text)
        kind = cls.KINDS[kind_of(fields, cls.KINDS)]
        del fields["kind"]
        own_fields = {field.name for field in dataclasses.fields(cls)} - {"case"}
        known = {field.name for field in dataclasses.fields(kind)}
        if unknown := fields.keys() - known - own_fields:
            raise ValueError(f"no such field: {', '.join(sorted(unknown))}")
        for name, value in fields.items():
            if "dtype" in name:
                if not isinstance(dtype := getattr(torch, str(value), None), torch.dtype):
                    raise ValueError(f"{name} is {value}, which is no dtype of torch")
                fields[name] = dtype
            elif isinstance(value, list):
                fields[name] = tuple(value)
        own = {name: fields.pop(name) for name in own_fields & fields.keys()}
        return cls(case=kind(**fields), **own)


def kind_of(fields: Any, known: Iterable[str]) -> str:
    """The kind of trial that fields of JSON name. Raises ValueError if there is no such kind."""
    kind = fields.get("kind") if isinstance(fields, dict) else None
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(f'"kind" must be one of {", ".join(known)}')
    return kind


@dataclass(frozen=True, kw_only=True)
class Trial(TrialOfCase):
    """A case, the seed of its tensors, and what `verify_families` is asked for."""

    KINDS: ClassVar[dict[str, type]] = {"dense": Case, "varlen": VarlenCase}

    case: Case | VarlenCase
    with_dlse: bool = False
    deterministic: bool = False

    def run(self, device: torch.device | str) -> float:
        """What `verify_families` returns or raises."""
        inputs = make_inputs(self.case, device, self.seed)
        return verify_families(inputs, self.with_dlse, self.deterministic)

    def is_supported(self, device: str) -> bool:
        """Whether the device computes it."""
        return device == "cpu" or unsupported_on_cuda(self.case) is None


def draw(pick: random.Random) -> Trial:
    """A random trial of all features: mostly small, with a liking for borders and empty things."""
    packed = pick.random() < 0.45
    sizes = _lengths(pick) if packed else _shape(pick)
    pairs = sizes.pop("pairs")
    longest = max((max(pair) for pair in pairs), default=0)
    dim, dim_v = _dim(pick), _dim(pick) if pick.random() < 0.3 else None
    heads_k, group = pick.choice((1, 1, 2, 3)), pick.choice((1, 1, 1, 2, 3, 4, 8))
    work = sum(q * k for q, k in pairs) * sizes.get("batch", 1)
    while group * heads_k > 1 and group * heads_k * work > _MOST_SCORES:
        heads_k, group = (1, group) if heads_k > 1 else (1, 1)
    dtype = pick.choice((*_DTYPES, torch.bfloat16, torch.float16))
    problem = sizes | _mask(pick, longest) | _features(pick, dtype)
    problem |= {"dim": dim, "dim_v": dim_v, "heads_k": heads_k, "heads": heads_k * group}
    problem["layout"] = _layout(pick, problem, all(q == k for q, k in pairs))
    if "page_size" not in problem and pick.random() < 0.2:
        problem["sparse"] = pick.choice(("whole", "halves", "pairs"))
        problem["list_heads"] = pick.choice(("one", "keys", "queries"))
    return Trial(
        case=Trial.KINDS["varlen" if packed else "dense"](**problem, dtype=dtype),
        seed=pick.randrange(2**31),
        with_dlse=pick.random() < 0.4,
        deterministic=pick.random() < 0.3,
    )


def _length(pick: random.Random) -> int:
    """Zero, one, the border of a tile, or anything; seldom long."""
    border = pick.choice((16, 32, 64, 128, 192, 256)) + pick.choice((-1, 0, 1))
    anything = pick.randint(2, 300) if pick.random() < 0.9 else pick.randint(300, 1500)
    return pick.choice((pick.randint(0, 1), border, border, anything, anything))


def _pair(pick: random.Random) -> tuple[int, int]:
    seqlen_q = _length(pick)
    return seqlen_q, seqlen_q if pick.random() < 0.4 else _length(pick)


def _shape(pick: random.Random) -> dict[str, Any]:
    """A dense batch, `pairs` its one (seqlen_q, seqlen_k)."""
    seqlen_q, seqlen_k = _pair(pick)
    batch = pick.choice((0, *(1,) * 9, *(2,) * 5, *(3,) * 5))
    pairs = [(seqlen_q, seqlen_k)]
    return {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "pairs": pairs}


def _lengths(pick: random.Random) -> dict[str, Any]:
    """A packed batch, `pairs` its (seqlen_q, seqlen_k)."""
    pairs = [_pair(pick) for _ in range(pick.randint(0, 5))]
    if pick.random() < 0.2:
        pairs = [(seqlen_q, seqlen_q) for seqlen_q, _ in pairs]
    sizes: dict[str, Any] = {"pairs": pairs}
    for place, side in enumerate("qk"):
        lengths = tuple(pair[place] for pair in pairs)
        sizes[f"lengths_{side}"] = lengths
        if pick.random() < 0.3:
            used = (pick.choice((0, n // 2, n, n + 3, pick.randint(0, n))) for n in lengths)
            sizes[f"used_{side}"] = tuple(used)
    if pick.random() < 0.4:
        sizes |= {"rows_before": pick.randint(0, 9), "rows_after": pick.randint(0, 9)}
    if pick.random() < 0.1:
        sizes["max_seqlen"] = pick.randint(0, 200)
    elif pick.random() < 0.15:
        sizes["page_size"] = pick.choice((1, 16, 64, 100))
        sizes.pop("used_k", None)
    return sizes


def _dim(pick: random.Random) -> int:
    common = pick.choice((32, 64, 96, 128, 192, 256))
    return pick.choice((common, common, 8 * pick.randint(1, 32), pick.randint(1, 256)))


def _mask(pick: random.Random, longest: int) -> dict[str, Any]:
    if pick.random() < 0.5:
        return {"is_causal": pick.random() < 0.5}
    sides = (-1, 0, 1, longest // 3, max(longest - 1, 0), longest, 2**31 - 1)
    window = (pick.choice(sides), pick.choice(sides))
    return {"is_causal": pick.random() < 0.3, "window": window}


def _features(pick: random.Random, dtype: torch.dtype) -> dict[str, Any]:
    """Options of the scores and of the softmax, each of them in a quarter of the trials."""
    drawn = {
        "softcap": pick.choice((0.5, 5.0, 30.0)),
        "alibi": pick.choice(("heads", "batch")),
        "dropout_p": pick.choice((1e-6, 0.001, 0.1, 0.17, 0.5, 0.9, 1.0)),
        "softmax_scale": pick.choice((0.0, -0.1, 0.3, 1e-3)),
        "spread": pick.choice((0.1, 3.0)),
        "sink": True,
    }
    features: dict[str, Any] = {name: x for name, x in drawn.items() if pick.random() < 0.25}
    if "sink" in features:
        features["sink_dtype"] = pick.choice((torch.float32, dtype))
    return features


def _layout(pick: random.Random, problem: dict[str, Any], equal_lengths: bool) -> str:
    """A layout that q, k and v can have together; half of the time the plain one.

    In a packed batch, expanded_batch would make all rows equal, and the unfused chain exact.
    """
    packed = "lengths_q" in problem
    layout = pick.choice(LAYOUTS)
    one_dim = problem["dim_v"] in (None, problem["dim"])
    one_shape = one_dim and equal_lengths and problem["heads"] == problem["heads_k"]
    plain = {"qkvpacked": not one_shape, "kvpacked": not one_dim, "expanded_batch": packed}
    if plain.get(layout) or "page_size" in problem or pick.random() < 0.5:
        return "contiguous"
    return layout
