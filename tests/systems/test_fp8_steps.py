"""Steps of the trainer: loss scales, what is checked, counted and left as it was."""

from __future__ import annotations

import copy
import gc
import random
import weakref

import pytest
import torch
from fp8_cases import mlp
from torch import nn

from flash_cute.precision import FP8Config, FP8LinearLayer, FP8TrainingEngine, create_fp8_trainer

BAD = [torch.nan, torch.inf]


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def task(dtype=torch.float32, config=None, lr=0.1):
    model = mlp(8, 16, 4, dtype=dtype)
    trainer = FP8TrainingEngine(model, config)
    x, y = torch.randn(12, 8, dtype=dtype), torch.randn(12, 4, dtype=dtype)
    return trainer, torch.optim.SGD(model.parameters(), lr=lr), x, y


@pytest.mark.parametrize("scaling", ["dynamic", "delayed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", BAD)
def test_many_bad_batches_do_no_harm(bad, dtype, scaling):
    trainer, optimizer, x, y = task(dtype, FP8Config(scaling=scaling))
    before = weights(trainer.model)
    for _ in range(200):
        trainer.training_step(x * bad, y)
        assert trainer.optimizer_step(optimizer) is False
    assert all(map(torch.equal, weights(trainer.model), before))
    assert trainer.loss_scale == 1
    seen = trainer.get_training_statistics()
    assert (seen["steps"], seen["overflows"], seen["batches"]) == (0, 200, 200)
    fresh, other, *_ = task(dtype)
    fresh.loss_scale = 1
    for each, its in ((trainer, optimizer), (fresh, other)):
        each.training_step(x, y)
        assert each.optimizer_step(its) is True
    for ours, theirs, old in zip(weights(trainer.model), weights(fresh.model), before, strict=True):
        assert torch.equal(ours, theirs) and not torch.equal(ours, old)
    assert trainer.get_training_statistics()["steps"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_without_fp16_the_scale_is_1_and_fixed(dtype):
    trainer, optimizer, x, y = task(dtype, FP8Config(growth_interval=1))
    for number in range(12):
        trainer.training_step(x * (torch.nan if number % 3 == 0 else 1), y)
        assert trainer.optimizer_step(optimizer) is (number % 3 != 0)
        assert trainer.loss_scale == 1


@pytest.mark.parametrize("first", [None, 8.0, 100.0])
def test_in_fp16_the_scale_grows_and_backs_off(first):
    """As GradScaler's rule says, but never below 1."""
    config = FP8Config(loss_scale=first, growth_interval=3)
    trainer, optimizer, x, y = task(torch.float16, config, lr=0.0)
    draw, expected, good = random.Random(0), first or 65536.0, 0
    for number in range(120):
        assert trainer.loss_scale == expected
        is_bad = draw.random() < (0.2 if number < 60 else 0.9)
        trainer.training_step(x, y, lambda out, y: out.float().mean() * 1e-8)
        if is_bad:
            trainer.model[0].weight.grad[0, 0] = draw.choice(BAD)
        assert trainer.optimizer_step(optimizer) is not is_bad
        good = 0 if is_bad else good + 1
        if is_bad:
            expected = max(1.0, expected / 2)
        elif good == 3:
            expected, good = 2 * expected, 0
    assert expected == 1


def test_mixed_parameters_are_scaled_as_fp16():
    model = nn.ModuleDict({"wide": nn.Linear(4, 4), "narrow": nn.Linear(4, 4).half()})
    assert create_fp8_trainer(model).loss_scale == 65536
    model = nn.ModuleDict({"wide": nn.Linear(4, 4), "narrow": nn.Linear(4, 4).bfloat16()})
    assert create_fp8_trainer(model).loss_scale == 1


def test_a_scale_that_is_given_holds_for_any_dtype_and_comes_back():
    trainer, optimizer, x, y = task(config=FP8Config(loss_scale=6.0, growth_interval=1))
    seen = []
    for bad in (1, torch.nan, torch.nan, torch.nan, torch.nan, 1, 1, 1, 1):
        trainer.training_step(x * bad, y)
        trainer.optimizer_step(optimizer)
        seen.append(trainer.loss_scale)
    assert seen == [6, 3, 1.5, 1, 1, 2, 4, 6, 6]
    trainer, optimizer, x, y = task(config=FP8Config(loss_scale=0.5))
    trainer.training_step(x * torch.nan, y)
    trainer.optimizer_step(optimizer)
    assert trainer.loss_scale == 0.5


@pytest.mark.parametrize("first", [None, 2.0, 512.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scale_that_is_set_comes_back_and_is_never_lowered_by_growth(dtype, first):
    """Nor is it by a resume, with a state that says how high it was, or with one of before."""
    config = FP8Config(loss_scale=first, growth_interval=1)
    trainer, optimizer, x, y = task(dtype, config, lr=0.0)
    trainer.loss_scale = given = random.choice([40.0, 64.0, 96.0])

    def step(bad=1.0):
        trainer.training_step(x * bad, y)
        trainer.optimizer_step(optimizer)
        return trainer.loss_scale

    highest = max(given, first or 0)
    grown = [min(given * 2**n, highest) for n in (1, 2, 3, 4, 5)]
    assert [step() for _ in range(5)] == grown
    assert [step(torch.nan) for _ in range(2)] == [highest / 2, highest / 4]
    state = trainer.state_dict()
    trainer, optimizer, *_ = task(dtype, config, lr=0.0)
    trainer.loss_scale = 4096.0  # what is loaded replaces it
    trainer.load_state_dict(state)
    assert [step() for _ in range(4)] == [highest / 2, highest, highest, highest]
    state = trainer.state_dict()
    del state["highest_loss_scale"]
    trainer, optimizer, *_ = task(dtype, FP8Config(growth_interval=1), lr=0.0)
    trainer.load_state_dict(state)
    assert [step(), step(torch.nan), step()] == [highest, highest / 2, highest]


def test_the_largest_scale_is_finite():
    trainer, optimizer, x, y = task(torch.float16, FP8Config(growth_interval=1), lr=0.0)
    trainer.loss_scale = 2.0**126
    for _ in range(4):
        trainer.training_step(x, y, lambda out, y: out.float().sum() * 0)
        assert trainer.optimizer_step(optimizer)
    assert trainer.loss_scale == 2.0**127
    for value in (0, -1.0, torch.nan, torch.inf, True, "1"):
        with pytest.raises((TypeError, ValueError), match="loss_scale must be"):
            trainer.loss_scale = value


def test_several_optimizers_count_a_batch_once():
    model = mlp(8, 16, 4)
    trainer = FP8TrainingEngine(model, FP8Config(loss_scale=1024.0, growth_interval=2))
    optimizers = [torch.optim.SGD(model[i].parameters(), 0.1) for i in (0, 2)]
    x, y = torch.randn(5, 8), torch.randn(5, 4)
    scales = []
    for bad in (torch.nan, 1, 1, 1):
        trainer.training_step(x * bad, y)
        for optimizer in optimizers:
            trainer.optimizer_step(optimizer)
        scales.append(trainer.loss_scale)
    assert scales == [512, 512, 1024, 1024]
    trainer.training_step(x, y)  # one good step, which counts, and one bad, which overrules it
    model[2].weight.grad[0, 0] = torch.inf
    assert [trainer.optimizer_step(optimizer) for optimizer in optimizers] == [True, False]
    assert trainer.loss_scale == 512


class Tempered(nn.Module):
    """A loss with a parameter of its own and one of the model's."""

    def __init__(self, model):
        super().__init__()
        self.temperature, self.bias = nn.Parameter(torch.ones(())), model[2].bias

    def forward(self, output, targets):
        return (output * self.temperature + self.bias - targets).square().mean()


def test_gradients_of_the_loss_follow_its_scale_once():
    trainer, _, x, y = task()
    loss = Tempered(trainer.model)
    trainer.training_step(x, y, loss)
    parameters = [*trainer.model.parameters(), loss.temperature]
    once = [p.grad.clone() for p in parameters]
    trainer.loss_scale = 4.0
    trainer.training_step(x, y, loss)
    for p, before in zip(parameters, once, strict=True):
        torch.testing.assert_close(p.grad, 8 * before)


def reached_by_a_closure(weight, bias):
    return lambda out, y: (out @ weight + bias - y).square().mean()


def reached_by_a_method(weight, bias):
    loss = nn.Linear(4, 4)
    loss.weight, loss.bias = weight, bias
    loss.value = lambda out, y: (loss(out) - y).square().mean()
    return loss.value


@pytest.mark.parametrize("loss_of", [reached_by_a_closure, reached_by_a_method])
@pytest.mark.parametrize("stepped", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_that_only_a_closure_reaches_follow_the_scale(dtype, stepped, loss_of):
    """Of the batch before, which another optimizer took, or of a batch without this loss."""
    trainer, optimizer, x, y = task(dtype, FP8Config(loss_scale=8.0), lr=0.0)
    own = [nn.Parameter(torch.randn(4, 4, dtype=dtype)), nn.Parameter(torch.randn(4, dtype=dtype))]
    theirs, loss = torch.optim.SGD(own, lr=1.0), loss_of(*own)
    if stepped:
        trainer.training_step(x, y, loss)
        trainer.optimizer_step(theirs)
        own[0].data.normal_(), own[1].data.normal_()
    scale = trainer.loss_scale
    trainer.training_step(x, y, loss)
    once = [p.grad / scale for p in own]
    trainer.optimizer_step(optimizer)
    trainer.loss_scale = 4 * scale
    if stepped:  # this one does not reach them
        trainer.training_step(x, y)
    else:
        trainer.training_step(x, y, loss)
        once = [2 * gradient for gradient in once]
    before = weights(nn.ParameterList(own))
    assert trainer.optimizer_step(theirs)
    for p, old, gradient in zip(own, before, once, strict=True):
        torch.testing.assert_close(old - p.detach(), gradient, rtol=2e-2, atol=2e-3)


def test_a_trainer_holds_no_optimizer():
    trainer, optimizer, x, y = task()
    trainer.training_step(x, y)
    trainer.optimizer_step(optimizer)
    seen = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("scaling", ["dynamic", "delayed"])
def test_a_bad_batch_in_the_middle_leaves_nothing(scaling):
    """Neither as a value that is not finite, nor as one that is but larger than all others."""
    trainer, optimizer, x, y = task(config=FP8Config(scaling=scaling))
    for _ in range(3):
        trainer.training_step(x, y)
        trainer.optimizer_step(optimizer)
    trainer.training_step(x * 1e25, y * torch.nan)
    assert trainer.optimizer_step(optimizer) is False
    exact = copy.deepcopy(trainer.model)
    dynamic = FP8TrainingEngine(exact, FP8Config())
    dynamic.training_step(x, y)
    trainer.training_step(x, y)
    assert all(map(torch.equal, gradients(trainer.model), gradients(exact)))


def test_delayed_scales_follow_the_loss_scale():
    """Otherwise the first gradients after its growth would be clamped to half."""
    config = FP8Config(scaling="delayed", loss_scale=2.0)
    trainer, _, x, y = task(config=config)
    trainer.training_step(x, y)
    once = gradients(trainer.model)
    trainer.model.zero_grad()
    trainer.loss_scale = 64.0
    trainer.training_step(x, y)
    for ours, before in zip(gradients(trainer.model), once, strict=True):
        torch.testing.assert_close(ours, 32 * before)


def test_the_check_reads_what_the_optimizer_gets():
    """fp16 gradients that are finite until they are divided by a scale below 1."""
    trainer, optimizer, x, y = task(torch.float16, FP8Config(loss_scale=0.25))
    before = weights(trainer.model)
    trainer.training_step(x, y)
    trainer.model[0].weight.grad.fill_(3e4)
    assert trainer.optimizer_step(optimizer) is False
    assert all(map(torch.equal, weights(trainer.model), before))
    trainer.training_step(x, y)
    trainer.model[0].weight.grad.fill_(3e4)
    assert trainer.optimizer_step(optimizer, max_norm=1.0) is True  # clipped, they are finite


@pytest.mark.parametrize("dtype,size", [(torch.float16, 3e4), (torch.float32, 1e25)])
def test_clipping_of_gradients_whose_norm_their_dtype_lacks(dtype, size):
    trainer, optimizer, x, y = task(dtype, lr=1.0)
    trainer.loss_scale = 1
    before = weights(trainer.model)
    trainer.training_step(x, y)
    for p in trainer.model.parameters():
        p.grad.fill_(size)
    assert trainer.optimizer_step(optimizer, max_norm=4.0)
    count = sum(old.numel() for old in before)
    for p, old in zip(trainer.model.parameters(), before, strict=True):
        step = (old.double() - p.double()).mean()
        assert float(step) == pytest.approx(4 / count**0.5, rel=1e-2)


@pytest.mark.parametrize("max_norm", [0, 0.0, -1.0, torch.nan, True, "1", -torch.inf])
def test_norms_that_are_none(max_norm):
    trainer, optimizer, x, y = task(config=FP8Config(loss_scale=8.0))
    trainer.training_step(x, y)
    before = gradients(trainer.model)
    with pytest.raises((TypeError, ValueError), match="max_norm must be"):
        trainer.optimizer_step(optimizer, max_norm=max_norm)
    assert all(map(torch.equal, gradients(trainer.model), before))
    assert trainer.optimizer_step(optimizer, max_norm=torch.inf)


class Refuses(torch.optim.SGD):
    def step(self, closure=None):
        raise ValueError("not today")


@pytest.mark.parametrize("max_norm", [None, 1e-3])
@pytest.mark.parametrize("kind", [Refuses, torch.optim.LBFGS])
def test_an_optimizer_that_raises_leaves_all_as_it_was(kind, max_norm):
    trainer, optimizer, x, y = task(torch.float16)
    trainer.training_step(x, y)
    objects = [p.grad for p in trainer.model.parameters()]
    before, held = gradients(trainer.model), weights(trainer.model)
    with pytest.raises((ValueError, TypeError)):
        trainer.optimizer_step(kind(trainer.model.parameters(), lr=0.1), max_norm)
    assert all(p.grad is g for p, g in zip(trainer.model.parameters(), objects, strict=True))
    assert all(map(torch.equal, gradients(trainer.model), before))
    assert all(map(torch.equal, weights(trainer.model), held))
    seen = trainer.get_training_statistics()
    assert (seen["steps"], seen["overflows"], seen["loss_scale"]) == (0, 0, 65536)
    assert trainer.optimizer_step(optimizer)


@pytest.mark.parametrize("tokens", [[1, 2, 2], []])
@pytest.mark.parametrize("max_norm", [None, 0.01])
def test_sparse_gradients_are_clipped_and_kept(max_norm, tokens):
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3))
    trainer = FP8TrainingEngine(model, FP8Config(loss_scale=64.0))
    ids = torch.tensor(tokens, dtype=torch.long)
    trainer.training_step(ids, torch.zeros(len(tokens), 3), lambda out, y: (out - 1).square().sum())
    scaled = [p.grad.to_dense() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="sparse"):
        trainer.optimizer_step(torch.optim.Adam(model.parameters()), max_norm)
    kept = [p.grad.to_dense() for p in model.parameters()]
    assert model[0].weight.grad.is_sparse and all(map(torch.equal, kept, scaled))
    before = weights(model)
    assert trainer.optimizer_step(torch.optim.SGD(model.parameters(), lr=1.0), max_norm)
    norm = torch.stack([g.double().norm() for g in scaled]).norm() / 64
    factor = 1 if max_norm is None else min(1.0, max_norm / (float(norm) + 1e-6))
    for p, old, grad in zip(model.parameters(), before, scaled, strict=True):
        torch.testing.assert_close(p.detach(), old - grad * (factor / 64))
    assert trainer.steps == 1


def test_steps_are_the_calls_of_the_optimizer():
    trainer, optimizer, x, y = task()
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for batch in (x, x * torch.nan, x, x / 0, x):
        trainer.training_step(batch, y)
        trainer.optimizer_step(optimizer)
        assert trainer.steps == trainer.get_training_statistics()["steps"] == len(calls)
    assert len(calls) == 3 and trainer.overflows == 2 and trainer.batches == 5


def test_a_duplicated_parameter_is_unscaled_once():
    model = mlp(4, 4)
    trainer = FP8TrainingEngine(model, FP8Config(loss_scale=16.0))
    weight, bias = model.parameters()
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = torch.optim.SGD([weight, weight], lr=1.0)
    trainer.training_step(torch.randn(3, 4), torch.randn(3, 4))
    before, gradient = weight.detach().clone(), weight.grad / 16
    assert trainer.optimizer_step(optimizer) and bias.grad is not None
    torch.testing.assert_close(before - weight.detach(), 2 * gradient)


def test_losses_that_are_none():
    trainer, _, x, y = task()
    with pytest.raises(TypeError, match="the loss must be a tensor, not float"):
        trainer.training_step(x, y, lambda out, y: 1.0)
    with pytest.raises(TypeError, match="loss_fn must be a function, not str"):
        trainer.training_step(x, y, "mse")
    assert all(p.grad is None for p in trainer.model.parameters())


def test_inputs_of_a_model_on_several_devices_stay_where_they_are():
    model = nn.ModuleDict({"run": nn.Linear(4, 4), "far": nn.Linear(4, 4, device="meta")})
    model.forward = lambda x: model["run"](x)
    trainer = FP8TrainingEngine(model)
    assert trainer.training_step(torch.ones(2, 4), torch.zeros(2, 4)).device.type == "cpu"
    assert isinstance(model["run"], FP8LinearLayer) and model["run"].weight.grad is not None
