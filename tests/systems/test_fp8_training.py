"""The trainer: the true loss, right gradients, overflow, and a loss that falls as in fp32."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from fp8_cases import mlp
from torch import nn

from flash_cute.precision import (
    FP8Config,
    FP8Format,
    FP8LinearLayer,
    FP8TrainingEngine,
    create_fp8_trainer,
)
from flash_cute.precision.training import default_loss


def task(device="cpu", batch=32):
    """A model, an optimizer, inputs and classes."""
    model = mlp(16, 64, 10, device=device)
    inputs = torch.randn(batch, 16, device=device)
    targets = torch.randint(10, (batch,), device=device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), inputs, targets


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_the_loss_is_true_and_the_step_is_fp32s(device, scale):
    model, _, inputs, targets = task(device)
    plain = copy.deepcopy(model)
    trainer = FP8TrainingEngine(model, FP8Config(loss_scale=scale))
    loss = trainer.training_step(inputs, targets)
    exact = F.cross_entropy(plain(inputs), targets)
    exact.backward()
    exact = exact.detach()
    assert loss.requires_grad is False
    assert float(loss) == pytest.approx(float(exact), rel=0.02)
    with torch.no_grad():
        assert float(loss) == pytest.approx(float(F.cross_entropy(model(inputs), targets)))
    before = weights(model)
    assert trainer.optimizer_step(torch.optim.SGD(model.parameters(), lr=1.0)) is True
    for p, old, q in zip(model.parameters(), before, plain.parameters(), strict=True):
        assert 0 < (old - p - q.grad).norm() < 0.25 * q.grad.norm()


def test_default_losses():
    torch.manual_seed(0)
    model = mlp(8, 5)
    trainer = FP8TrainingEngine(model)
    x, values = torch.randn(2, 3, 8), torch.randn(2, 3, 5)
    classes = torch.randint(5, (2, 3))
    with torch.no_grad():
        out = model(x)
    expected = F.cross_entropy(out.view(6, 5), classes.view(6))
    assert trainer.training_step(x, classes) == pytest.approx(expected)
    assert trainer.training_step(x, classes.to(torch.uint8)) == pytest.approx(expected)
    assert trainer.training_step(x, values) == pytest.approx(F.mse_loss(out, values))
    own = trainer.training_step(x, values, lambda out, y: (out - y).abs().sum())
    assert own == pytest.approx((out - values).abs().sum())
    for bad in (torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.long)):
        with pytest.raises(ValueError, match=r"targets \(2, 4\) .* \(2, 3, 5\).*loss_fn"):
            trainer.training_step(x, bad)
    with pytest.raises(ValueError, match=r"a scalar, not of shape \(2, 3, 5\)"):
        trainer.training_step(x, values, lambda out, y: out - y)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (4,), (2, 3), (2, 0, 3), (2, 3, 2, 2)])
@pytest.mark.parametrize("classes", [1, 3])
def test_cross_entropy_of_any_rank(shape, classes):
    """Also of one sample without a batch dimension; over no rows the mean is NaN."""
    logits = torch.randn(*shape, classes, requires_grad=True)
    targets = torch.randint(classes, shape)
    exact = logits.detach().double().requires_grad_()
    picked = exact.log_softmax(-1).gather(-1, targets[..., None])
    (-picked.mean()).backward()
    loss = default_loss(logits, targets)
    loss.backward()
    assert loss.shape == () and loss.dtype == torch.float32
    expected = -picked.mean().detach().float()
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(logits.grad, exact.grad.float(), rtol=1e-5, atol=1e-6)
    strided = logits.transpose(0, -1).contiguous().transpose(0, -1)
    torch.testing.assert_close(default_loss(strided, targets), loss, equal_nan=True)


def test_one_sample_without_a_batch_dimension():
    model = mlp(8, 5)
    trainer, x = FP8TrainingEngine(model), torch.randn(8)
    loss = trainer.training_step(x, torch.tensor(3))
    assert float(loss) == pytest.approx(float(-model(x).detach().log_softmax(-1)[3]), rel=1e-6)


@pytest.mark.parametrize(
    "output,targets",
    [((4, 0), (4,)), ((0,), ()), ((), ()), ((2, 0, 3), (2, 3)), ((3,), (3,)), ((0, 0), (0,))],
)
def test_shapes_that_fit_no_loss(output, targets):
    with pytest.raises(ValueError, match=r"do not fit the output .*loss_fn"):
        default_loss(torch.zeros(output), torch.zeros(targets, dtype=torch.long))


def test_outputs_and_targets_that_are_no_tensors():
    for output, targets, name in [((torch.ones(2),), torch.ones(2), "output is tuple"),
                                  (torch.ones(2), None, "targets is NoneType")]:  # fmt: skip
        with pytest.raises(TypeError, match=f"{name}, no tensor: give a loss_fn"):
            default_loss(output, targets)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x, scale):  # logits as cross_entropy takes them: (n, classes, places)
        return (self.linear(x) * scale).transpose(1, 2)


def test_several_inputs_and_classes_in_front():
    trainer = FP8TrainingEngine(TwoInputs())
    inputs = torch.randn(2, 5, 4), 3.0
    classes = torch.randint(3, (2, 5))
    loss = trainer.training_step(inputs, classes)
    with torch.no_grad():
        assert loss == pytest.approx(F.cross_entropy(trainer.model(*inputs), classes))


def test_gradients_do_not_pile_up():
    model, optimizer, inputs, targets = task()
    optimizer.param_groups[0]["lr"] = 0.0
    trainer = FP8TrainingEngine(model)
    gradients = []
    for _ in range(2):
        trainer.training_step(inputs, targets)
        gradients.append(model[0].weight.grad.clone())
        trainer.optimizer_step(optimizer)
        assert all(p.grad is None for p in model.parameters())
    assert torch.equal(*gradients)
    for _ in range(2):  # between two steps of the optimizer they add up
        trainer.training_step(inputs, targets)
    torch.testing.assert_close(model[0].weight.grad, 2 * gradients[0])


@pytest.mark.parametrize("scaling", ["dynamic", "delayed"])
@pytest.mark.parametrize("where", ["inputs", "gradient"])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_step_with_overflow_is_skipped_and_counted(device, where, bad, scaling):
    model, _, inputs, targets = task(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    config = FP8Config(scaling=scaling, loss_scale=8.0, growth_interval=2)
    trainer = FP8TrainingEngine(model, config)
    trainer.training_step(inputs, targets)
    assert trainer.optimizer_step(optimizer)
    before, state = weights(model), copy.deepcopy(optimizer.state_dict()["state"])
    spoilt = inputs.clone()
    if where == "inputs":
        spoilt[3, 3] = bad
    trainer.training_step(spoilt, targets)
    if where == "gradient":
        model[0].bias.grad[0] = bad
    assert trainer.optimizer_step(optimizer) is False
    assert all(map(torch.equal, weights(model), before))
    for now, then in zip(optimizer.state_dict()["state"].values(), state.values(), strict=True):
        assert all(torch.equal(now[key], then[key]) for key in then)
    assert all(p.grad is None for p in model.parameters())
    seen = trainer.get_training_statistics()
    assert (seen["overflows"], seen["steps"], seen["loss_scale"]) == (1, 1, 4)
    for step in range(4):
        assert trainer.training_step(inputs, targets).isfinite()
        assert trainer.optimizer_step(optimizer) is True
        assert trainer.loss_scale == (4 if step == 0 else 8)
    seen = trainer.get_training_statistics()
    assert (seen["overflows"], seen["steps"], seen["batches"]) == (1, 5, 6)
    assert not any(map(torch.equal, weights(model), before))


def test_fp16_scales_its_loss():
    """Gradients of 1e-8, which fp16 does not have, still move the weights."""
    assert FP8TrainingEngine(mlp(4, 4)).loss_scale == 1
    torch.manual_seed(0)
    model = mlp(8, 8, dtype=torch.float16)
    trainer = create_fp8_trainer(model)
    assert trainer.loss_scale == 65536
    x = torch.randn(4, 8, dtype=torch.float16)
    trainer.training_step(x, x, lambda out, y: out.float().sum() * 1e-8)
    assert model[0].weight.grad.float().abs().max() > 1e-5


def test_clipping():
    model, _, inputs, targets = task()
    trainer = FP8TrainingEngine(model, FP8Config(loss_scale=256.0))
    before = weights(model)
    trainer.training_step(inputs, targets)
    trainer.optimizer_step(torch.optim.SGD(model.parameters(), lr=1.0), max_norm=1e-2)
    moved = [(p - old).detach().norm() for p, old in zip(model.parameters(), before, strict=True)]
    assert torch.stack(moved).norm() == pytest.approx(1e-2, rel=1e-3)


def test_two_optimizers_and_an_overflow_between():
    """Gradients are divided by the loss scale with which they were computed."""
    model, config = mlp(8, 16, 4), FP8Config(loss_scale=1024.0)
    trainer = FP8TrainingEngine(model, config)
    one, two = (torch.optim.SGD(model[i].parameters(), 0.1) for i in (0, 2))
    x, y = torch.randn(32, 8), torch.randn(32, 4)
    trainer.training_step(x, y)
    before, gradient = model[2].weight.detach().clone(), model[2].weight.grad / 1024
    model[0].weight.grad[0, 0] = float("inf")
    assert not trainer.optimizer_step(one) and trainer.loss_scale == 512
    assert trainer.optimizer_step(two)
    torch.testing.assert_close(model[2].weight, before - 0.1 * gradient)

    trainer.training_step(x, y)
    kept = model[0].weight.grad / 512
    assert trainer.optimizer_step(two)
    trainer.loss_scale = 1024.0
    alone = copy.deepcopy(model)
    alone.zero_grad()
    FP8TrainingEngine(alone, config).training_step(x, y)
    trainer.training_step(x, y)  # first rescales the gradients that are there to its own loss scale
    torch.testing.assert_close(model[0].weight.grad / 1024, kept + alone[0].weight.grad / 1024)


def test_a_step_without_gradients_is_refused():
    model, optimizer, *_ = task()
    trainer = FP8TrainingEngine(model)
    with pytest.raises(RuntimeError, match="training_step first"):
        trainer.optimizer_step(optimizer)
    assert trainer.get_training_statistics()["steps"] == 0


def test_sparse_gradients():
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = FP8TrainingEngine(model, FP8Config(loss_scale=64.0))
    tokens, targets = torch.tensor([1, 2]), torch.tensor([0, 2])
    plain = copy.deepcopy(model[0].weight)
    trainer.training_step(tokens, targets)
    exact = model[0].weight.grad.to_dense() / 64
    assert trainer.optimizer_step(optimizer)
    torch.testing.assert_close(model[0].weight, plain - 0.1 * exact)


@pytest.mark.parametrize(
    "config",
    [FP8Config(), FP8Config(scaling="delayed"), FP8Config(backward_format=FP8Format.E4M3)],
    ids=["dynamic", "delayed", "e4m3"],
)
def test_the_loss_falls_as_in_fp32(device, config):
    def teacher(x):
        return (x[:, :10] + x[:, 6:] * x[:, :10].roll(1, 1)).argmax(1)

    def train(step_of, model):
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        for _ in range(150):
            x = torch.randn(128, 16).to(device)
            losses.append(step_of(model, optimizer, x, teacher(x)))
        return sum(map(float, losses[-20:])) / 20

    def plain_step(model, optimizer, x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    model = mlp(16, 64, 64, 10, device=device)
    trained = train(plain_step, copy.deepcopy(model))
    trainer = FP8TrainingEngine(model, config)

    def fp8_step(model, optimizer, x, y):
        loss = trainer.training_step(x, y)
        assert trainer.optimizer_step(optimizer)
        return loss

    assert trained < 1.4 < 2.3
    assert train(fp8_step, trainer.model) == pytest.approx(trained, rel=0.06)


def test_a_step_waits_for_no_device(cuda):
    model, optimizer, inputs, targets = task(cuda)
    trainer = create_fp8_trainer(model)
    trainer.training_step(inputs, targets)
    try:
        torch.cuda.set_sync_debug_mode("error")
        trainer.training_step(inputs, targets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.optimizer_step(optimizer)


def test_device_moves_model_and_batches(cuda):
    model, _, inputs, targets = task()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_fp8_trainer(model, device=torch.device(cuda))
    assert all(p is q and p.is_cuda for p, q in zip(model.parameters(), parameters, strict=True))
    assert trainer.training_step(inputs, targets).is_cuda
    assert trainer.optimizer_step(optimizer)


def test_a_compiled_model(device):
    model, optimizer, inputs, targets = task(device)
    trainer = FP8TrainingEngine(torch.compile(model, backend="aot_eager"))
    assert isinstance(model[0], FP8LinearLayer)
    before = weights(model)
    losses = []
    for _ in range(3):
        losses.append(float(trainer.training_step(inputs, targets)))
        assert trainer.optimizer_step(optimizer)
    assert losses[2] < losses[1] < losses[0]
    assert not any(map(torch.equal, weights(model), before))


def test_layers_added_later_are_converted():
    model = mlp(4, 4)
    trainer = FP8TrainingEngine(model)
    model.append(nn.Linear(4, 4))
    with trainer as entered:
        assert entered is trainer
        assert isinstance(model[1], FP8LinearLayer)
    model.append(nn.Linear(4, 4))
    trainer.setup_fp8_training()
    assert trainer.get_training_statistics()["fp8_layers"] == 3


def test_positional_arguments_of_create_fp8_trainer():
    trainer = create_fp8_trainer(mlp(4, 4), FP8Format.E5M2, FP8Format.E4M3, torch.device("cpu"))
    config = trainer.model[0].config
    assert (config.forward_format, config.backward_format) == (FP8Format.E5M2, FP8Format.E4M3)
    with pytest.raises(TypeError, match="forward_format must be an FP8Format"):
        create_fp8_trainer(mlp(4, 4), "e4m3")
    with pytest.raises(ValueError, match=r"has no nn\.Linear"):
        create_fp8_trainer(nn.Conv1d(1, 1, 1))
    with pytest.raises(TypeError, match=r"must be an nn\.Module"):
        create_fp8_trainer(None)


@pytest.mark.parametrize("device", ["cuda:99", torch.device("cuda:99"), "xpu:77", "abacus"])
def test_an_unavailable_device_is_refused_before_conversion(device):
    model = mlp(4, 8, 4)
    layers = list(model)
    with pytest.raises(ValueError, match="device is "):
        create_fp8_trainer(model, device=device)
    assert all(now is old for now, old in zip(model, layers, strict=True))
    assert all(type(layer) in (nn.Linear, nn.GELU) for layer in model)


def test_a_batch_moves_to_the_model_device():
    model = nn.Linear(8, 4, device="meta")
    trainer = create_fp8_trainer(model)
    loss = trainer.training_step((torch.ones(2, 8),), torch.zeros(2, 4))
    assert loss.is_meta
    assert all(p.grad.is_meta and p.grad.shape == p.shape for p in trainer.model.parameters())


def test_arguments_that_could_mean_two_things_or_none():
    trainer = create_fp8_trainer(mlp(4, 4))
    with pytest.raises(TypeError, match=r"targets are bool: give \.long\(\)"):
        trainer.training_step(torch.randn(3, 4), torch.ones(3, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, not NoneType"):
        trainer.optimizer_step(None)
