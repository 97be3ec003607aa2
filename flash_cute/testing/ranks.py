"""Processes of one torch.distributed group, started once, that run functions together."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class Ranks:
    """``ranks`` processes, on the CPU over gloo, or with a GPU each over NCCL; 0 is one process
    without a group. ``patience`` is the timeout of a result in seconds, ``method`` how processes
    start: "forkserver" imports once for many processes.

    Example::

        import os

        from flash_cute.testing.ranks import Ranks

        if __name__ == "__main__":
            with Ranks(2) as ranks:
                print(ranks.run(os.getpid))  # the function's result on each rank

    Functions and arguments are pickled: functions must be importable by name.
    """

    def __init__(
        self, ranks: int, device: str = "cpu", seconds: float = 60.0, method: str = "spawn"
    ) -> None:
        self.patience = 2 * seconds + 60
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        context: Any = mp.get_context(method)
        self._pipes, self.processes = [], []
        for rank in range(max(ranks, 1)):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, ranks, store, device, seconds), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The function's result on each rank.

        Raises:
            RuntimeError: it raised on some, with their tracebacks, or a rank gave no answer.
        """
        results = self.outcomes(function, *args)
        raised = [f"rank {i}: {x.text}" for i, x in enumerate(results) if isinstance(x, Raised)]
        if raised:
            raise RuntimeError("\n".join(raised))
        return results

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """:meth:`run`, with :class:`Raised` for ranks on which it raised, or that have ended."""
        for pipe in self._pipes:
            pipe.send((function, args))
        end = time.monotonic() + self.patience
        return [self._answer(pipe, end) for pipe in self._pipes]

    def _answer(self, pipe: Any, end: float) -> Any:
        try:
            if pipe.poll(max(end - time.monotonic(), 0.0)):
                return pipe.recv()
        except (EOFError, ConnectionError):
            return Raised("EOFError", "the process has ended", "")
        return Raised("TimeoutError", "no answer", "")

    def close(self, seconds: float = 5.0) -> None:
        """Ends the processes, and kills those that take longer than ``seconds``."""
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(seconds)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()


class Raised:
    """What a function raised: the type's name, the message, and the traceback as text."""

    def __init__(self, kind: str, message: str, text: str) -> None:
        self.kind, self.message, self.text = kind, message, text

    def __repr__(self) -> str:
        return f"{self.kind}: {self.message}"


def _serve(pipe: Any, rank: int, ranks: int, store: str, device: str, seconds: float) -> None:
    torch.set_num_threads(1)
    options: dict[str, Any] = {}
    if device == "cuda":
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device("cuda", rank)
    if ranks:
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo", store=dist.FileStore(store, ranks), rank=rank,
            world_size=ranks, timeout=timedelta(seconds=seconds), **options,
        )  # fmt: skip
    while True:
        try:
            function, args = pipe.recv()
            result = function(*args)
        except (EOFError, ConnectionResetError):
            break
        except Exception as error:
            result = Raised(type(error).__name__, str(error), traceback.format_exc())
        pipe.send(result)
    os.kill(os.getpid(), signal.SIGKILL)  # a normal exit would wait for ranks that have ended
