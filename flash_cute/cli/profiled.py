"""The process that ``flash-cute profile`` runs under ncu: one call of an op in an NVTX range."""

from __future__ import annotations

import json
import sys

import torch

from flash_cute.cli.profile import RANGE
from flash_cute.tuning.calls import call_of


def main(argv: list[str] | None = None) -> None:
    """The only argument is JSON with the arguments of :func:`call_of`."""
    (given,) = sys.argv[1:] if argv is None else argv
    call = call_of(**json.loads(given))
    call()  # warms up outside of the range
    torch.cuda.synchronize()
    with torch.cuda.nvtx.range(RANGE):
        call()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
