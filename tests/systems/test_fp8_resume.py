"""A training run in fp8 that stops and resumes: the trainer's state."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from fp8_cases import mlp

from flash_cute.precision import FP8Config, FP8TrainingEngine
from flash_cute.precision.fp8_scales import histories_of


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def new(dtype, scaling):
    torch.manual_seed(5)
    model = mlp(8, 16, 4, dtype=dtype)
    config = FP8Config(scaling=scaling, history_length=4, growth_interval=3)
    trainer = FP8TrainingEngine(model, config)
    return trainer, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def run(trainer, optimizer, batches):
    losses = []
    for x, y in batches:
        losses.append(float(trainer.training_step(x, y)))
        trainer.optimizer_step(optimizer, max_norm=1.0)
    return losses


@pytest.mark.parametrize("scaling", ["dynamic", "delayed"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("stop", range(2, 9))
def test_a_resumed_run_is_bitwise_equal(dtype, scaling, stop):
    """In whatever order the states are loaded."""
    torch.manual_seed(1)
    batches = [
        (torch.randn(6, 8).to(dtype) * size, torch.randn(6, 4).to(dtype))
        for size in (1, 1, 3, 1, torch.nan, 1, 2, 1, 1, 1, 5, 1)
    ]
    whole, optimizer = new(dtype, scaling)
    expected = run(whole, optimizer, batches)
    first, optimizer = new(dtype, scaling)
    losses = run(first, optimizer, batches[:stop])
    file = io.BytesIO()
    parts = {"model": first.model, "optimizer": optimizer, "trainer": first}
    torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    run(first, optimizer, batches)  # what was saved does not follow it
    file.seek(0)
    state = torch.load(file, weights_only=True)
    second, optimizer = new(dtype, scaling)
    run(second, optimizer, batches[::-1])
    parts = [("model", second.model), ("optimizer", optimizer), ("trainer", second)]
    for name, part in parts if stop % 2 else parts[::-1]:
        part.load_state_dict(state[name])
    assert second.state_dict().keys() == state["trainer"].keys()
    losses += run(second, optimizer, batches[stop:])
    torch.testing.assert_close(losses, expected, rtol=0, atol=0, equal_nan=True)
    assert all(map(torch.equal, weights(second.model), weights(whole.model)))
    assert second.get_training_statistics() == whole.get_training_statistics()
    ours, theirs = histories_of(second.model), histories_of(whole.model)
    assert len(ours) == (6 if scaling == "delayed" else 0) and ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_states_of_something_else():
    trainer, _ = new(torch.float32, "delayed")
    state = trainer.state_dict()
    other, _ = new(torch.float32, "dynamic")
    for bad, error, message in [
        (None, TypeError, "must be a trainer's state_dict, not NoneType"),
        ({}, ValueError, r"state has \[\]; expected \['batches'"),
        (state | {"steps": -1}, ValueError, r"state\['steps'\] must be at least 0"),
        (state | {"steps": 1.5}, TypeError, r"state\['steps'\] must be an int"),
        (state | {"loss_scale": torch.nan}, ValueError, r"state\['loss_scale'\] must be positive"),
        (state | {"loss_scale": 0.0}, ValueError, r"state\['loss_scale'\] must be positive"),
        (other.state_dict(), ValueError, "of another model or config: they differ in 0.scales"),
    ]:
        with pytest.raises(error, match=message):
            trainer.load_state_dict(bad)
    now = trainer.state_dict()
    assert {k: v for k, v in now.items() if k != "histories"} == {
        k: v for k, v in state.items() if k != "histories"
    }


HISTORY = "0.scales.input_history"
NO_STATES = {
    "loss": ["0.5", True, [1.0], 1j, torch.ones(())],
    "histories": [None, [], "all", {HISTORY: [1.0] * 4}, {HISTORY: None}, {HISTORY: torch.ones(5)},
                  {HISTORY: torch.ones(4, dtype=torch.long)}, {HISTORY: torch.ones(4).to_sparse()},
                  {HISTORY: torch.ones(4, device="meta")}, {7: torch.ones(4)}],
    "overflows": [None, -1, True, 1.0],
    "scale_of_gradients": [None, 0, -2.0, torch.inf, True, "1"],
    "highest_loss_scale": [None, 0, torch.nan, True, "1"],
}  # fmt: skip


@pytest.mark.parametrize("name,bad", [(name, x) for name, some in NO_STATES.items() for x in some])
def test_a_state_that_is_refused_changes_nothing(name, bad):
    """Neither numbers, nor histories, nor gradients that are there."""
    trainer, optimizer = new(torch.float16, "delayed")
    batches = [(torch.randn(6, 8).half(), torch.randn(6, 4).half()) for _ in range(3)]
    run(trainer, optimizer, batches)
    state = copy.deepcopy(trainer.state_dict()) | {"loss_scale": 4.0, "scale_of_gradients": 8.0}
    whole = state["histories"]
    state[name] = whole | bad if isinstance(bad, dict) else bad
    trainer.training_step(*batches[0])
    before = copy.deepcopy(trainer.state_dict())
    gradients = [p.grad.clone() for p in trainer.model.parameters()]
    with pytest.raises((TypeError, ValueError), match="state"):
        trainer.load_state_dict(state)
    now = trainer.state_dict()
    histories, others = now.pop("histories"), before.pop("histories")
    assert now == before and all(torch.equal(x, others[key]) for key, x in histories.items())
    kept = [p.grad for p in trainer.model.parameters()]
    assert all(map(torch.equal, kept, gradients))


def test_an_fp64_loss_is_resumed_exactly():
    trainer, _ = new(torch.float64, "dynamic")
    trainer.training_step(torch.randn(6, 8).double(), None, lambda out, _: out.square().sum() / 3)
    other, _ = new(torch.float64, "dynamic")
    other.load_state_dict(trainer.state_dict())
    assert other.get_training_statistics()["loss"] == trainer.get_training_statistics()["loss"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copied_trainer_is_independent(copied):
    trainer, optimizer = new(torch.float16, "delayed")
    batches = [(torch.randn(6, 8).half(), torch.randn(6, 4).half()) for _ in range(4)]
    run(trainer, optimizer, batches[:2])
    other = copied(trainer)
    its = torch.optim.SGD(other.model.parameters(), lr=0.05, momentum=0.9)
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert run(other, its, batches[2:]) == run(trainer, optimizer, batches[2:])
    assert all(map(torch.equal, weights(other.model), weights(trainer.model)))
    assert other.get_training_statistics() == trainer.get_training_statistics()
