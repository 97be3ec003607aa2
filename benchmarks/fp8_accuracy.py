"""How far attention of e4m3 inputs is from exact attention, on a GPU.

    python -m benchmarks.fp8_accuracy --json build/fp8_accuracy.json
    FLASH_CUTE_RIVALS=DIR python -m benchmarks.fp8_accuracy --fa3  # beside FlashAttention-3's fp8

* ``rmse``: root mean square error of out against fp64 of q, k and v before they are rounded. These
  have outliers: N(0, 1) + N(0, 100) Bernoulli(.001) in bf16 (arXiv 2407.08608), 2,048 tokens, 4
  heads. Recipes are options of ``quantize_fp8``.
* ``sums``: the signal-to-noise ratio of out over 128k keys, 10 log10(sum ref^2 / sum (out -
  ref)^2) in dB, where ``ref`` sums the same rounded weights and the same values exactly. Scores are
  multiples of 1/4 bit that e4m3 holds, the largest one is the last key's, which kernels see first:
  so weights are e4m3(2^(score + 8)), whatever the order of tiles. Values have a mean of 1/2. out is
  fp16: its own rounding alone gives 74 dB.
* ``planted``: of 1,024 rows that attend to 128k keys each, the share that finds a key. Scores are
  N(0, 1), the planted key's is ``margin``. Values are 1/2 plus one of 64 orthogonal codes of +1 and
  -1, each with a mean of 0, and a row finds its key if out has the largest product with that one's
  code. "bf16" is 16-bit attention of what is not rounded.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flash_cute import flash_attn_func, ops, quantize_fp8
from flash_cute.functional.quantize import Fp8Inputs

RECIPES: dict[str, dict[str, Any]] = {
    "head": {},
    "rows of q and k": {"qk_scaling": "row"},
    "channels of v": {"v_scaling": "channel"},
    "Hadamard": {"hadamard": True},
    "Hadamard, k without its mean": {"hadamard": True, "smooth_k": True},
    "all": {
        "hadamard": True, "smooth_k": True, "qk_scaling": "row", "v_scaling": "channel"
    },
}  # fmt: skip
BITS = tuple(-0.25 * i for i in range(17))  # scores of `sums`
MARGINS = (3.0, 4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 8.0)
CODES = 64
Attend = Callable[[Fp8Inputs, bool], Tensor]  # of values and descales of heads, causal


def outliers(shape: tuple[int, ...], device: str) -> Tensor:
    x = torch.randn(shape, device=device)
    rare = torch.rand(shape, device=device) < 1e-3
    return (x + rare * 10 * torch.randn(shape, device=device)).bfloat16()


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """out in fp64 of (batch, seqlen, heads, dim)."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def ours(x: Fp8Inputs, causal: bool) -> Tensor:
    return flash_attn_func(x.q, x.k, x.v, causal=causal, **x.descales())


def rmse(
    dim: int, causal: bool, device: str, rival: Attend | None, seqlen: int = 2048
) -> dict[str, float]:
    q, k, v = (outliers((1, seqlen, 4, dim), device) for _ in range(3))
    reference = exact(q, k, v, causal)

    def error(out: Tensor) -> float:
        return float((out.double() - reference).square().mean().sqrt())

    found = {name: error(ours(quantize_fp8(q, k, v, **x), causal)) for name, x in RECIPES.items()}
    if rival is not None:
        found["FA3, head"] = error(rival(quantize_fp8(q, k, v), causal))
    found["bf16"] = error(flash_attn_func(q, k, v, causal=causal))
    return found


def decibels(out: Tensor, reference: Tensor) -> float:
    noise = (out.double() - reference).square().sum()
    return float(10 * (reference.square().sum() / noise).log10())


def sums(
    device: str, rival: Attend | None, keys: int = 2**17, heads: int = 16, dim: int = 128
) -> dict[str, float]:
    """Of one query a head, whose first dim alone is not 0. The scale is ln 2: scores are bits."""
    bits = torch.tensor(BITS, device=device)[torch.randint(len(BITS), (keys, heads))]
    bits[-1] = 0.0
    q = torch.zeros(1, 1, heads, dim, device=device)
    q[..., 0] = 1.0
    k = torch.zeros(1, keys, heads, dim, device=device)
    k[0, ..., 0] = bits
    v = torch.randn(1, keys, heads, dim, device=device) + 0.5
    q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    weights = (bits.double() + 8).exp2().to(torch.float8_e4m3fn).double()
    reference = torch.einsum("jh,jhd->hd", weights, v[0].double()) / weights.sum(0)[:, None]
    found = {}
    for name, two_level in (("two levels", True), ("one level", False)):
        out, _ = ops.fp8_fwd(
            q, k, v, softmax_scale=math.log(2), two_level=two_level, dtype=torch.float16
        )
        found[name] = decibels(out[0, 0], reference)
    if rival is not None:  # its scale is that of the head dim
        one = torch.full((1, heads), math.log(2) * dim**0.5, device=device)
        given = Fp8Inputs(q, k, v, one, torch.ones_like(one), torch.ones_like(one), None, None)
        found["FA3 (bf16 out)"] = decibels(rival(given, False)[0, 0], reference)
    return found


