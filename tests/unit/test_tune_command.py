"""``flash-cute tune``: shapes as text, and what a file holds."""

from __future__ import annotations

import json

import pytest
import torch
from made_up_clock import SHAPES, cost_with, tuned
from typer.testing import CliRunner

from flash_cute.cli import app as cli
from flash_cute.cli import tune
from flash_cute.kernels import Problem
from flash_cute.native import library
from flash_cute.tuning.clock import check_plain

pytestmark = pytest.mark.usefixtures("without_calibration")


@pytest.mark.parametrize(
    "problem",
    [
        *SHAPES[:1],
        Problem("decode", torch.float16, 3, 8, 2, 1, 99, 64),
        Problem("bwd", torch.float32, heads=4, seqlen_q=7, head_dim=192, head_dim_v=128),
    ],
)
def test_shapes_are_read_as_they_are_printed(problem):
    assert str(tune.parse(str(problem))) == str(problem)
    check_plain(tune.parse(str(problem)))


def test_shapes_are_read_as_benchmarks_write_them():
    assert tune.parse("bf16 b4 h32/8 q512 k1024 d64/64 full") == Problem(
        batch=4, heads=32, heads_k=8, seqlen_q=512, seqlen_k=1024, head_dim=64, head_dim_v=64
    )
    result = CliRunner().invoke(cli.app, ["tune", "b4 h16 q1024"])
    assert result.exit_code == 2 and "expected, for example" in result.output


def test_show(tmp_path):
    report, path = tuned(tmp_path, cost_with(0.8))
    result = CliRunner().invoke(cli.app, ["tune", "--show", "--path", str(path)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["file"] == str(path)
    if not library.can_use_cuda():
        rules_as_text = {bucket: str(choice) for bucket, choice in report.rules.items()}
        assert found["kernels"] == rules_as_text and found["misses"] == []
    path.write_text("{")
    found = json.loads(CliRunner().invoke(cli.app, ["tune", "--show", "--path", str(path)]).output)
    assert found["kernels"] == {} and "Expecting property name" in found["misses"][0]["reason"]


def test_shapes_or_show():
    for arguments in ([], [str(SHAPES[0]), "--show"]):
        result = CliRunner().invoke(cli.app, ["tune", *arguments])
        assert result.exit_code == 2 and "give shapes to measure" in result.output
