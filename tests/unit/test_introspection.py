"""Kernels, plans and explanations: those of the code that calls go through."""

from __future__ import annotations

import json
import random
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flash_cute import flash_attn_func, flash_attn_qkvpacked_func
from flash_cute import kernels as k
from flash_cute.native import library, limits

ops = torch.ops.flash_cute
A_CALL = k.Problem(batch=4, heads=16, heads_k=4, seqlen_q=4096, head_dim=128)


def chosen(problem, gpu="h100"):
    (id,) = [row.id for row in k.explain(problem, gpu) if row.verdict == "chosen"]
    return id


def reason(problem, id, gpu="h100"):
    """The reason of the first kernel whose id starts with ``id``."""
    return next(row.reason for row in k.explain(problem, gpu) if row.id.startswith(id))


def test_kernels_are_the_rows_of_configs():
    folder = Path(__file__).resolve().parents[2] / "csrc" / "kernels"
    names = re.findall(r"^FAMILY\(([\w:]+)", (folder / "families.def").read_text(), re.MULTILINE)
    tables = [folder / name.replace("::", "/") / "rows.def" for name in names]
    assert sorted(tables) == sorted(folder.rglob("rows.def"))
    text = "".join(table.read_text() for table in tables)
    rows = re.findall(r"^KERNEL\((.*)\)", text, re.MULTILINE)
    assert len(rows) == len(k.kernels()) > 100
    rows.sort(key=lambda row: (row[:6] == "Decode", "TF32" in row, row[:3] == "Bwd"))
    for row, kernel in zip(rows, k.kernels(), strict=True):
        op, arch, dtype, tier, *sizes = row.replace(" ", "").split(",")
        kind = sizes[-1].partition("TileKind::")[2].lower()
        assert kernel.tiles == (kind or "interval")
        assert kernel.id.endswith(f"_{kind}") if kind else kernel.id[-1].isdigit()
        assert (op.lower(), arch.lower()) == (kernel.op, f"sm{kernel.arch}")
        assert (dtype.lower(), tier.lower()) == (kernel.dtype, kernel.tier)
        names = (
            "head_dim",
            "head_dim_v",
            "block_m",
            "block_n",
            "stages",
            "warps",
            "ctas",
            "cluster",
        )
        assert [getattr(kernel, name) for name in names] == [int(x) for x in sizes[: len(names)]]
    assert {kernel.id for kernel in k.kernels() if kernel.built} == set(library.kernels())


def test_registers_fill_no_more_than_an_sm():
    for kernel in k.kernels():
        assert 64 <= kernel.most_registers <= 255
        assert kernel.most_registers * kernel.threads * kernel.ctas <= 65_536


def test_workspace_holds_what_splits_write():
    draw = random.Random(3)
    seen = set()
    for _ in range(300):
        heads_k = draw.choice([1, 2, 8])
        batch, heads, seqlen_q = (
            draw.randint(1, 8),
            heads_k * draw.choice([1, 4]),
            draw.randint(1, 900),
        )
        problem = k.Problem(
            batch=batch, heads=heads, heads_k=heads_k, seqlen_q=seqlen_q,
            seqlen_k=draw.randint(1, 9000), head_dim=8 * draw.randint(1, 32),
        )  # fmt: skip
        plan = k.plan(problem, "h100")
        rows = batch * heads * seqlen_q if plan.num_splits > 1 else 0
        assert plan.workspace_bytes == 4 * plan.num_splits * rows * (plan.kernel.head_dim_v + 1)
        seen.add(plan.num_splits > 1)
    assert seen == {False, True}


def test_plans_over_caches_are_the_ones_explained():
    draw = random.Random(5)
    for _ in range(200):
        heads_k = draw.choice([1, 2, 8])
        problem = k.Problem(
            "decode", batch=draw.randint(1, 64), heads=heads_k * draw.choice([1, 4]),
            heads_k=heads_k, seqlen_q=draw.choice([1, 1, 4, 64, 300]),
            seqlen_k=draw.randint(1, 30_000), lengths=draw.random() < 0.5,
        )  # fmt: skip
        assert k.plan(problem, "h100").kernel.id == chosen(problem)


