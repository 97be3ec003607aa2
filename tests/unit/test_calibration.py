"""A calibration in use: plans and explanations follow it where the kernel fits, and files."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace

import pytest
import torch

from flash_cute import kernels
from flash_cute.kernels import GPUS, Problem
from flash_cute.tuning import Choice, calibration

PROBLEM = Problem(batch=4, heads=32, heads_k=8, seqlen_q=4096, causal=True)
H100 = GPUS["h100"]


@pytest.fixture(autouse=True)
def without_calibration():
    with calibration.set_aside():
        yield


def fitting(problem, gpu="h100"):
    return [row.id for row in kernels.explain(problem, gpu) if row.verdict != "refused"]


def others(problem, gpu="h100"):
    """Those that could do it, and are not planned."""
    planned = kernels.plan(problem, gpu).kernel.id
    return [i for i in fitting(problem, gpu) if i != planned and i.startswith(problem.op)]


def use(*rules):
    torch.ops.flash_cute.set_calibration("\n".join(f"{b} = {k}" for b, k in rules))


PROBLEMS = {
    "causal": PROBLEM,
    "packed": replace(PROBLEM, varlen=True),
    "window": replace(PROBLEM, causal=False, window_size=(256, 0)),
    "rules": replace(PROBLEM, softcap=True, dropout=True),
    "fp32": replace(PROBLEM, dtype=torch.float32),
    "backward": replace(PROBLEM, op="bwd", head_dim=64),
    "deterministic": replace(PROBLEM, op="bwd", head_dim=64, deterministic=True),
    "decode": replace(PROBLEM, op="decode", seqlen_q=1, seqlen_k=8192),
    "pages": replace(PROBLEM, op="decode", seqlen_q=1, seqlen_k=8192, page_size=64, lengths=True),
}


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_plan_takes_the_calibrated_kernel(name, coarse):
    problem = PROBLEMS[name]
    bucket = kernels.bucket(problem, "h100")
    for kernel in others(problem):
        use((bucket.partition(" | ")[0] if coarse else bucket, kernel))
        assert kernels.plan(problem, "h100").kernel.id == kernel
        verdicts = {row.id: row for row in kernels.explain(problem, "h100")}
        assert verdicts[kernel].verdict == "chosen"
        use()
        assert kernels.plan(problem, "h100").kernel.id != kernel


def test_the_finer_bucket_comes_first():
    bucket, (first, second, *_) = kernels.bucket(PROBLEM, "h100"), others(PROBLEM)
    use((bucket.partition(" | ")[0], first), (bucket, second))
    assert kernels.plan(PROBLEM, "h100").kernel.id == second
    assert kernels.plan(replace(PROBLEM, batch=64), "h100").kernel.id == first


DIFFERENT = {
    "op": {"op": "bwd"},
    "dtype": {"dtype": torch.float16},
    "head_dim": {"head_dim": 64},
    "head_dim_v": {"head_dim": 192, "head_dim_v": 128},
    "mask": {"causal": False},
    "window": {"window_size": (100, -1)},
    "rules": {"softcap": True},
    "packed": {"varlen": True},
    "longer": {"seqlen_q": 8192},
    "more keys": {"seqlen_k": 8192},
    "more work": {"batch": 8},
    "group": {"heads_k": 32},
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_other_calls_are_in_other_buckets(name):
    other = replace(PROBLEM, **DIFFERENT[name])
    assert kernels.bucket(other, "h100") != kernels.bucket(PROBLEM, "h100")
    planned = kernels.plan(other, "h100")
    use((kernels.bucket(PROBLEM, "h100"), others(PROBLEM)[0]))
    assert kernels.plan(other, "h100") == planned


def test_other_gpus_are_in_other_buckets():
    buckets = {kernels.bucket(PROBLEM, name) for name in GPUS}
    assert len(buckets) == len(GPUS)


def test_lengths_within_a_power_of_two_share_a_bucket():
    at = {n: kernels.bucket(replace(PROBLEM, seqlen_q=n), "h100") for n in (4095, 4096, 8191, 8192)}
    assert at[4096] == at[8191] and at[4095] != at[4096] and at[8191] != at[8192]


def test_a_kernel_that_cannot_is_passed_over():
    planned, narrow = kernels.plan(PROBLEM, "h100"), replace(PROBLEM, head_dim=64)
    too_narrow = kernels.plan(narrow, "h100").kernel.id
    use((kernels.bucket(PROBLEM, "h100"), too_narrow))
    assert kernels.plan(PROBLEM, "h100") == planned
    reasons = {row.id: row.reason for row in kernels.explain(PROBLEM, "h100")}
    assert reasons[too_narrow].endswith("the calibration names it in vain")
    assert reasons[too_narrow].startswith("head dim up to 64, the call has 128")


def test_a_limit_comes_before_the_calibration():
    first, second, *_ = others(PROBLEM)
    use((kernels.bucket(PROBLEM, "h100"), first))
    with kernels.only(second):
        assert kernels.plan(PROBLEM, "h100").kernel.id == second


def test_explain_says_that_others_were_slower():
    kernel = others(PROBLEM)[0]
    use((kernels.bucket(PROBLEM, "h100"), kernel))
    fits = [row for row in kernels.explain(PROBLEM, "h100") if row.verdict == "fits"]
    assert fits
    assert {row.reason for row in fits} == {f"slower than {kernel} by the calibration in use"}


def test_threads_plan_while_it_changes():
    planned, kernel = kernels.plan(PROBLEM, "h100").kernel.id, others(PROBLEM)[0]
    rule = (kernels.bucket(PROBLEM, "h100"), kernel)
    with ThreadPoolExecutor(4) as pool:
        plans = [pool.submit(lambda: kernels.plan(PROBLEM, "h100").kernel.id) for _ in range(200)]
        for _ in range(200):
            use(rule)
            use()
    assert {plan.result() for plan in plans} <= {planned, kernel}


def test_parted_keys_do_not_depend_on_it():
    problem = replace(PROBLEMS["decode"], num_splits=4)
    planned = kernels.plan(problem, "h100")
    use((kernels.bucket(problem, "h100"), others(problem)[0]))
    assert kernels.plan(problem, "h100") == planned


def test_decoding_that_was_measured_is_preferred_to_forward():
    problem = replace(PROBLEM, op="decode", seqlen_q=1024, seqlen_k=8192)
    assert kernels.plan(problem, "h100").kernel.op == "fwd"
    kernel = next(i for i in fitting(problem) if i.startswith("decode"))
    use((kernels.bucket(problem, "h100"), kernel))
    assert kernels.plan(problem, "h100").kernel.id == kernel


FEW_QUERIES = Problem(heads=32, heads_k=8, seqlen_q=16, seqlen_k=8192)


@pytest.mark.parametrize("num_splits", [None, 1, 3, 8])
@pytest.mark.parametrize("pack_gqa", [None, 1, 2, 4])
def test_a_plan_takes_the_calibrated_numbers(num_splits, pack_gqa):
    bucket = kernels.bucket(FEW_QUERIES, "h100")
    packing = [i for i in fitting(FEW_QUERIES) if i.endswith("_m128_n128_s2_w8_c1_x1")]
    assert len(packing) == 2
    for kernel in packing:
        choice = Choice(kernel, num_splits, pack_gqa)
        use((bucket, choice))
        measured = kernels.plan(FEW_QUERIES, "h100")
        use()
        assert measured.kernel.id == kernel and choice.numbers.items() <= vars(measured).items()
        if choice.numbers:
            with kernels.only(kernel, **choice.numbers):
                assert measured == kernels.plan(FEW_QUERIES, "h100")


def test_numbers_that_a_call_cannot_have_are_passed_over():
    bucket, free = kernels.bucket(FEW_QUERIES, "h100"), kernels.plan(FEW_QUERIES, "h100")
    for choice in (
        Choice(free.kernel.id, num_splits=64),  # more than fill two waves
        Choice(free.kernel.id, pack_gqa=3),
        Choice(free.kernel.id, pack_gqa=8),
        Choice(free.kernel.id, 1000, 16),
    ):
        use((bucket, choice))
        assert kernels.plan(FEW_QUERIES, "h100") == free
    use((bucket, Choice(free.kernel.id, 2, 3)))
    plan = kernels.plan(FEW_QUERIES, "h100")
    assert (plan.num_splits, plan.pack_gqa) == (2, free.pack_gqa)


def test_calibrated_numbers_are_those_of_their_kernel():
    bucket, free = kernels.bucket(FEW_QUERIES, "h100"), kernels.plan(FEW_QUERIES, "h100")
    kernel = others(FEW_QUERIES)[0]
    use((bucket, Choice(kernel, num_splits=2)))
    with kernels.only(free.kernel.id):
        assert kernels.plan(FEW_QUERIES, "h100") == free
    with kernels.only(kernel):
        assert kernels.plan(FEW_QUERIES, "h100").num_splits == 2


def test_numbers_of_a_limit_come_before_the_calibration():
    bucket, free = kernels.bucket(FEW_QUERIES, "h100"), kernels.plan(FEW_QUERIES, "h100")
    use((bucket, Choice(free.kernel.id, 2, 1)))
    with kernels.only(num_splits=3):
        plan = kernels.plan(FEW_QUERIES, "h100")
    assert (plan.num_splits, plan.pack_gqa) == (3, free.pack_gqa)


BAD_LINES = {
    "a bucket": "a bucket",
    "no kernel": "a bucket = no_kernel",
    "nothing": "a bucket = ",
    "below 1": "a bucket = {fwd} num_splits=0",
    "no number": "a bucket = {fwd} pack_gqa=two",
    "too large": "a bucket = {fwd} pack_gqa=99999999999",
    "no name": "a bucket = {fwd} 2",
    "another name": "a bucket = {fwd} order=2",
    "backward": "a bucket = bwd_sm80_bf16_plain_d64x64_m64_n128_s2_w4_c2 num_splits=2",
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_changes_nothing(name):
    kernel = others(PROBLEM)[0]
    use((kernels.bucket(PROBLEM, "h100"), kernel))
    with pytest.raises((RuntimeError, ValueError), match=r"a bucket|kernel|num_splits"):
        torch.ops.flash_cute.set_calibration(BAD_LINES[name].format(fwd=kernel))
    assert kernels.plan(PROBLEM, "h100").kernel.id == kernel


def stored(path, gpu=H100):
    rules = {kernels.bucket(PROBLEM, gpu): {"kernel": others(PROBLEM)[0]}}
    calibration.store(gpu, rules, path)
    return {bucket: Choice(entry["kernel"]) for bucket, entry in rules.items()}


def test_a_file_is_used_from_then_on(tmp_path):
    path = tmp_path / "deep" / "calibration.json"
    rules = stored(path)
    planned = kernels.plan(PROBLEM, "h100").kernel.id
    assert calibration.load(path) == calibration.Loaded(rules)
    assert kernels.plan(PROBLEM, "h100").kernel.id == planned
    assert kernels.use_calibration(path) == calibration.Loaded(rules)
    assert [Choice(kernels.plan(PROBLEM, "h100").kernel.id)] == list(rules.values())
    calibration.stop_using()
    assert kernels.plan(PROBLEM, "h100").kernel.id == planned


BAD = {
    "corrupt": ('{"version": 1, "sec', "Unterminated string"),
    "no object": ("[]", "no calibration file of version 1"),
    "another version": ('{"version": 7, "sections": {}}', "its version is 7"),
    "no text": (b"\xff\xfe\x00", "codec can't decode"),
    "foreign": ('{"version": 1, "sections": {"x": {"gpu": 3}}}', "section 'x' has no texts gpu"),
    "nested": ("[" * 100_000, "nested too deeply"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_a_miss_and_is_kept_aside(name, tmp_path, caplog):
    content, reason = BAD[name]
    path = tmp_path / "calibration.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with caplog.at_level(logging.WARNING, "flash_cute"):
        loaded = kernels.use_calibration(path)
    assert loaded.kernels == {} and reason in loaded.misses[0].reason
    assert reason in caplog.text
    before = path.read_bytes()
    rules = stored(path)
    assert calibration.load(path).kernels == rules
    assert (tmp_path / "calibration.json.unreadable").read_bytes() == before


def test_no_file_is_a_miss(tmp_path):
    (miss,) = calibration.load(tmp_path / "nothing.json").misses
    assert "No such file" in miss.reason


def test_a_foreign_section_is_a_miss(tmp_path):
    path = tmp_path / "calibration.json"
    stored(path)
    (miss,) = calibration.load(path, GPUS["h200"]).misses
    assert "another GPU than h200, 132 SMs" in miss.reason
    content = json.loads(path.read_text())
    (section,) = content["sections"].values()
    section["library"] = "0" * 64
    path.write_text(json.dumps(content))
    loaded = calibration.load(path)
    assert loaded.kernels == {} and "another build of the library" in loaded.misses[0].reason


def test_an_unknown_kernel_is_a_miss(tmp_path):
    path = tmp_path / "calibration.json"
    bucket = kernels.bucket(FEW_QUERIES, H100)
    calibration.store(H100, {bucket: {"kernel": "no_kernel"}}, path)
    rules = stored(path)
    loaded = calibration.load(path)
    assert loaded.kernels == rules
    assert loaded.misses == (calibration.Miss(bucket, "no_kernel is no kernel's id"),)


def test_a_section_that_is_none_is_named(tmp_path):
    path = tmp_path / "calibration.json"
    for section in ({"gpu": "x", "sms": True, "library": "y", "buckets": {}}, [], None):
        path.write_text(json.dumps({"version": 1, "sections": {"mine": section}}))
        assert "section 'mine' has no texts gpu" in calibration.load(path).misses[0].reason
    path.write_text('{"version": 1, "sections": []}')
    assert "expected an object" in calibration.load(path).misses[0].reason


def test_a_pipe_is_a_miss(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert "no regular file" in kernels.use_calibration(path).misses[0].reason


ANY_BUCKET = kernels.bucket(PROBLEM, "h100")
NO_RULES = {
    "word": ("foo", None, "kernels.bucket"),
    "power": (ANY_BUCKET.replace("q2^12", "q2^x"), None, "kernels.bucket"),
    "two lines": (f"{ANY_BUCKET}\n{ANY_BUCKET}", None, "kernels.bucket"),
    "SMs": (ANY_BUCKET.replace("SMs132", "SMs108"), None, "108 SMs in a section of one with 132"),
    "no entry": (ANY_BUCKET, 5, 'expected {"kernel": ID}'),
    "no kernel": (ANY_BUCKET, {"num_splits": 2}, 'expected {"kernel": ID}'),
    "misspelt": (ANY_BUCKET, {"num_split": 2}, "has num_split; expected kernel, num_splits"),
    "op": (ANY_BUCKET.replace(" fwd ", " bwd "), None, "does not do bwd in bf16"),
    "dtype": (ANY_BUCKET.replace("bf16", "fp16"), None, "does not do fwd in fp16"),
    "splits": (ANY_BUCKET, {"num_splits": 65}, "num_splits is 65; at most 64 are possible"),
    "pack": (ANY_BUCKET, {"pack_gqa": 3}, "pack_gqa is 3; expected a power of two"),
}


@pytest.mark.parametrize("name", NO_RULES)
def test_what_no_call_can_take_is_a_miss(name, tmp_path):
    bucket, entry, reason = NO_RULES[name]
    path, free = tmp_path / "calibration.json", kernels.plan(PROBLEM, "h100")
    named = entry is None or (isinstance(entry, dict) and name != "no kernel")
    whole = {"kernel": free.kernel.id, **(entry or {})} if named else entry
    calibration.store(H100, {bucket: whole}, path)
    (miss,) = kernels.use_calibration(path).misses
    assert miss.what == bucket and reason in miss.reason
    assert kernels.plan(PROBLEM, "h100") == free


def test_buckets_of_all_kinds_of_calls_are_taken(tmp_path):
    path = tmp_path / "calibration.json"
    rules = {}
    for problem in PROBLEMS.values():
        whole = kernels.bucket(problem, "h100")
        kernel = next(i for i in fitting(problem) if i.startswith(problem.op))
        rules |= {whole: {"kernel": kernel}, whole.partition(" | ")[0]: {"kernel": kernel}}
    calibration.store(H100, rules, path)
    loaded = calibration.load(path)
    assert loaded.misses == () and loaded.kernels.keys() == rules.keys()


def test_a_gpu_may_be_given_by_name(tmp_path):
    path = tmp_path / "calibration.json"
    assert kernels.use_calibration(path, "h100").misses  # there is no file
    rules = stored(path)
    assert calibration.load(path, "h100").kernels == rules
    with pytest.raises(ValueError, match="gpu is 'b200'; expected one of"):
        kernels.use_calibration(path, "b200")


@pytest.mark.parametrize("path", ["", 5, "a/missing\0name"])
def test_a_path_that_cannot_be_written_is_refused_at_once(path, tmp_path):
    with pytest.raises(ValueError, match="path is"):
        calibration.checked_path(path)
    with pytest.raises(ValueError, match="expected a file that can be written"):
        calibration.checked_path(tmp_path)


def test_most_splits_are_most():
    long = replace(FEW_QUERIES, batch=1, heads=1, heads_k=1, seqlen_k=1 << 20)
    with kernels.only(num_splits=kernels.MOST_SPLITS):
        assert kernels.plan(long, "h100").num_splits == kernels.MOST_SPLITS
    with (
        kernels.only(num_splits=kernels.MOST_SPLITS + 1),
        pytest.raises(RuntimeError, match=f"up to {kernels.MOST_SPLITS} for this call"),
    ):
        kernels.plan(long, "h100")


def test_numbers_are_stored_and_used(tmp_path):
    path, free = tmp_path / "calibration.json", kernels.plan(FEW_QUERIES, "h100")
    choice = Choice(free.kernel.id, num_splits=2)
    assert choice.entry == {"kernel": free.kernel.id, "num_splits": 2}
    calibration.store(H100, {kernels.bucket(FEW_QUERIES, "h100"): choice.entry}, path)
    (used,) = kernels.use_calibration(path).kernels.values()
    assert used == choice and str(used) == f"{free.kernel.id} num_splits=2"
    assert kernels.plan(FEW_QUERIES, "h100").num_splits == 2 != free.num_splits


NONSENSE = {
    "none": ({"num_splits": 0}, "num_splits is 0; expected a whole number"),
    "text": ({"pack_gqa": "2"}, "pack_gqa is '2'; expected a whole number"),
    "flag": ({"pack_gqa": True}, "pack_gqa is True; expected a whole number"),
    "fraction": ({"num_splits": 2.0}, "num_splits is 2.0; expected a whole number"),
    "too large": ({"num_splits": 2**31}, "num_splits is 2147483648; expected a whole number"),
    "list": ({"num_splits": [2]}, r"num_splits is \[2\]; expected a whole number"),
    "older kernel": (
        {"kernel": next(x.id for x in kernels.kernels() if x.arch == 80), "num_splits": 2},
        "those of Hopper's forward, not of fwd_sm80",
    ),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_numbers_that_no_call_can_have_are_a_miss(name, tmp_path):
    entry, reason = NONSENSE[name]
    path, free = tmp_path / "calibration.json", kernels.plan(FEW_QUERIES, "h100")
    bucket = kernels.bucket(FEW_QUERIES, "h100")
    calibration.store(H100, {bucket: {"kernel": free.kernel.id, **entry}}, path)
    loaded = kernels.use_calibration(path)
    assert loaded.kernels == {} and [miss.what for miss in loaded.misses] == [bucket]
    assert re.search(reason, loaded.misses[0].reason)
    assert kernels.plan(FEW_QUERIES, "h100") == free


def bucket_of(writer, number):
    problem = replace(PROBLEM, seqlen_q=1 << writer, seqlen_k=1 << number)
    return kernels.bucket(problem, H100)


def write(path, writer):
    for i in range(5):
        calibration.store(H100, {bucket_of(writer, i): {"kernel": fitting(PROBLEM)[0]}}, path)


def test_sixteen_writers_lose_nothing(tmp_path):
    path = tmp_path / "calibration.json"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write, args=(path, writer)) for writer in range(16)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):  # a reader never sees half a file
        assert not path.exists() or calibration.load(path).misses == ()
    assert [writer.exitcode for writer in writers] == [0] * 16
    expected = {bucket_of(writer, i) for writer in range(16) for i in range(5)}
    assert set(calibration.load(path).kernels) == expected
    assert sorted(x.name for x in tmp_path.iterdir()) == [path.name, f"{path.name}.lock"]


IN_USE = """
from flash_cute import kernels
problem = kernels.Problem(batch=4, heads=32, heads_k=8, seqlen_q=4096, causal=True)
print(kernels.plan(problem, "h100").kernel.id)
"""


@pytest.mark.parametrize("named", [False, True])
def test_the_variable_is_read_at_import(named, tmp_path):
    path = tmp_path / "calibration.json"
    ((kernel, _, _),) = map(astuple, stored(path).values())
    environment = {x: y for x, y in os.environ.items() if x != "FLASH_CUTE_CALIBRATION"}
    environment |= {"FLASH_CUTE_CALIBRATION": str(path)} if named else {"HOME": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", IN_USE], capture_output=True, text=True, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    assert (ended.stdout.strip() == kernel) == named
