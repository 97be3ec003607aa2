"""Calibration files: what is read, what is a miss and why, and concurrent writers."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
from dataclasses import astuple, replace

import fresh
import pytest
from calibrated import FEW_QUERIES, H100, PROBLEM, PROBLEMS, fitting, others

from flash_cute import kernels
from flash_cute.kernels import GPUS, calibration, files
from flash_cute.tuning import Choice

pytestmark = pytest.mark.usefixtures("without_calibration")


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
    "no object": ("[]", "its version is None; expected 1"),
    "another version": ('{"version": 7, "sections": {}}', "its version is 7"),
    "no text": (b"\xff\xfe\x00", "codec can't decode"),
    "foreign": ('{"version": 1, "sections": {"x": {"gpu": 3}}}', "section 'x' needs str gpu"),
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


def test_an_invalid_section_is_named(tmp_path):
    path = tmp_path / "calibration.json"
    for section in ({"gpu": "x", "sms": True, "library": "y", "buckets": {}}, [], None):
        path.write_text(json.dumps({"version": 1, "sections": {"mine": section}}))
        assert "section 'mine' needs str gpu" in calibration.load(path).misses[0].reason
    path.write_text('{"version": 1, "sections": []}')
    assert "expected an object" in calibration.load(path).misses[0].reason


def test_a_pipe_is_a_miss(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert "no regular file" in kernels.use_calibration(path).misses[0].reason


def test_a_huge_file_is_a_miss_and_takes_no_memory(tmp_path):
    path = tmp_path / "calibration.json"
    with open(path, "wb") as file:
        file.truncate(1 << 38)
    assert "more than 4194304 bytes" in kernels.use_calibration(path).misses[0].reason
    rules = stored(path)
    assert calibration.load(path).kernels == rules
    assert path.with_name("calibration.json.unreadable").stat().st_size == 1 << 38


def test_a_lock_that_is_a_link_is_refused_and_its_target_kept(tmp_path):
    path, target = tmp_path / "calibration.json", tmp_path / "precious"
    target.write_text("kept")
    lock = tmp_path / "calibration.json.lock"
    lock.symlink_to(target)
    for ask in (calibration.checked_path, stored):
        with pytest.raises(ValueError, match=r"calibration\.json\.lock is no regular file"):
            ask(path)
    lock.unlink()
    lock.symlink_to(tmp_path / "nothing")
    with pytest.raises(ValueError, match="is no regular file"):
        stored(path)
    lock.unlink()
    os.mkfifo(lock)
    with pytest.raises(ValueError, match="is no regular file"):
        stored(path)
    assert target.read_text() == "kept" and not path.exists()
    lock.unlink()
    os.link(target, lock)  # a second name of a file: locked, not written
    stored(path)
    assert target.read_text() == "kept"


def test_a_link_that_replaces_the_lock_is_not_followed(tmp_path, monkeypatch):
    path, target = tmp_path / "calibration.json", tmp_path / "precious"
    target.write_text("kept")
    (tmp_path / "calibration.json.lock").symlink_to(target)
    monkeypatch.setattr(calibration, "checked_path", lambda path: path)
    monkeypatch.setattr(type(path), "is_symlink", lambda path: False)
    with pytest.raises(ValueError, match="cannot be written"):
        stored(path)
    assert target.read_text() == "kept"


def test_a_link_to_a_file_is_read_and_replaced(tmp_path):
    path, target = tmp_path / "calibration.json", tmp_path / "mine.json"
    rules = stored(target)
    before = target.read_bytes()
    path.symlink_to(target)
    assert calibration.load(path).kernels == rules
    calibration.store(H100, {bucket_of(1, 1): {"kernel": fitting(PROBLEM)[0]}}, path)
    assert target.read_bytes() == before and not path.is_symlink()
    assert len(calibration.load(path).kernels) == 2


def test_modes_and_files_kept_aside_stay(tmp_path):
    path = tmp_path / "calibration.json"
    stored(path)
    path.chmod(0o640)
    stored(path)
    assert path.stat().st_mode & 0o777 == 0o640
    for content in ("first", "second"):
        path.write_text(content)
        stored(path)
    assert (tmp_path / "calibration.json.unreadable").read_text() == "first"
    assert (tmp_path / "calibration.json.unreadable2").read_text() == "second"
    assert {x.suffix for x in tmp_path.iterdir()} <= {
        ".json", ".lock", ".unreadable", ".unreadable2",
    }  # fmt: skip


def test_a_lock_that_another_process_holds_ends_in_an_error(tmp_path, monkeypatch):
    path = tmp_path / "calibration.json"
    monkeypatch.setattr(files, "_SECONDS", 0.05)
    with files.locked(path), pytest.raises(TimeoutError, match="lock locked"):
        stored(path)
    assert not path.exists()
    stored(path)


@pytest.fixture
def as_another_user(monkeypatch):
    """os.open and os.access as for a user who has only the permissions of "others" on a file."""
    opened, access = os.open, os.access

    def is_denied(path, flags):
        mode = os.stat(path).st_mode if os.path.exists(path) else 0o666
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        return not mode & 0o4 or (writes and not mode & 0o2)

    def open_(path, flags, mode=0o777, **more):
        if is_denied(path, flags):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(
        os, "access", lambda path, mode, **more: access(path, mode, **more)
        and (mode != os.R_OK or not is_denied(path, os.O_RDONLY)),
    )  # fmt: skip


@pytest.mark.parametrize("mode", [0o644, 0o444, 0o664])
def test_a_lock_of_another_user_is_locked_by_reading(mode, tmp_path, as_another_user, monkeypatch):
    path, lock = tmp_path / "calibration.json", tmp_path / "calibration.json.lock"
    lock.write_text("theirs")
    lock.chmod(mode)
    rules = stored(path)
    assert calibration.load(path).kernels == rules
    monkeypatch.setattr(files, "_SECONDS", 0.05)
    with files.locked(path), pytest.raises(TimeoutError, match="lock locked"):
        stored(path)
    assert lock.read_text() == "theirs" and lock.stat().st_mode & 0o777 == mode


def test_a_lock_that_cannot_be_read_is_refused_at_once(tmp_path, as_another_user):
    path, lock = tmp_path / "calibration.json", tmp_path / "calibration.json.lock"
    lock.touch()
    lock.chmod(0o600)
    for ask in (calibration.checked_path, stored):
        with pytest.raises(ValueError, match=r"calibration\.json\.lock cannot be read: give"):
            ask(path)


def test_a_name_that_the_system_refuses_is_an_error_of_the_path(tmp_path):
    with pytest.raises(ValueError, match="path is"):
        stored(tmp_path / (252 * "n"))
    assert list(tmp_path.iterdir()) == []


def test_a_file_too_large_to_read_is_not_written(tmp_path):
    path = tmp_path / "calibration.json"
    stored(path)
    before = path.read_bytes()
    entries = {f"{i:07}" * 8: {"kernel": "none"} for i in range(60_000)}
    with pytest.raises(ValueError, match="at most 4194304 are read"):
        calibration.store(H100, entries, path)
    assert path.read_bytes() == before


ANY_BUCKET = kernels.bucket(PROBLEM, "h100")
BAD_ENTRIES = {
    "word": ("foo", None, "kernels.bucket"),
    "digits": (ANY_BUCKET.replace("SMs132", "SMs" + 5000 * "1"), None, "kernels.bucket"),
    "other digits": (ANY_BUCKET.replace("SMs132", "SMs\u0661\u0663\u0662"), None, "kernels.bucket"),
    "power": (ANY_BUCKET.replace("q2^12", "q2^x"), None, "kernels.bucket"),
    "two lines": (f"{ANY_BUCKET}\n{ANY_BUCKET}", None, "kernels.bucket"),
    "SMs": (ANY_BUCKET.replace("SMs132", "SMs108"), None, "108 SMs, its section for one with 132"),
    "no entry": (ANY_BUCKET, 5, 'expected {"kernel": ID}'),
    "no kernel": (ANY_BUCKET, {"num_splits": 2}, 'expected {"kernel": ID}'),
    "misspelt": (ANY_BUCKET, {"num_split": 2}, "has num_split; expected kernel, num_splits"),
    "op": (ANY_BUCKET.replace(" fwd ", " bwd "), None, "does not do bwd in bf16"),
    "dtype": (ANY_BUCKET.replace("bf16", "fp16"), None, "does not do fwd in fp16"),
    "splits": (ANY_BUCKET, {"num_splits": 129}, "num_splits is 129; at most 128 are possible"),
    "pack": (ANY_BUCKET, {"pack_gqa": 3}, "pack_gqa is 3; expected a power of two"),
}


@pytest.mark.parametrize("name", BAD_ENTRIES)
def test_an_entry_that_no_call_can_use_is_a_miss(name, tmp_path):
    bucket, entry, reason = BAD_ENTRIES[name]
    path, free = tmp_path / "calibration.json", kernels.plan(PROBLEM, "h100")
    named = entry is None or (isinstance(entry, dict) and name != "no kernel")
    whole = {"kernel": free.kernel.id, **(entry or {})} if named else entry
    calibration.store(H100, {bucket: whole}, path)
    (miss,) = kernels.use_calibration(path).misses
    assert miss.what == bucket and reason in miss.reason
    assert kernels.plan(PROBLEM, "h100") == free


def test_buckets_of_all_kinds_of_calls_are_valid(tmp_path):
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


def test_a_path_below_a_file_is_refused_at_once(tmp_path):
    program = tmp_path / "program"
    program.touch(0o777)
    with pytest.raises(ValueError, match="expected a file that can be written"):
        calibration.checked_path(program / "calibration.json")


def test_no_plan_has_more_than_most_splits():
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


BAD_NUMBERS = {
    "none": ({"num_splits": 0}, "num_splits is 0; expected a whole number"),
    "text": ({"pack_gqa": "2"}, "pack_gqa is '2'; expected a whole number"),
    "flag": ({"pack_gqa": True}, "pack_gqa is True; expected a whole number"),
    "fraction": ({"num_splits": 2.0}, "num_splits is 2.0; expected a whole number"),
    "too large": ({"num_splits": 2**31}, "num_splits is 2147483648; expected a whole number"),
    "list": ({"num_splits": [2]}, r"num_splits is \[2\]; expected a whole number"),
    "older kernel": (
        {"kernel": next(x.id for x in kernels.kernels() if x.arch == 80), "num_splits": 2},
        "only Hopper's forward has num_splits and pack_gqa, not fwd_sm80",
    ),
}


@pytest.mark.parametrize("name", BAD_NUMBERS)
def test_numbers_that_no_call_can_have_are_a_miss(name, tmp_path):
    entry, reason = BAD_NUMBERS[name]
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


def test_gpus_that_are_known_have_names():
    assert calibration.section_name(GPUS["a100"]).startswith("a100, 108 SMs, library ")


def test_a_calibration_path_of_an_unknown_user_is_a_miss(monkeypatch):
    monkeypatch.setenv("FLASH_CUTE_CALIBRATION", "~nobody-of-this-name/calibration.json")
    loaded = calibration.load()
    assert not loaded.kernels and "nobody-of-this-name" in str(loaded.misses[0])


@pytest.mark.parametrize("named", [False, True])
def test_the_variable_is_read_at_import(named, tmp_path):
    path = tmp_path / "calibration.json"
    ((kernel, _, _),) = map(astuple, stored(path).values())
    environment = {x: y for x, y in os.environ.items() if x != "FLASH_CUTE_CALIBRATION"}
    environment |= {"FLASH_CUTE_CALIBRATION": str(path)} if named else {"HOME": str(tmp_path)}
    ended = fresh.run(IN_USE, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert (ended.stdout.strip() == kernel) == named
