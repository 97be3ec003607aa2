"""Installs what cannot be imported yet: ``ensure.py [--no-deps] NAME[==VERSION][:MODULE] ...``.

Packages that can be imported already are not touched, so that they need no network.
"""

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys

MODULES = {"clang-format": "clang_format"}
PROGRAMS = {"nvidia-cuda-cuobjdump": "cuobjdump"}  # packages with a program instead of a module


def is_there(name: str, module: str) -> bool:
    if name not in PROGRAMS:
        return importlib.util.find_spec(module or MODULES.get(name, name)) is not None
    installed = {found.name for found in importlib.metadata.distributions()}
    return name in installed or shutil.which(PROGRAMS[name]) is not None


def main(arguments: list[str]) -> int:
    flags = [a for a in arguments if a.startswith("--")]
    missing = []
    for argument in arguments:
        if argument in flags:
            continue
        requirement, _, module = argument.partition(":")
        name = requirement.partition("==")[0]
        if not is_there(name, module):
            missing.append(requirement)
    if not missing:
        return 0
    command = [sys.executable, "-m", "pip", "install", "--quiet", *flags, *missing]
    return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
