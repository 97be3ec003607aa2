"""Lines of progress on standard error, for scripts that run for minutes."""

from __future__ import annotations

import sys
import time

SECONDS = 5.0


class Progress:
    """Called once a step, it says at the first one, every 5 s and at the last one where it is."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps, self.done = name, steps, 0
        self._next = time.monotonic()

    def __call__(self, loss: float | None = None) -> None:
        self.done += 1
        if time.monotonic() < self._next and self.done < self.steps:
            return
        self._next = time.monotonic() + SECONDS
        of_loss = "" if loss is None else f", loss {loss:.3f}"
        print(f"{self.name}: {self.done} of {self.steps}{of_loss}", file=sys.stderr, flush=True)
