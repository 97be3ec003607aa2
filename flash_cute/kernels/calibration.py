"""The calibration file: the fastest choice per GPU, library and bucket of sizes.

The file is JSON. A section is for one GPU (name and SM count) and one build of the library (SHA-256
of its file), since another build may have other kernels. Buckets are defined in
``csrc/core/calibration.cpp``. The entry of a bucket has the id of a ``kernel``, and for Hopper's
forward it may have ``num_splits`` and ``pack_gqa``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from flash_cute.kernels import files
from flash_cute.kernels.choice import Choice
from flash_cute.kernels.configs import KernelConfig, kernels
from flash_cute.kernels.gpus import Gpu, as_gpu
from flash_cute.kernels.plans import MOST_SPLITS, is_count
from flash_cute.native import library

VERSION = 1
_ENTRY = ("kernel", "num_splits", "pack_gqa")
_COUNT = "[0-9]{1,9}"
_SIZE = rf"(?:0|2\^{_COUNT})"
_BUCKET = re.compile(
    rf"sm{_COUNT} SMs(?P<sms>{_COUNT}) GB/s{_COUNT} (?P<op>\w+) (?P<dtype>\w+) d{_COUNT}/{_COUNT}"
    r" (?:full|causal|window) (?:dense|packed|pages)(?: rich)?(?: dropout)?(?: deterministic)?"
    rf" q{_SIZE}(?: \| k{_SIZE} heads{_SIZE} group{_SIZE})?"
)
_log = logging.getLogger("flash_cute")


@dataclass(frozen=True)
class Miss:
    """A file, or a section or an entry of it, that is not used."""

    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}"


@dataclass(frozen=True)
class Loaded:
    """The usable entries of a file, as choices by bucket, and the others with reasons."""

    kernels: dict[str, Choice]
    misses: tuple[Miss, ...] = ()


def default_path() -> Path:
    """``$FLASH_CUTE_CALIBRATION``, or ``~/.cache/flash_cute/calibration.json``."""
    named = os.environ.get("FLASH_CUTE_CALIBRATION")
    # expanduser() leaves ~name of an unknown user as it is: then the file does not exist.
    return Path(os.path.expanduser(named or "~/.cache/flash_cute/calibration.json"))


@cache
def library_hash() -> str:
    """SHA-256 of the loaded library."""
    return hashlib.sha256(library.find().read_bytes()).hexdigest()


def section_name(gpu: Gpu) -> str:
    """The name of the section of a GPU and the loaded library."""
    return f"{gpu.name}, {gpu.sms} SMs, library {library_hash()[:16]}"


def load(path: str | os.PathLike[str] | None = None, gpu: Gpu | str | None = None) -> Loaded:
    """Reads a file; entries that cannot be used are misses, never errors.

    Args:
        path: the file; by default :func:`default_path`.
        gpu: a :class:`flash_cute.kernels.Gpu`, or a name in ``flash_cute.kernels.GPUS``: sections
            of other GPUs are misses. By default all sections are used: each bucket names the SMs
            and the memory bandwidth of its GPUs.

    Raises:
        ValueError: the path is no file's name, or the GPU is unknown.

    Example::

        from flash_cute import tuning

        loaded = tuning.load("calibration.json")
        print(loaded.misses)  # why what the file says cannot be used
    """
    path = _path_of(path)
    gpu = None if gpu is None else as_gpu(gpu)
    try:
        sections = _read(path)
    except (OSError, ValueError) as error:
        return Loaded({}, (Miss(str(path), str(error)),))
    found, misses = {}, []
    known = {kernel.id: kernel for kernel in kernels()}
    for name, section in sections.items():
        if section["library"] != library_hash():
            misses.append(Miss(name, "measured with another build of the library: tune again"))
        elif gpu is not None and (section["gpu"], section["sms"]) != (gpu.name, gpu.sms):
            misses.append(Miss(name, f"measured on another GPU than {gpu.name}, {gpu.sms} SMs"))
        else:
            for bucket, entry in section["buckets"].items():
                if reason := _entry_problem(bucket, section["sms"], entry, known):
                    misses.append(Miss(bucket, reason))
                else:
                    found[bucket] = Choice(**entry)
    return Loaded(found, tuple(misses))


def _entry_problem(bucket: str, sms: int, entry: Any, known: dict[str, KernelConfig]) -> str | None:
    """Why an entry of a section is invalid; None if it is valid. Whether its kernel and numbers
    suit a call is checked in the call."""
    parts = _BUCKET.fullmatch(bucket)
    if parts is None:
        return "not a bucket; kernels.bucket(problem) prints the bucket of a call"
    if int(parts["sms"]) != sms:
        return f"the bucket is for GPUs with {parts['sms']} SMs, its section for one with {sms}"
    if not isinstance(entry, dict) or not isinstance(entry.get("kernel"), str):
        return f'its entry is {entry!r}; expected {{"kernel": ID}}'
    if unknown := [name for name in entry if name not in _ENTRY]:
        return f"its entry has {', '.join(unknown)}; expected {', '.join(_ENTRY)} alone"
    kernel = known.get(entry["kernel"])
    if kernel is None:
        return f"{entry['kernel']} is no kernel's id"
    if (kernel.op, kernel.dtype) != (parts["op"], parts["dtype"]):
        return f"{kernel.id} does not do {parts['op']} in {parts['dtype']}"
    numbers = {name: entry[name] for name in _ENTRY[1:] if entry.get(name) is not None}
    if numbers and (kernel.op, kernel.arch) != ("fwd", 90):
        return f"only Hopper's forward has num_splits and pack_gqa, not {kernel.id}"
    for name, number in numbers.items():
        if not is_count(number):
            return f"{name} is {number!r}; expected a whole number from 1 to 2^31 - 1"
    if numbers.get("num_splits", 1) > MOST_SPLITS:
        return f"num_splits is {numbers['num_splits']}; at most {MOST_SPLITS} are possible"
    if numbers.get("pack_gqa", 1).bit_count() != 1:
        return f"pack_gqa is {numbers['pack_gqa']}; expected a power of two"
    return None


def use_calibration(
    path: str | os.PathLike[str] | None = None, gpu: Gpu | str | None = None
) -> Loaded:
    """From now on calls and plans of this process prefer the kernels that a file names, with the
    ``num_splits`` and ``pack_gqa`` that it gives.

    It replaces the calibration that was in use, even if no entry of the file can be used. Results
    stay within their bounds, but their last bits may change with kernel, ``num_splits`` and
    ``pack_gqa``. Misses go to the logger ``flash_cute`` as warnings. Arguments are :func:`load`'s.

    Example::

        from flash_cute import kernels

        print(len(kernels.use_calibration("calibration.json").kernels), "buckets in use")
    """
    loaded = load(path, gpu)
    for miss in loaded.misses:
        _log.warning("calibration not used: %s", miss)
    lines = "\n".join(f"{bucket} = {choice}" for bucket, choice in loaded.kernels.items())
    torch.ops.flash_cute.set_calibration(lines)
    return loaded


def stop_using() -> None:
    """From now on the library's own estimates choose kernels."""
    torch.ops.flash_cute.set_calibration("")


