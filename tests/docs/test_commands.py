"""Shell commands of the pages: each runs in CI, or a mark says why not; options exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import try_commands
from typer.testing import CliRunner

from flash_cute.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", "benchmarks/README.md", *DOCS]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAM = re.compile(r"^(?:\w+=\S+ )*(?:pip|python|flash-cute|make|torchrun|export|cmake)\b", re.M)


def shell(page):
    return [(mark, body) for mark, body in try_commands.BLOCK.findall((ROOT / page).read_text())]


@pytest.mark.parametrize("page", PAGES)
def test_shell_blocks_are_marked_as_such(page):
    """Those without a language are drawings."""
    for language, body in FENCE.findall((ROOT / page).read_text()):
        if language == "":
            assert not PROGRAM.search(body), body
    for mark, body in shell(page):
        assert mark or page in try_commands.PAGES, f"runs nowhere: {body}"


def test_the_first_screen_runs():
    (install, *_) = try_commands.blocks("README.md", gpu=False)
    assert install.splitlines() == ['pip install ".[cli]"', "flash-cute demo"]
    assert any("flash-cute bench" in body for body in try_commands.blocks("README.md", gpu=False))
    assert len(try_commands.blocks("README.md", gpu=True)) == 3


def test_options_of_flash_cute_exist():
    lines = [line for page in PAGES for _, body in shell(page) for line in body.splitlines()]
    calls = [shlex.split(x, comments=True)[1:] for x in lines if x.startswith("flash-cute ")]
    assert len(calls) > 5
    for words in calls:
        command = words[: 2 if words[0] == "lab" else 1]
        help = CliRunner().invoke(app, [*command, "--help"])
        assert help.exit_code == 0, words
        missing = [x for x in words if x.startswith("-") and x.partition("=")[0] not in help.output]
        assert missing == [], words


def test_a_failing_block_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(try_commands, "PAGES", ("page.md",))
    monkeypatch.setattr(try_commands, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\ntrue\n```\n<!-- gpu -->\n```sh\ntouch gpu\n```\n```sh\ntrue\nfalse\n```\n"
    )
    failure = try_commands.run(tmp_path, {"PATH": "/usr/bin:/bin"}, gpu=True)
    assert failure.startswith("page.md: true\nfalse\nended with 1") and (tmp_path / "gpu").exists()
    assert "== page.md: ['false']" in capsys.readouterr().out
    page.write_text("<!-- not in CI: it fails -->\n```sh\nfalse\n```\n")
    assert try_commands.run(tmp_path, {"PATH": "/usr/bin:/bin"}, gpu=True) == ""


def test_files_that_git_tracks_are_copied(tmp_path):
    try_commands.copy_tracked(tmp_path)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    assert (tmp_path / "README.md").read_text() == (ROOT / "README.md").read_text()
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) <= len(listed.splitlines())


def test_help_lists_the_options():
    command = [sys.executable, ROOT / "tools" / "try_commands.py", "--help"]
    assert "--gpu" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