@pytest.mark.parametrize("page_size", [0, 16])
def test_keys_with_odd_head_dims_are_gathered_for_forward(page_size):
    problem = k.Problem(
        "decode", heads=8, seqlen_q=1, seqlen_k=4096, head_dim=100, page_size=page_size
    )
    assert k.plan(problem, "h100").kernel.id == chosen(problem)
    assert k.plan(problem, "h100").kernel.op == "fwd"


@pytest.mark.parametrize(
    ("change", "id", "words"),
    [
        ({"dtype": torch.float16}, "fwd_sm90_bf16", "computes in bf16, the call in fp16"),
        ({"softcap": True}, "fwd_sm80_bf16_plain_d128", "has no softcap"),
        ({"softmax_scale": -1.0}, "fwd_sm80_bf16_plain_d128", "scale below 0"),
        ({}, "fwd_sm80_bf16_plain_d64", "head dim up to 64, the call has 128"),
        ({"head_dim_v": 256}, "fwd_sm80_bf16_plain_d192x128",
         "head dim of v up to 128, the call has 256"),
        ({"head_dim": 100}, "fwd_sm90_bf16_plain_d128", "vectors on 16-byte boundaries"),
        ({"unaligned": True}, "fwd_sm90_bf16_plain_d128", "vectors on 16-byte boundaries"),
        ({"batch": 0}, "fwd_sm90_bf16_plain_d128", "tensors that are not empty"),
        ({"head_dim": 64}, "fwd_sm90_bf16_plain_d128", 
         "needs head dims above 64 and 64 of v, the call has 64 and 64 of v: a whole block"),
        ({"dropout": True, "window_size": (5, 0)}, "fwd_sm90_bf16_rich_d128",
         "none with a window that is bounded to the left"),
        ({"op": "decode", "num_splits": 2}, "decode_sm90_bf16_rich_d128",
         "splits keys by itself"),
        ({"op": "decode", "page_size": 12, "seqlen_q": 200}, "fwd_sm90_bf16_plain_d128",
         "none of 12 rows"),
        ({"op": "decode", "unaligned": True}, "decode_sm80_bf16_rich_d128", "16-byte boundaries"),
        ({"op": "decode", "head_dim": 100}, "decode_sm80_bf16_rich_d128", "vectors of 8 numbers"),
        ({"op": "decode", "head_dim": 100, "page_size": 16}, "fwd_sm90_bf16_plain_d128",
         "vectors on 16-byte boundaries"),
    ],
)  # fmt: skip
def test_reasons(change, id, words):
    assert words in reason(replace(A_CALL, **change), id)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_caches_of_8_bits_have_kernels_of_their_own(dtype):
    wide = k.Problem("decode", heads=8, heads_k=2, seqlen_k=4096, lengths=True)
    problem = replace(wide, cache_dtype=dtype)
    name = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}[dtype]
    for gpu in ("h100", "a100"):
        chosen = k.plan(problem, gpu).kernel
        assert chosen.cache == name and chosen.dtype == "bf16" and chosen.id.endswith(f"_{name}")
        of_wide = k.plan(wide, gpu).kernel
        assert of_wide.cache == "bf16"
        words = f"reads keys and values of bf16, the call has {name}"
        assert reason(problem, of_wide.id, gpu) == words
        words = f"reads keys and values of {name}, the call has bf16"
        assert reason(wide, chosen.id, gpu) == words
    for dim in (80, 72):
        found = k.supports(replace(problem, head_dim=dim), "h100")
        assert bool(found) == (dim == 80)
    assert any("multiples of 16" in x for x in found.reasons)
    with pytest.raises(ValueError, match=r"cache_dtype is torch\.float16; expected None"):
        replace(problem, cache_dtype=torch.float16)
    with pytest.raises(ValueError, match="only decode takes it"):
        k.plan(k.Problem(cache_dtype=dtype), "h100")


