"""A mutation run: whether the tests notice small changes of the code.

``mutation.py --seed 1 --count 200`` draws mutants of the packages in pyproject.toml, and runs for
each the tests of its module, also listed there, until the first that fails. It changes a copy, not
the checkout. Results are appended to a file, and a second run of the same command resumes from it:
mutants that survived are tried again, with the present tests.

The library is the one that ``FLASH_CUTE_LIBRARY`` names, else the one that the package finds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mutants

from flash_cute.native import library

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
NOTICED = ("killed", "timeout")


@dataclass(frozen=True)
class Settings:
    """``[tool.mutation]`` of pyproject.toml."""

    packages: list[str]  # of flash_cute
    timeout: float  # seconds of the tests of a mutant
    tests: dict[str, list[str]]  # paths in tests/, by the longest prefix of a path in flash_cute/
    exclude: list[str]  # such prefixes

    @classmethod
    def of(cls, root: Path) -> Settings:
        return cls(**tomllib.loads((root / "pyproject.toml").read_text())["tool"]["mutation"])

    def modules(self, root: Path, packages: Iterable[str]) -> list[str]:
        """Paths of the packages' modules in flash_cute/."""
        code = root / "flash_cute"
        paths = (path for package in packages for path in (code / package).rglob("*.py"))
        modules = (str(path.relative_to(code)) for path in paths)
        return sorted(module for module in modules if not module.startswith(tuple(self.exclude)))

    def tests_of(self, module: str) -> list[str]:
        """Raises KeyError for a module that has none."""
        beginnings = [beginning for beginning in self.tests if module.startswith(beginning)]
        if not beginnings:
            raise KeyError(f"pyproject.toml, tool.mutation.tests: no tests of {module}")
        return [f"tests/{test}" for test in self.tests[max(beginnings, key=len)]]


class Copy:
    """A copy of the tree's files in another folder, in which tests run."""

    def __init__(self, root: Path, folder: Path, timeout: float) -> None:
        self.folder, self.timeout, self.count = folder, timeout, 0
        self.library = str(library.find())
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listing, cwd=root, stdout=subprocess.PIPE, check=True, text=True)
        for name in filter(None, names.stdout.split("\0")):
            if (root / name).is_file():  # else it was deleted
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name)

    def run(self, tests: Sequence[str]) -> tuple[str, float, str]:
        """The outcome, its seconds, and what pytest printed."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        variables = {"PYTHONPATH": str(self.folder), "OMP_WAIT_POLICY": "PASSIVE"}
        variables |= {"FLASH_CUTE_LIBRARY": self.library, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        started = time.monotonic()
        process = subprocess.Popen(
            command, cwd=self.folder, env=os.environ | variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=self.timeout)
            outcome = "killed" if process.returncode else "survived"
        except subprocess.TimeoutExpired:
            outcome = "timeout"
        finally:  # ranks of tests, too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if outcome == "timeout":
            output, _ = process.communicate()
        return outcome, time.monotonic() - started, output

    def try_out(self, mutant: mutants.Mutant, tests: Sequence[str]) -> tuple[str, float]:
        """The outcome of one mutant. Each file has another mtime, so that Python compiles it."""
        path = self.folder / "flash_cute" / mutant.module
        self.count += 1
        try:
            path.write_text(mutant.after)
            os.utime(path, (self.count, self.count))
            return self.run(tests)[:2]
        finally:
            path.write_text(mutant.before)
            os.utime(path, (0, 0))


def check_tests(copy: Copy, tests: Sequence[str]) -> None:
    """Ends the run if the tests fail without a change, or if a mutant's time would be too short."""
    outcome, seconds, output = copy.run(tests)
    if outcome != "survived":
        sys.exit(f"{output}\nwithout any change: {outcome}: {' '.join(tests)}")
    if seconds > 0.75 * copy.timeout:
        sys.exit(f"{seconds:.0f} s of {copy.timeout:.0f} s without any change: {' '.join(tests)}")


def read(session: Path) -> dict[str, dict[str, Any]]:
    """Results by the mutant's key; the last one counts."""
    lines = session.read_text().splitlines() if session.exists() else []
    return {result["key"]: result for result in map(json.loads, lines)}


def run(root: Path, settings: Settings, drawn: Sequence[mutants.Mutant], session: Path) -> None:
    """Tries the mutants that no test has noticed yet, and appends their lines to ``session``."""
    before, checked = read(session), set()
    left = [x for x in drawn if before.get(x.key, {}).get("outcome") not in NOTICED]
    session.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, session.open("a") as results:
        copy = Copy(root, Path(folder), settings.timeout)
        for number, mutant in enumerate(left, 1):
            tests = settings.tests_of(mutant.module)
            if tuple(tests) not in checked:
                check_tests(copy, tests)
                checked.add(tuple(tests))
            outcome, seconds = copy.try_out(mutant, tests)
            result = {"key": mutant.key, "outcome": outcome, "seconds": round(seconds, 1)}
            result |= {"module": mutant.module, "diff": mutant.diff}
            print(json.dumps(result), file=results, flush=True)
            print(f"{number}/{len(left)} {outcome} {seconds:.0f} s {mutant.module}", flush=True)


def report(
    packages: Iterable[str], drawn: Sequence[mutants.Mutant], results: Mapping[str, dict[str, Any]]
) -> str:
    """The mutants that survived or timed out, then a line for each package and one for all."""
    tried = [results[mutant.key] for mutant in drawn if mutant.key in results]
    lines = [f"{x['outcome']}: {x['diff']}" for x in tried if x["outcome"] != "killed"]
    for name in (*packages, ""):
        counts = Counter(x["outcome"] for x in tried if x["module"].startswith(name))
        if total := counts.total():
            noticed = sum(counts[outcome] for outcome in NOTICED)
            lines.append(
                f"{name or 'all'}: {noticed} of {total} noticed ({noticed / total:.0%}), "
                f"{counts['timeout']} of them by the time; {counts['survived']} survived"
            )
    return "\n".join(lines)


def main() -> int:
    settings = Settings.of(ROOT)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=200, help="of mutants; default 200")
    parser.add_argument("--package", nargs="+", default=settings.packages, help="default: all")
    parser.add_argument("--timeout", type=float, help="of a mutant, on a machine that is busy")
    parser.add_argument("--session", type=Path, help="default: build/mutation/SEED.jsonl")
    parser.add_argument("--report", action="store_true", help="run nothing")
    args = parser.parse_args()
    settings = replace(settings, timeout=args.timeout or settings.timeout)
    session = args.session or ROOT / f"build/mutation/{args.seed}.jsonl"
    modules = settings.modules(ROOT, args.package)
    drawn = mutants.draw(ROOT / "flash_cute", modules, args.count, args.seed)
    if not args.report:
        run(ROOT, settings, drawn, session)
    print(report(args.package, drawn, read(session)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
