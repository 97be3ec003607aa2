"""examples/train_context_parallel.py: ranks train as one process does, from each other's files."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flash_cute.testing.ranks import Ranks

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 12
TINY = (
    f"--device cpu --steps {STEPS} --layers 2 --width 32 --heads 2 --context 33 --batch 3 "
    "--tolerance 2e-5"
)


def trained(arguments: str) -> int:
    """The example's status, on this rank, or in this process."""
    torch.set_num_threads(1)
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module("train_context_parallel").main(
        [*TINY.split(), *arguments.split()]
    )


def misplaced(arguments: str) -> int:
    """The same, with positions that count a rank's own tokens."""
    from flash_cute.distributed import ContextParallel

    right = ContextParallel.position_ids
    ContextParallel.position_ids = lambda self, plan, device=None: torch.arange(
        plan.rows(self.rank)
    )
    try:
        return trained(arguments)
    finally:
        ContextParallel.position_ids = right


@pytest.mark.parametrize("strategy", ["all_gather", "ring", "ulysses"])
def test_losses_are_those_of_one_process(two: Ranks, strategy: str, tmp_path: Path) -> None:
    assert two.run(trained, f"--strategy {strategy} --out {tmp_path}") == [0, 0]
    results = json.loads((tmp_path / "results.json").read_text())
    ours, one = results["losses"].values()
    assert len(ours) == len(one) == STEPS and ours[-1] < ours[0] - 0.5
    assert max(abs(a - b) for a, b in zip(ours, one, strict=True)) < 2e-5
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_notices_wrong_positions(two: Ranks, tmp_path: Path) -> None:
    assert two.run(misplaced, f"--out {tmp_path}") == [1, 0]


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2), (2, 3)])
def test_checkpoints_fit_any_number_of_ranks(
    two: Ranks, three: Ranks, before: int, after: int, tmp_path: Path
) -> None:
    def run(ranks: int, arguments: str) -> None:
        arguments += f" --checkpoint {tmp_path / 'last.pt'} --out {tmp_path}"
        if ranks == 1:
            assert trained(arguments) == 0
        else:
            assert set({2: two, 3: three}[ranks].run(trained, arguments)) == {0}

    run(before, "--stop-after 5")
    saved = torch.load(tmp_path / "last.pt", weights_only=True)
    assert len(saved["losses"]) == 5
    run(after, "")  # compares all steps with a training that nothing interrupts
    losses = json.loads((tmp_path / "results.json").read_text())["losses"]
    assert next(iter(losses)) == f"{after} ranks"
    assert losses[f"{after} ranks"][:5] == saved["losses"]


def test_refuses_a_checkpoint_of_another_training(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    assert trained(f"--checkpoint {path} --stop-after 1") == 0
    with pytest.raises(SystemExit, match="another training"):
        trained(f"--checkpoint {path} --seed 1")


def test_under_torchrun(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
        str(EXAMPLES / "train_context_parallel.py"), *TINY.split(), "--out", str(tmp_path),
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert "2 ranks" in result.stdout and "they agree" in result.stdout