@contextmanager
def suspended() -> Iterator[None]:
    """Inside, no thread of this process uses a calibration."""
    before = torch.ops.flash_cute.set_calibration("")
    try:
        yield
    finally:
        torch.ops.flash_cute.set_calibration(before)


def _path_of(path: str | os.PathLike[str] | None) -> Path:
    """A file's path, by default :func:`default_path`; ValueError for what is no file's name."""
    if path is not None and not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"path is {path!r}; expected a file's name")
    return default_path() if path is None else Path(path)


def checked_path(path: str | os.PathLike[str] | None) -> Path:
    """The path that :func:`store` writes to; ValueError if it cannot be written."""
    found = _path_of(path)
    lock = Path(f"{found}.lock")
    try:
        folder = next(x for x in (found.parent, *found.absolute().parents) if x.exists())
        can_write = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
        can_write &= not found.exists() or (found.is_file() and os.access(found, os.R_OK))
    except OSError:  # no permission to search a folder
        can_write = False
    if not can_write or "\0" in str(found):
        raise ValueError(f"path is {str(found)!r}; expected a file that can be written")
    if os.path.lexists(lock) and (lock.is_symlink() or not lock.is_file()):
        raise ValueError(f"path is {str(found)!r}, and {lock} is no regular file: remove it")
    if os.path.lexists(lock) and not os.access(lock, os.R_OK):
        raise ValueError(f"path is {str(found)!r}, and {lock} cannot be read: give another path")
    return found


def store(
    gpu: Gpu, buckets: dict[str, dict[str, Any]], path: str | os.PathLike[str] | None = None
) -> Path:
    """Adds buckets to the section of a GPU and this library; keeps all others.

    Writers wait for a lock file, and readers see the old file or the new one, with the same mode. A
    file that cannot be parsed is renamed to ``NAME.unreadable``, with a number if that exists, and
    a new one is written. Links are not followed: a link at ``path`` is replaced.

    Raises:
        ValueError: the path cannot be written, or the file would be too large to be read.
        TimeoutError: another process kept the lock for a minute.
    """
    path = checked_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.locked(path):
            _add(path, gpu, buckets)
    except TimeoutError:
        raise
    except OSError as error:
        raise ValueError(f"path is {str(path)!r}, which cannot be written: {error}") from error
    return path


def _add(path: Path, gpu: Gpu, buckets: dict[str, dict[str, Any]]) -> None:
    try:
        sections = _read(path) if path.exists() else {}
    except ValueError as error:
        _log.warning("calibration file replaced by a new one: %s", Miss(str(path), str(error)))
        files.rename_unreadable(path)
        sections = {}
    section = sections.setdefault(
        section_name(gpu),
        {"gpu": gpu.name, "sms": gpu.sms, "library": library_hash(), "buckets": {}},
    )
    section["buckets"].update(buckets)
    text = json.dumps({"version": VERSION, "sections": sections}, indent=1) + "\n"
    files.replace(path, text)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The sections; ValueError says why it is not a calibration file."""
    try:
        content = json.loads(files.read_text(path))
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION:
        raise ValueError(f"its version is {version!r}; expected {VERSION}")
    sections = content.get("sections")
    if not isinstance(sections, dict):
        raise ValueError(f"its sections are {sections!r}; expected an object")
    for name, section in sections.items():
        if not _is_section(section):
            raise ValueError(f"section {name!r} needs str gpu and library, int sms, and buckets")
    return sections


def _is_section(section: Any) -> bool:
    if not isinstance(section, dict) or not isinstance(section.get("buckets"), dict):
        return False
    texts = all(isinstance(section.get(name), str) for name in ("gpu", "library"))
    return texts and type(section.get("sms")) is int
