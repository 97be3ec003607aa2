"""Ranks that do not agree raise the same error, all of them, before anything is communicated."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from flash_cute.distributed import comm

_KINDS = (TypeError, ValueError, NotImplementedError, RuntimeError)  # the narrower ones first
_ERRORS = {error.__name__: error for error in _KINDS}


def agree(group: Any, what: str, problem: Exception | None = None) -> None:
    """Checks that all ranks are about to do the same; one message of 24 bytes if they are.

    Args:
        group: of ranks, for tensors on the CPU; None is a group of one.
        what: this rank's call, in words: what must be equal everywhere.
        problem: what is wrong with it, on this rank.

    Raises:
        TypeError, ValueError, NotImplementedError: a rank has a problem, or ranks differ: with the
            same message on all of them, which says what each rank has. If the other ranks never
            call this, a rank raises its own problem.
        RuntimeError: a rank does not call this within the group's timeout.
    """
    if group is None:
        if problem is not None:
            raise problem
        return
    _start_check(group, what, problem)()


@contextmanager
def agreeing(group: Any, what: str, on_error: Callable[[], None]) -> Iterator[None]:
    """:func:`agree` around a block: it sends at the start, and waits for the others at the block's
    first message of :mod:`flash_cute.distributed.comm`, or at its end. ``on_error`` is called
    before an error of all ranks is raised, but not for an error of the block."""
    wait = _start_check(group, what, None)

    def check() -> None:
        try:
            wait()
        except Exception:
            on_error()
            raise

    comm.defer_check(check)
    try:
        yield
    finally:
        comm.finish_pending_checks()


def _start_check(
    group: Any, what: str, problem: Exception | None, number: int = 0
) -> Callable[[], list[int]]:
    """Sends a digest of ``what`` and a number. The result waits for those of all ranks; it returns
    the numbers, or raises. All messages have one size: gloo aborts a process if sizes differ."""
    digest = int.from_bytes(hashlib.sha256(what.encode()).digest()[:8], "little", signed=True)
    mine = torch.tensor([digest, int(problem is not None), number], device="cpu")
    ranks = dist.get_world_size(group)
    of_all = mine.new_empty(3 * ranks)
    work = comm.start_all_gather(of_all, mine, group=group, async_op=True)

    def wait() -> list[int]:
        try:
            work.wait()
        except RuntimeError as error:
            if problem is not None:
                raise problem from error
            raise RuntimeError(
                f"not all ranks made this call, {what}: one is gone, or does something else "
                f"({error})"
            ) from error
        digests, problems, numbers = of_all.view(ranks, 3).T.tolist()
        if digests == [digest] * ranks and not any(problems):
            return numbers
        reports: list[Any] = [None] * ranks
        kind = "" if problem is None else _name(problem)
        dist.all_gather_object(reports, (what, kind, str(problem)), group=group)
        wrong = [(rank, kind, text) for rank, (_, kind, text) in enumerate(reports) if kind]
        if wrong:
            texts = "; ".join(f"rank {rank}: {text}" for rank, _, text in wrong)
            raise error_of(wrong[0][1], texts)
        texts = "; ".join(f"rank {rank} has {what}" for rank, (what, _, _) in enumerate(reports))
        raise ValueError(f"ranks differ: {texts}. All must make the same call")

    return wait


def counts(group: Any, mine: int, problem: Exception | None = None) -> list[int]:
    """A number of each rank, in order. Raises what :func:`agree` does of a rank's problem."""
    if group is None:
        agree(group, "", problem)
        return [mine]
    return _start_check(group, "a layer's tokens, to be counted", problem, mine)()


def error_of(kind: str, text: str) -> Exception:
    """An error of the class with this name; ValueError for unknown names."""
    return _ERRORS.get(kind, ValueError)(text)


def _name(problem: Exception) -> str:
    names = [name for name, error in _ERRORS.items() if isinstance(problem, error)]
    return names[0] if names else "ValueError"
