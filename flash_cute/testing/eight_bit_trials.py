"""Random trials of the ops of 8 bits: attention of e4m3 inputs, caches, and rounding to e4m3."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from flash_cute.ops import has_fp8_attention
from flash_cute.ops.typed import OPS
from flash_cute.testing import e4m3, quantize
from flash_cute.testing.bounds import check_same_bits
from flash_cute.testing.cases import Case, Inputs, VarlenCase, make_inputs
from flash_cute.testing.kvcache import CacheCase
from flash_cute.testing.quantized_kvcache import E4M3, INT8, make_quantized_inputs, verify
from flash_cute.testing.trials import Trial, TrialOfCase, kind_of
from flash_cute.testing.trials import draw as draw_wide

_NAN = 127  # the bits of e4m3's
_MOST_NUMBERS = 2**25  # of a trial: queries x keys x heads x dims
_OPTIONS = ("softmax_scale", "is_causal", "window_size_left", "window_size_right", "sink")
_OF_ROWS, _OF_CHANNELS = (
    ("none", "tensor", "heads", "rows"),
    ("none", "tensor", "heads", "channels"),
)
_EXPANDED = ("expanded_heads", "expanded_batch")  # several rows are one in memory


@dataclass(frozen=True)
class _Sequence:
    """Sequence number `batch`: the indices of its rows in q, and in k and v."""

    batch: int
    queries: tuple[Any, ...]
    keys: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Fp8Trial(TrialOfCase):
    """A call of fp8_fwd or fp8_varlen_fwd. A descale is "none", one number for the "tensor", or one
    for each of the "heads" of a sequence, of the "rows" of q or k, or of the "channels" of v. Rows
    that no sequence uses, and their descales, are NaN."""

    KINDS: ClassVar[dict[str, type]] = {"fp8_dense": Case, "fp8_varlen": VarlenCase}

    case: Case | VarlenCase
    q_descale: str = "none"
    k_descale: str = "none"
    v_descale: str = "none"
    two_level: bool = True
    out_dtype: torch.dtype = torch.bfloat16

    def is_supported(self, device: str) -> bool:
        """Whether the device has such kernels."""
        return has_fp8_attention(torch.device(device))

    def run(self, device: torch.device | str) -> float:
        """Asserts that results are the oracle's, and those of a second call.

        Returns:
            The largest error, as a fraction of its bound.
        """
        inputs = make_inputs(replace(self.case, dtype=E4M3), device, self.seed)
        descales, sequences = self._descales(inputs), _sequences(inputs)
        _spoil(inputs, descales, sequences, in_tensors=self.case.layout not in _EXPANDED)
        call = {name: inputs.options[name] for name in _OPTIONS} | inputs.lengths
        call |= {f"{name}_descale": x for name, x in descales.items()}
        call |= {"two_level": self.two_level, "dtype": self.out_dtype}
        op = OPS.fp8_varlen_fwd if inputs.lengths else OPS.fp8_fwd
        results = op(inputs.q, inputs.k, inputs.v, **call)
        again = op(inputs.q, inputs.k, inputs.v, **call)
        for name, x, y in zip(("out", "softmax_lse"), again, results, strict=True):
            check_same_bits(name, x, y)
        out, lse = results[0], results[1].transpose(-1, -2)  # both (.., rows, heads, ..)
        unused = torch.ones(out.shape[:-2], dtype=torch.bool)
        worst = 0.0
        for one in sequences:
            unused[one.queries] = False
            exact = e4m3.exact(
                *_meant(inputs, descales, one), self.case.is_causal, self.case.window,
                self.case.softmax_scale, inputs.options["sink"], device,
            )  # fmt: skip
            found = out[one.queries][None], lse[one.queries].transpose(0, 1)[None]
            worst = max(worst, e4m3.check(*found, exact, self.out_dtype, self.two_level))
        assert not out.cpu()[unused].any(), "out: rows of no sequence are not 0"
        assert lse.cpu()[unused].isneginf().all(), "softmax_lse: rows of no sequence are not -inf"
        return worst

    def _descales(self, inputs: Inputs) -> dict[str, Tensor | None]:
        """In the shapes of the ops; on odd seeds with other strides."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        batch = len(inputs.lengths["cu_seqlens_q"]) - 1 if inputs.lengths else len(inputs.q)
        heads = (batch, inputs.k.shape[-2])

        def scales(*shape: int) -> Tensor:
            x = torch.exp(torch.randn(shape, generator=generator) / 3).to(inputs.q.device)
            return x.transpose(0, -1).contiguous().transpose(0, -1) if self.seed % 2 else x

        def of(kind: str, x: Tensor) -> Tensor | None:
            match kind:
                case "none":
                    return None
                case "tensor":
                    return scales(1, 1).expand(heads)
                case "heads":
                    return scales(*heads)
                case "rows":
                    return scales(*(1,) * (x.dim() == 3), *x.shape[:-1])
                case "channels":
                    return scales(*heads, x.shape[-1])
            raise ValueError(
                f"a descale is {kind!r}; expected {', '.join((*_OF_ROWS, 'channels'))}"
            )

        kinds = {"q": self.q_descale, "k": self.k_descale, "v": self.v_descale}
        return {name: of(kind, getattr(inputs, name)) for name, kind in kinds.items()}


