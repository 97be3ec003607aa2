"""Processes that check many cases, each in bounded time: a case that hangs is a failure."""

from __future__ import annotations

import gc
import multiprocessing
from types import TracebackType
from typing import Any

from flash_cute.testing.ranks import Raised, Ranks
from flash_cute.testing.systems.cases import NAMES, SystemTrial, module_of
from flash_cute.testing.systems.findings import Findings

for _name in NAMES:  # imports them once for all processes of the forkserver
    module_of(_name)

CASE_S = 25.0  # timeout of one case; the largest take 2 s on a slow core
START_S = 180.0  # timeout of processes' imports
_LOST = ("TimeoutError", "EOFError")  # the process hangs or has ended
GROUP_S = 60.0  # torch.distributed's own timeout, longer than CASE_S


class Runner:
    """Runs trials in other processes: a single one, and groups of any number of ranks, started when
    first needed. They are restarted after a hang, or a failure on ranks.

    Example::

        import random

        from flash_cute.testing.systems.cases import draw
        from flash_cute.testing.systems.runner import Runner

        if __name__ == "__main__":
            with Runner("cpu") as runner:
                print(runner.run(draw(random.Random(1))).failures)
    """

    def __init__(self, device: str, seconds: float = CASE_S) -> None:
        self.device, self.seconds = device, seconds
        self._pools: dict[int, Ranks] = {}

    def run(self, trial: SystemTrial) -> Findings:
        """The trial's findings on all ranks."""
        pool = self._pool(trial.ranks)
        answers = pool.outcomes(_check, trial, self.device)
        found = together(answers, self.seconds)
        if found.spent:
            self._pools.pop(trial.ranks).close(0.0)
        return found

    def _pool(self, ranks: int) -> Ranks:
        if ranks not in self._pools:
            # A forkserver that has initialised CUDA cannot fork processes that use it.
            method = "spawn" if self.device == "cuda" else "forkserver"
            multiprocessing.set_forkserver_preload([__name__])
            pool = Ranks(ranks, self.device, GROUP_S, method)
            self._pools[ranks], pool.patience = pool, START_S
            pool.run(_ready)
            pool.patience = self.seconds
        return self._pools[ranks]

    def close(self) -> None:
        """Ends the processes."""
        while self._pools:
            self._pools.popitem()[1].close(0.0)

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()


def together(answers: list[Any], seconds: float) -> Findings:
    """The findings of all ranks as one."""
    found = Findings()
    for rank, answer in enumerate(answers):
        where = f"rank {rank}: " * (len(answers) > 1)
        if isinstance(answer, Raised):
            hangs = answer.kind == "TimeoutError" and answer.message == "no answer"
            text = f"hangs: no answer in {seconds:.0f} s" if hangs else f"{answer}"
            found.failures.append(where + next(iter(text.splitlines()), answer.kind)[:400])
            found.spent |= len(answers) > 1 or answer.kind in _LOST
            continue
        found.failures += [where + failure for failure in answer.failures]
        found.worst = max(found.worst, answer.worst)
        found.spent |= answer.spent
    notes = [x.notes for x in answers if isinstance(x, Findings)]
    if len(notes) > 1 and any(one != notes[0] for one in notes):
        found.failures.append(f"ranks differ in what they raise: {notes}"[:600])
        found.spent = True
    return found


def _ready() -> bool:
    """Excludes existing objects from counts of live ones."""
    gc.collect()
    gc.freeze()
    return True


def _check(trial: SystemTrial, device: str) -> Findings:
    return trial.run(device)
