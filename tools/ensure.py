"""Installs what cannot be imported yet: ``ensure.py [--no-deps] NAME[==VERSION][:MODULE] ...``.

Packages that the machine already has are left as they are, so that nothing is asked of the network
for them.
"""

import importlib.util
import subprocess
import sys

MODULES = {"clang-format": "clang_format"}


def main(arguments: list[str]) -> int:
    flags = [a for a in arguments if a.startswith("--")]
    missing = []
    for argument in arguments:
        if argument in flags:
            continue
        requirement, _, module = argument.partition(":")
        name = requirement.partition("==")[0]
        if importlib.util.find_spec(module or MODULES.get(name, name)) is None:
            missing.append(requirement)
    if not missing:
        return 0
    command = [sys.executable, "-m", "pip", "install", "--quiet", *flags, *missing]
    return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