def test_many_rows_of_8_bits_are_not_forward_s():
    problem = k.Problem(
        "decode", heads=64, seqlen_q=64, heads_k=1, seqlen_k=4096, cache_dtype=torch.int8
    )
    assert k.plan(problem, "h100").kernel.op == "decode"


def test_reasons_of_gpus():
    assert reason(A_CALL, "fwd_sm90_bf16_plain_d128", "a100") == (
        "for sm_90 alone, the GPU is sm_80; needs 230400 bytes of shared memory, the GPU has 166912"
    )
    old = k.Gpu("t4", 75, 65_536, 40, 320, 4 << 20)
    assert "for sm_80 and newer, the GPU is sm_75" in reason(A_CALL, "fwd_sm80", old)
    with pytest.raises(RuntimeError, match="no kernel for this call"):
        k.plan(A_CALL, old)


def test_one_kernel_is_chosen_and_every_other_has_a_reason():
    for problem in (A_CALL, replace(A_CALL, op="bwd"), replace(A_CALL, op="decode", seqlen_q=1)):
        for gpu in k.GPUS:
            rows = k.explain(problem, gpu)
            assert chosen(problem, gpu) == k.plan(problem, gpu).kernel.id
            assert [row.id for row in rows if (row.verdict == "chosen") != (row.reason == "")] == []
            assert {row.verdict for row in rows} == {"chosen", "fits", "refused"}


def test_explanations_are_the_words_of_the_error():
    problem = replace(A_CALL, head_dim=257)
    with pytest.raises(RuntimeError) as error:
        k.plan(problem, "h100")
    rows = k.explain(problem, "h100")
    assert str(error.value).splitlines()[1:] == [f"  {row.id}: {row.reason}" for row in rows]


def test_the_error_of_a_call_has_these_words(cuda):
    q = torch.randn(1, 64, 2, 128, device=cuda, dtype=torch.bfloat16)
    fp16 = next(
        kernel.id for kernel in k.kernels() if kernel.built and "fwd_sm80_fp16" in kernel.id
    )
    with k.only(fp16):
        with pytest.raises(RuntimeError) as error:
            ops.fwd(q, q, q)
        rows = k.explain(k.Problem.of(q, q, q))
    lines = [line for line in str(error.value).splitlines() if line.startswith("  fwd_")]
    built = {kernel.id for kernel in k.kernels() if kernel.built}
    assert lines == [f"  {row.id}: {row.reason}" for row in rows if row.id in built]


def test_the_kernel_of_a_plan_is_the_one_that_runs(cuda):
    q = torch.randn(2, 300, 4, 64, device=cuda, dtype=torch.bfloat16)
    plan = k.plan(k.Problem.of(q, q, q))
    with k.only(plan.kernel.id):
        alone = ops.fwd(q, q, q)[0]
    assert torch.equal(alone, ops.fwd(q, q, q)[0])


def test_a_limit_holds_for_its_thread():
    names = [kernel.id for kernel in k.kernels() if kernel.id.startswith("fwd_sm80_bf16_rich")]
    free = k.plan(A_CALL, "h100").kernel.id
    seen = []
    with k.only(*names):
        assert k.plan(A_CALL, "h100").kernel.id in names
        assert "limited to" in reason(A_CALL, free)
        with pytest.raises(ZeroDivisionError), k.only(free):
            raise ZeroDivisionError
        assert k.plan(A_CALL, "h100").kernel.id in names
        other = threading.Thread(target=lambda: seen.append(k.plan(A_CALL, "h100").kernel.id))
        other.start()
        other.join()
    assert seen == [free] == [k.plan(A_CALL, "h100").kernel.id]
    for ids in (("fwd",), (free, "x"), (4,), (["fwd"],)):
        with pytest.raises(ValueError, match="no kernel's id"), k.only(*ids):
            pass
    with pytest.raises(ValueError, match="was given nothing"), k.only():
        pass


