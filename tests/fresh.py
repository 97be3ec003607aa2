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
for line in sys.stdin:
    code, out, environment, folder = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
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
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/run"
        asked = (code, out, dict(os.environ if env is None else env), str(cwd or Path.cwd()))
        print(json.dumps(asked), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        out, err = (Path(out + end).read_text() for end in (".out", ".err"))
    ended = subprocess.CompletedProcess(code, status, out, err)
    if check:
        ended.check_returncode()
    return ended