def hadamard(size: int, device: str) -> Tensor:
    """A matrix of +1 and -1 with orthogonal rows, of which the first is all +1; a power of two."""
    x = torch.ones(1, 1, device=device)
    while len(x) < size:
        x = torch.cat((torch.cat((x, x), 1), torch.cat((x, -x), 1)))
    return x


def planted(
    device: str, rival: Attend | None, keys: int = 2**17, heads: int = 8, rows: int = 128
) -> list[dict[str, float]]:
    """Hit rates at each of MARGINS. Margins share all else."""
    dim = 128
    q = torch.randn(1, rows, heads, dim, device=device)
    background = torch.randn(1, keys, heads, dim, device=device, dtype=torch.bfloat16)
    codes = hadamard(dim, device)[1 : CODES + 1]
    of_key = torch.randint(CODES, (keys, heads), device=device)
    place = torch.stack([torch.randperm(keys)[:rows] for _ in range(heads)], 1).to(device)
    head = torch.arange(heads, device=device)
    v = (codes[of_key][None] + 0.5).bfloat16()
    expected = of_key[place, head]
    q = q / q.norm(dim=-1, keepdim=True) * dim**0.5  # scores of the background are N(0, 1)
    found = []
    for margin in MARGINS:
        k = background.clone()
        k[0, place, head] = (q[0] * margin * dim**-0.5).bfloat16()
        x = quantize_fp8(q.bfloat16(), k, v)
        one_level = ops.fp8_fwd(
            x.q, x.k, x.v, x.q_descale, x.k_descale, x.v_descale, two_level=False
        )[0]
        outs = {
            "bf16": flash_attn_func(q.bfloat16(), k, v), "two levels": ours(x, False),
            "one level": one_level,
        }  # fmt: skip
        if rival is not None:
            outs["FA3"] = rival(x, False)
        hits = {
            name: float(((out[0].float() @ codes.T).argmax(-1) == expected).float().mean())
            for name, out in outs.items()
        }
        found.append({"margin": margin, **hits})
    return found


def fa3() -> Attend:
    """FlashAttention-3's fp8 forward, of descales of heads."""
    sys.path.insert(0, str(Path(os.environ["FLASH_CUTE_RIVALS"]) / "fa3fp8"))
    function = importlib.import_module("fa3_fwd_interface").flash_attn_func

    def attend(x: Fp8Inputs, causal: bool) -> Tensor:
        heads = (len(x.q), x.k.shape[2])
        q_descale, k_descale, v_descale = (y.expand(heads) for y in x[3:6] if y is not None)
        out = function(
            x.q, x.k, x.v, causal=causal, q_descale=q_descale, k_descale=k_descale,
            v_descale=v_descale,
        )  # fmt: skip
        return out[0] if isinstance(out, tuple) else out

    return attend


def table(rows: list[dict[str, Any]], form: str) -> str:
    """Rows as a table in Markdown."""
    names = list(rows[0])
    lines = [names, ["---"] * len(names)]
    for row in rows:
        lines.append([format(x, form) if isinstance(x, float) else str(x) for x in row.values()])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fa3", action="store_true", help="FLASH_CUTE_RIVALS holds fa3fp8/")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    torch.manual_seed(options.seed)
    rival = fa3() if options.fa3 else None
    with torch.no_grad():
        errors = [
            {"case": f"d{dim} {'causal' if causal else 'full'}"} | rmse(dim, causal, "cuda", rival)
            for dim in (64, 128, 256)
            for causal in (False, True)
        ]
        found = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__,
            "seed": options.seed, "rmse": errors, "sums": sums("cuda", rival),
            "planted": planted("cuda", rival),
        }  # fmt: skip
    print(table(errors, ".2e"), table([found["sums"]], ".1f"), sep="\n\n")
    print("\n" + table(found["planted"], ".3f"))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
