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
    """Exchanges what each rank is about to do; one message of 24 bytes, if they agree.

    Args:
        group: of ranks, for tensors on the CPU; None is a group of one.
        what: this rank's call, in words: what must be equal everywhere.
        problem: what is wrong with it, on this rank.

    Raises:
        TypeError, ValueError, NotImplementedError: a rank has a problem, or ranks differ: with the
            same message on all of them, which says what each rank has. If the others never ask, it
            is this rank's problem alone.
        RuntimeError: a rank does not ask within the group's timeout.
    """
    if group is None:
        if problem is not None:
            raise problem
        return
    _ask(group, what, problem)()


@contextmanager
def agreeing(group: Any, what: str, otherwise: Callable[[], None]) -> Iterator[None]:
    """The same, asked at the begin; answers are waited for at this thread's first message of
    :mod:`flash_cute.distributed.comm`, or at the end. ``otherwise`` is called before an error of
    all ranks, unlike one of what is done inside."""
    end = _ask(group, what, None)

    def check() -> None:
        try:
            end()
        except Exception:
            otherwise()
            raise

    comm.defer_check(check)
    try:
        yield
    finally:
        comm.finish_pending_checks()


def _ask(
    group: Any, what: str, problem: Exception | None, number: int = 0
) -> Callable[[], list[int]]:
    """Sends what this rank is about to do, and a number; the result waits for the others', and may
    raise. All messages are of one size: gloo ends a process that gets another one."""
    digest = int.from_bytes(hashlib.sha256(what.encode()).digest()[:8], "little", signed=True)
    mine = torch.tensor([digest, int(problem is not None), number], device="cpu")
    ranks = dist.get_world_size(group)
    of_all = mine.new_empty(3 * ranks)
    work = comm.start_all_gather(of_all, mine, group=group, async_op=True)

    def end() -> list[int]:
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

    return end


def counts(group: Any, mine: int, problem: Exception | None = None) -> list[int]:
    """A number of each rank, in order. Raises what :func:`agree` does of a rank's problem."""
    if group is None:
        agree(group, "", problem)
        return [mine]
    return _ask(group, "a layer's tokens, to be counted", problem, mine)()


def error_of(kind: str, text: str) -> Exception:
    """One of this kind's name, which all ranks know."""
    return _ERRORS.get(kind, ValueError)(text)


def _name(problem: Exception) -> str:
    names = [name for name, error in _ERRORS.items() if isinstance(problem, error)]
    return names[0] if names else "ValueError"