def test_an_error_of_a_limit_names_the_kernels_that_it_excludes():
    fitting = [row.id for row in k.explain(A_CALL, "h100") if row.verdict != "refused"]
    with k.only(num_splits=64), pytest.raises(RuntimeError, match=r"within kernels\.only") as error:
        k.plan(A_CALL, "h100")
    lines = str(error.value).splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines[: len(fitting)]] == fitting


def test_an_error_under_a_limit_has_the_reasons_of_its_kernels():
    rows = k.explain(A_CALL, "h100")
    fits = next(row for row in rows if row.verdict != "refused")
    refuses = next(row for row in rows if row.verdict == "refused")
    for ids in ([fits.id], [fits.id, refuses.id]):
        with k.only(*ids, num_splits=64), pytest.raises(RuntimeError) as error:
            k.plan(A_CALL, "h100")
        lines = str(error.value).splitlines()
        assert lines[0].endswith("within kernels.only(); without it these could do it:")
        assert [line.split(":")[0].strip() for line in lines[1:]] == [fits.id]
    with k.only(refuses.id, num_splits=2), pytest.raises(RuntimeError) as error:
        k.plan(A_CALL, "h100")
    assert f"\n  {refuses.id}: {refuses.reason}" in str(error.value)
    assert "within kernels.only" not in str(error.value)