def _sequences(inputs: Inputs) -> list[_Sequence]:
    """By the offsets and lengths that the op is given."""
    given = inputs.lengths
    if not given:
        whole = slice(None)
        return [_Sequence(b, (b, whole), (b, whole)) for b in range(len(inputs.q))]

    def spans(side: str) -> list[tuple[int, int]]:
        """First row and length of each sequence."""
        offsets, used = given[f"cu_seqlens_{side}"].tolist(), given[f"seqused_{side}"]
        lengths = [last - first for first, last in itertools.pairwise(offsets)]
        if used is not None:
            lengths = list(map(min, lengths, used.tolist()))
        return [
            (x, min(n, given[f"max_seqlen_{side}"])) for x, n in zip(offsets, lengths, strict=False)
        ]

    table, found = given.get("block_table"), []
    for b, ((row, rows), (key, keys)) in enumerate(zip(spans("q"), spans("k"), strict=True)):
        at: tuple[Any, ...] = (slice(key, key + keys),)
        if table is not None:
            place, size = torch.arange(keys), inputs.k.shape[1]
            at = (table[b].cpu().long()[place // size], place % size)
        found.append(_Sequence(b, (slice(row, row + rows),), at))
    return found


def _spoil(
    inputs: Inputs,
    descales: dict[str, Tensor | None],
    sequences: list[_Sequence],
    in_tensors: bool,
) -> None:
    """NaN in rows that no sequence uses, and in their descales."""
    for name, side in (("q", "queries"), ("k", "keys"), ("v", "keys")):
        x, descale = getattr(inputs, name), descales[name]
        unused = torch.ones(x.shape[:-2], dtype=torch.bool)
        for one in sequences:
            unused[getattr(one, side)] = False
        unused = unused.to(x.device)
        if in_tensors:
            x.view(torch.int8)[unused] = _NAN
        if descale is not None and name != "v" and descale.dim() == 3:
            descale[unused if x.dim() == 4 else unused[None]] = torch.nan


def _meant(
    inputs: Inputs, descales: dict[str, Tensor | None], one: _Sequence
) -> tuple[Tensor, Tensor, Tensor]:
    """What q, k and v of a sequence stand for, (1, rows, heads, dim) in fp64."""
    found = []
    for name, at in (("q", one.queries), ("k", one.keys), ("v", one.keys)):
        x, descale = getattr(inputs, name), descales[name]
        rows = x[at].double()
        if descale is not None:
            factor = descale.double()
            if factor.dim() == 3 and name != "v":
                rows = rows * (factor if x.dim() == 4 else factor[0])[at][..., None]
            else:  # of kv heads, and of their channels
                factor = factor[one.batch].view(factor.shape[1], -1)
                rows = rows * factor.repeat_interleave(rows.shape[1] // len(factor), 0)
        found.append(rows[None])
    return found[0], found[1], found[2]


@dataclass(frozen=True, kw_only=True)
class CacheTrial(TrialOfCase):
    """A call over a cache of 8 bits, whose descales are of "heads", of "tokens", or "none"."""

    KINDS: ClassVar[dict[str, type]] = {"cache": CacheCase}

    case: CacheCase
    cache_dtype: torch.dtype = E4M3
    k_kind: str = "heads"
    v_kind: str = "heads"

    def is_supported(self, device: str) -> bool:
        """Any device computes it."""
        return device in ("cpu", "cuda")

    def run(self, device: torch.device | str) -> float:
        """Asserts that results are the oracle's, and those of a second call; returns the largest
        error, as a fraction of its bound."""
        kinds = self.k_kind, self.v_kind
        inputs = make_quantized_inputs(self.case, device, self.cache_dtype, kinds, self.seed)
        results, again = inputs.run(), inputs.run()
        for name, x, y in zip(("out", "softmax_lse"), again, results, strict=True):
            check_same_bits(name, x, y)
        return verify(inputs, *results)


@dataclass(frozen=True, kw_only=True)
class QuantizeTrial:
    """A call of quantize_e4m3, drawn by its seed."""

    seed: int = 0

    def is_supported(self, device: str) -> bool:
        """Any device computes it."""
        return device in ("cpu", "cuda")

    def run(self, device: torch.device | str) -> float:
        """Asserts that the CPU's results are those of fp64, and CUDA's the CPU's."""
        call = quantize.drawn(self.seed)
        if torch.device(device).type == "cuda":
            quantize.check_bits(call)
        return quantize.check_values(call)

    def to_json(self) -> str:
        return json.dumps({"kind": "quantize", "seed": self.seed})

    @classmethod
    def from_json(cls, text: str) -> QuantizeTrial:
        fields: Any = json.loads(text)
        kind_of(fields, ("quantize",))
        if unknown := fields.keys() - {"kind", "seed"}:
            raise ValueError(f"no such field: {', '.join(sorted(unknown))}")
        return cls(seed=fields["seed"])


AnyTrial = Trial | Fp8Trial | CacheTrial | QuantizeTrial
_READERS: dict[str, Callable[[str], AnyTrial]] = {
    **{kind: cls.from_json for cls in (Trial, Fp8Trial, CacheTrial) for kind in cls.KINDS},
    "quantize": QuantizeTrial.from_json,
}


def from_json(text: str) -> AnyTrial:
    """The trial of an op that its `to_json` wrote. Raises ValueError if it is none."""
    return _READERS[kind_of(json.loads(text), _READERS)](text)


def draw(pick: random.Random) -> Fp8Trial | CacheTrial | QuantizeTrial:
    """A random trial, mostly small."""
    (draw_one,) = pick.choices((_fp8, _cache, _quantize), (5, 2, 1))
    return draw_one(pick)


def _quantize(pick: random.Random) -> QuantizeTrial:
    return QuantizeTrial(seed=pick.randrange(2**31))


def _fp8(pick: random.Random) -> Fp8Trial:
    """The sizes, masks and layouts of other trials, and no more keys than fp64 has time for."""
    wide = draw_wide(pick)
    off: dict[str, Any] = {
        "softcap": 0.0, "alibi": "", "dropout_p": 0.0, "sparse": "", "list_heads": "one",
        "sink_dtype": torch.float32, "dtype": E4M3,
    }  # fmt: skip
    case = replace(wide.case, **off)
    if isinstance(case, Case):
        pairs = case.batch * case.seqlen_q * case.seqlen_k
    else:
        pairs = sum(q * k for q, k in zip(case.lengths_q, case.lengths_k, strict=True))
    if pairs * case.heads * max(case.dim, case.dim_v or 0) > _MOST_NUMBERS:
        case = replace(case, heads=1, heads_k=1, layout="contiguous")
    if pairs * max(case.dim, case.dim_v or 0) > _MOST_NUMBERS:
        case = replace(case, dim=pick.randint(1, 16), dim_v=pick.randint(1, 16))
    return Fp8Trial(
        case=case, seed=wide.seed, q_descale=pick.choice(_OF_ROWS),
        k_descale=pick.choice(_OF_ROWS), v_descale=pick.choice(_OF_CHANNELS),
        two_level=pick.random() < 0.5, out_dtype=pick.choice((torch.bfloat16, torch.float16)),
    )  # fmt: skip


def _cache(pick: random.Random) -> CacheTrial:
    lengths = tuple(
        pick.choice((0, 1, pick.randint(2, 40), pick.randint(40, 700)))
        for _ in range(pick.randint(1, 5))
    )
    heads_k, dim = pick.choice((1, 1, 2, 3)), _cached_dim(pick)
    queries: int | tuple[int, ...] = pick.choice((1, 1, 2, 5, pick.randint(6, 40)))
    if pick.random() < 0.3:
        queries = tuple(pick.choice((0, 1, 3, pick.randint(4, 40))) for _ in lengths)
    drawn: dict[str, Any] = {
        "page_size": pick.choice((1, 16, 64, 100, 256)), "leftpad": True, "is_causal": True,
        "window": (pick.choice((-1, 0, 7, 40)), pick.choice((-1, 0, 9))), "sink": True,
        "softcap": pick.choice((5.0, 20.0)), "alibi": pick.choice(("heads", "batch")),
        "softmax_scale": pick.choice((-0.1, 0.05, 0.3)), "dim_v": _cached_dim(pick),
        **pick.choice(({"num_splits": pick.randint(1, 9)}, {"split_size": 128})),
    }  # fmt: skip
    given = {name: x for name, x in drawn.items() if pick.random() < 0.35}
    if "page_size" not in given and pick.random() < 0.3:
        given["batch_idx"] = True
    cache_dtype = pick.choice((E4M3, INT8))
    kinds = ("heads", "tokens", "none") if cache_dtype == E4M3 else ("heads", "tokens")
    case = CacheCase(
        lengths=lengths, seqlens_q=queries, heads=heads_k * pick.choice((1, 2, 4, 5, 8, 16)),
        heads_k=heads_k, dim=dim, dtype=pick.choice((torch.bfloat16, torch.float16)), **given,
    )  # fmt: skip
    return CacheTrial(
        case=case, seed=pick.randrange(2**31), cache_dtype=cache_dtype, k_kind=pick.choice(kinds),
        v_kind=pick.choice(kinds),
    )  # fmt: skip


def _cached_dim(pick: random.Random) -> int:
    """Kernels read vectors of 16 numbers."""
    return pick.choice((64, 128, 256, 16 * pick.randint(1, 16)))
