"""Code in a process of its own, which has imported torch and nothing else: forked from one that
waits, since the import takes 2 s."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

_SERVER = """
import json, os, sys
import torch
def fork_all(runs):
    # prints the statuses of all; in a child, returns its run
    children = []
    for run in runs:
        children.append(os.fork())
        if not children[-1]:
            return run
    print([os.waitstatus_to_exitcode(os.waitpid(x, 0)[1]) for x in children], flush=True)

run = None
while run is None:
    line = sys.stdin.readline()
    if not line:
        sys.exit()
    run = fork_all(json.loads(line))
code, out, environment, folder = run
for number, path in ((1, out + ".out"), (2, out + ".err")):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
os.environ.clear()
os.environ.update(environment)
os.chdir(folder)
exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
"""


@cache
def _server() -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([sys.executable, "-c", _SERVER], **pipes)
    atexit.register(server.communicate)  # without input it ends
    return server


def run(
    code: str,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run of ``python -c code`` with text that is captured."""
    (ended,) = run_together([code], env, cwd)
    if check:
        ended.check_returncode()
    return ended


def run_together(
    codes: list[str], env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> list[subprocess.CompletedProcess[str]]:
    """:func:`run` for several processes at a time."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    environment, folder = dict(os.environ if env is None else env), str(cwd or Path.cwd())
    with tempfile.TemporaryDirectory() as written:
        outs = [f"{written}/{i}" for i in range(len(codes))]
        runs = [(code, out, environment, folder) for code, out in zip(codes, outs, strict=True)]
        print(json.dumps(runs), file=server.stdin, flush=True)
        statuses = json.loads(server.stdout.readline())
        texts = [[Path(out + end).read_text() for end in (".out", ".err")] for out in outs]
    results = zip(codes, statuses, texts, strict=True)
    return [subprocess.CompletedProcess(code, status, *text) for code, status, text in results]