def test_problems_of_the_wrong_kind_are_refused():
    for wrong in (
        {"causal": "no"}, {"softcap": 1}, {"window_size": 5}, {"window_size": (1,)},
        {"window_size": (True, 0)}, {"softmax_scale": "x"}, {"softmax_scale": True},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*; expected"):
            k.Problem(**wrong)
    with pytest.raises(ValueError, match=r"expected a kernels\.Problem"):
        k.plan(None, "h100")
    with pytest.raises(ValueError, match=r"gpu is 1\.5; expected"):
        k.plan(A_CALL, 1.5)


def test_a_limit_holds_for_the_backward_of_its_calls(monkeypatch):
    calls = []
    q = torch.randn(1, 8, 2, 16, requires_grad=True)
    qkv = torch.randn(1, 8, 3, 2, 16, requires_grad=True)
    with k.only(k.plan(A_CALL, "h100").kernel.id):
        ids = limits.current()
        outs = flash_attn_func(q, q, q), flash_attn_qkvpacked_func(qkv)
    monkeypatch.setattr(limits, "_set_limit", calls.append)
    for out in (*outs, flash_attn_func(q, q, q)):
        out.sum().backward()
    assert ids and calls == 2 * [ids, ""]


FEW_QUERIES = k.Problem(heads=32, heads_k=8, seqlen_q=32, seqlen_k=8192)


@pytest.mark.parametrize("num_splits", [1, 2, 5, 33, 64])
@pytest.mark.parametrize("pack_gqa", [1, 2, 4])
def test_num_splits_and_pack_gqa_override_the_estimates(num_splits, pack_gqa):
    """The workspace is that of the given num_splits."""
    free = k.plan(FEW_QUERIES, "h100")
    assert free.pack_gqa == 4 and free.num_splits > 1
    most = -(-2 * 132 // (32 // pack_gqa))  # which fill two waves
    with k.only(free.kernel.id, num_splits=num_splits, pack_gqa=pack_gqa):
        if num_splits > most:
            with pytest.raises(RuntimeError, match=f"num_splits is {num_splits}; .* up to {most} "):
                k.plan(FEW_QUERIES, "h100")
            return
        plan = k.plan(FEW_QUERIES, "h100")
    assert (plan.kernel, plan.num_splits, plan.pack_gqa) == (free.kernel, num_splits, pack_gqa)
    rows = 0 if num_splits == 1 else num_splits * 32 * 32
    assert plan.workspace_bytes == 4 * rows * (128 + 1)
    with k.only(pack_gqa=pack_gqa):
        assert k.plan(FEW_QUERIES, "h100").pack_gqa == pack_gqa


def test_overrides_equal_to_the_estimates_change_nothing():
    free = k.plan(FEW_QUERIES, "h100")
    with k.only(free.kernel.id, num_splits=free.num_splits, pack_gqa=free.pack_gqa):
        assert k.plan(FEW_QUERIES, "h100") == free


UNSUPPORTED = {
    "groups": (FEW_QUERIES, "pack_gqa", 3, "powers of two up to 4"),
    "many queries": (replace(FEW_QUERIES, seqlen_q=65), "pack_gqa", 2, "powers of two up to 1"),
    "dropout": (replace(FEW_QUERIES, dropout=True), "pack_gqa", 2, "powers of two up to 1"),
    "few keys": (replace(FEW_QUERIES, seqlen_k=60), "num_splits", 2, "up to 1"),
    "many tiles": (A_CALL, "num_splits", 2, "up to 1"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_overrides_that_no_kernel_supports_are_refused(name):
    problem, override, number, most = UNSUPPORTED[name]
    fitting = [row.id for row in k.explain(problem, "h100") if row.verdict != "refused"]
    with k.only(**{override: number}):
        with pytest.raises(RuntimeError, match="no kernel for this call") as error:
            k.plan(problem, "h100")
        reasons = {row.id: row.reason for row in k.explain(problem, "h100")}
    assert f"{override} is {number}; it supports {most} for this call" in str(error.value)
    assert all(reasons[id].startswith(f"{override} is {number}; ") for id in fitting)


def test_older_gpus_support_no_overrides_above_1():
    with k.only(num_splits=1, pack_gqa=1):
        assert k.plan(FEW_QUERIES, "a100").kernel.arch == 80
    for given in ({"num_splits": 2}, {"pack_gqa": 2}):
        with k.only(**given), pytest.raises(RuntimeError, match=r"is 2; it supports .*up to 1"):
            k.plan(FEW_QUERIES, "a100")


def test_a_nested_limit_keeps_values_that_it_does_not_set():
    free = k.plan(FEW_QUERIES, "h100")
    rows = k.explain(FEW_QUERIES, "h100")
    other = next(x.id for x in rows if x.verdict == "fits" and "_sm90_" in x.id)
    with k.only(other, num_splits=2):
        with k.only(num_splits=3):
            assert k.plan(FEW_QUERIES, "h100").kernel.id == other
            assert k.plan(FEW_QUERIES, "h100").num_splits == 3
        with k.only(free.kernel.id, pack_gqa=2):
            plan = k.plan(FEW_QUERIES, "h100")
            assert (plan.kernel.id, plan.num_splits, plan.pack_gqa) == (free.kernel.id, 2, 2)
        assert k.plan(FEW_QUERIES, "h100").num_splits == 2
    assert k.plan(FEW_QUERIES, "h100") == free and limits.current() == ""


@pytest.mark.parametrize("name", ["num_splits", "pack_gqa"])
@pytest.mark.parametrize("number", [0, -1, True, 2.0, "2", 2**31])
def test_overrides_that_are_no_counts(name, number):
    with pytest.raises(ValueError, match=f"{name} is {number!r}"), k.only(**{name: number}):
        pass


@pytest.mark.parametrize("line", ["num_splits=0", "num_splits=", "pack_gqa=2x", "splits=2", "="])
def test_a_bad_limit_changes_nothing(line):
    with k.only(num_splits=2):
        with pytest.raises((RuntimeError, ValueError), match="expected num_splits=N or pack_gqa=N"):
            ops.limit_kernels(line)
        assert k.plan(FEW_QUERIES, "h100").num_splits == 2


def test_backward_and_decoding_cut_their_work_as_always():
    for problem in (replace(A_CALL, op="bwd"), replace(FEW_QUERIES, op="decode", seqlen_q=1)):
        free = k.plan(problem, "h100")
        with k.only(num_splits=2, pack_gqa=2):
            assert k.plan(problem, "h100") == free


def test_a_forward_over_a_cache_obeys_overrides():
    chunk = k.Problem("decode", heads=32, heads_k=8, seqlen_q=100, seqlen_k=8192)
    assert k.plan(chunk, "h100").kernel.op == "fwd"
    with k.only(num_splits=3):
        plan = k.plan(chunk, "h100")
    assert plan.kernel.op == "fwd" and plan.num_splits == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"op": "forward"}, "op is 'forward'"),
        ({"dtype": torch.float64}, "float64 has no CUDA kernel"),
        ({"batch": -1}, "batch is -1"),
        ({"heads_k": 0}, "heads_k is 0"),
        ({"heads_k": 5}, "heads is 16; expected a multiple"),
        ({"seqlen_q": 2.0}, "seqlen_q is 2.0"),
        ({"softmax_scale": 1e300}, "softmax_scale is 1e\\+300"),
        ({"softmax_scale": -(2.0**128) * (1 - 2.0**-26)}, "expected a number that fp32 holds"),
        ({"op": "decode", "num_splits": 2, "split_size": 64}, "num_splits is 2 and split_size 64"),
    ],
)
def test_bad_problems(change, words):
    with pytest.raises(ValueError, match=words):
        replace(A_CALL, **change)


def test_bad_gpus():
    with pytest.raises(ValueError, match="gpu is 'h1000'"):
        k.plan(A_CALL, "h1000")
    if not library.has_cuda_kernels():
        with pytest.raises(ValueError, match="has no CUDA"):
            k.plan(A_CALL, 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected '{'"),
        ("{", "expected '\"'"),
        ('{"op": }', "expected a value"),
        ('{"op": "fwd"} x', "expected the end after the object"),
        ('{"op": "fwd"}\0x', "expected the end after the object"),
        ('{"batch": 0x10}', "expected a number"),
        ('{"softmax_scale": 1e300}', "softmax_scale is not finite"),
        ('{"heads": 0}', "heads_k is 0"),
        (
            '{"op": "decode", "num_splits": 2, "split_size": 64}',
            "num_splits is 2 and split_size 64; give one of them",
        ),
        ('{"op": "fw', "a string is not closed"),
        ('{"op": "fwd",}', "expected '\"'"),
        ('{"batch": 1, "batch": 2}', "batch is given twice"),
        ('{"op": 3}', "expected a string"),
        ('{"op": "fwd", "batches": 3}', "unknown field batches"),
        ('{"batch": "3"}', "expected a number"),
        ('{"batch": 1.5}', "expected an integer"),
        ('{"batch": 1e300}', "expected an integer"),
        ('{"heads_k": 0}', "heads_k is 0"),
        ('{"heads": 3, "heads_k": 2}', "heads is 3; expected a multiple of heads_k, 2"),
        ('{"varlen": 1}', "expected a bool"),
        ('{"dtype": "fp8"}', "dtype is fp8"),
        ('{"op": "x"}', "op is x"),
        ('{"gpu_sms": 0}', "gpu_sms is 0"),
    ],
)
def test_bad_json_is_an_error_that_names_it(text, words):
    for op in (ops.plan, ops.explain):
        with pytest.raises(RuntimeError, match=re.escape(words)):
            op(text)


def test_json_may_have_blanks():
    assert json.loads(ops.plan('\n{ "batch" :2 ,"op": "fwd" }\n')) == json.loads(
        ops.plan('{"batch":2}')
    )


def test_gradients_in_fp32_are_hopper_s():
    problem = k.Problem(op="bwd", batch=8, heads=16, seqlen_q=4096, fp32_gradients=True)
    for row in k.explain(problem, "h100"):
        refused_for_it = "rounds gradients" in row.reason
        assert refused_for_it == ("_sm80_" in row.id), row
    assert "_sm90_" in k.plan(problem, "h100").kernel.id
    with pytest.raises(RuntimeError, match="rounds gradients"):
        k.plan(problem, "a100")
    plain = k.plan(replace(problem, fp32_gradients=False), "h100")
    assert k.plan(problem, "h100").workspace_bytes > plain.workspace_bytes
