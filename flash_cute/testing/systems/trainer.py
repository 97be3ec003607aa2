"""FP8TrainingEngine with good and bad batches: which steps are taken, and what they change."""

from __future__ import annotations

import copy
import math
import random
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flash_cute.precision import FP8Config, FP8TrainingEngine
from flash_cute.testing.systems import contract
from flash_cute.testing.systems.findings import Findings, same_bits


@dataclass(frozen=True, kw_only=True)
class Case:
    """``batches`` are "good", "nan", "inf", "twice" (two before a step), or numbers of bad ones."""

    seed: int = 0
    dtype: str = "float32"
    batches: tuple[str, ...] = ("good",)
    optimizer: str = "sgd"
    max_norm: float = 0.0  # 0 is None
    growth_interval: int = 100
    loss_scale: float = 0.0  # 0 is None
    scaling: str = "dynamic"
    is_sparse: bool = False
    resume: int = -1  # before this batch a copy resumes from saved states


def draw(pick: random.Random) -> Case:
    kinds = ("good", "good", "good", "twice", "nan", "inf", "huge")
    batches = [pick.choice(kinds) for _ in range(pick.randint(1, 10))]
    if pick.random() < 0.15:
        batches.insert(pick.randint(0, len(batches)), f"nan*{pick.choice((20, 50, 160))}")
        batches += ["good", "good"]
    dtype, is_sparse = (
        pick.choice(("float32", "float32", "bfloat16", "float16")),
        pick.random() < 0.15,
    )
    return Case(
        seed=pick.randrange(2**31), dtype="float32" if is_sparse else dtype,
        batches=tuple(batches), optimizer=pick.choice(("sgd", "momentum", "adam")),
        max_norm=pick.choice((0.0, 0.0, 0.1, 10.0)), growth_interval=pick.choice((1, 2, 100)),
        loss_scale=pick.choice((0.0, 0.0, 0.0, 8.0)), scaling=pick.choice(("dynamic", "delayed")),
        is_sparse=is_sparse,
        resume=pick.randrange(len(batches)) if pick.random() < 0.3 else -1,
    )  # fmt: skip


class _Tokens(nn.Module):
    """An embedding with sparse gradients, before a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8, sparse=True)
        self.linear = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[:, 0].abs().nan_to_num(0, 0, 0) * 3).long().clamp(max=11)
        return self.linear(self.embedding(ids) + 0 * x[:, :1] + x)


def _model(case: Case, device: str) -> nn.Module:
    torch.manual_seed(case.seed)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    model = _Tokens() if case.is_sparse else model
    return model.to(device, getattr(torch, case.dtype))


def _optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "adam" and not case.is_sparse:
        return torch.optim.Adam(model.parameters(), 1e-2, eps=1e-4)
    momentum = 0.9 if case.optimizer == "momentum" and not case.is_sparse else 0.0
    return torch.optim.SGD(model.parameters(), 0.05, momentum=momentum)


def _batch(case: Case, number: int, kind: str, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(case.seed + number)
    x = torch.randn(4, 8, generator=generator)
    y = torch.randn(4, 3, generator=generator)
    if kind in ("nan", "inf"):
        x[number % 4, number % 8] = float(kind)
    if kind == "huge":
        y = y * 1e3  # times 65536 its gradient is too large for fp16
    return x.to(device, getattr(torch, case.dtype)), y.to(device)


def _expanded(batches: tuple[str, ...]) -> list[str]:
    kinds = []
    for batch in batches:
        kind, _, times = batch.partition("*")
        kinds += [kind] * int(times or 1)
    return kinds


@dataclass
class _Run:
    """A model in training, and its expected statistics."""

    model: nn.Module
    trainer: FP8TrainingEngine
    optimizer: torch.optim.Optimizer
    steps: int = 0
    overflows: int = 0

    def state(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()["state"]))


def _start(case: Case, device: str) -> _Run:
    model = _model(case, device)
    config = FP8Config(
        scaling=case.scaling, growth_interval=case.growth_interval,
        loss_scale=case.loss_scale or None,
    )  # fmt: skip
    trainer = FP8TrainingEngine(model, config)
    return _Run(trainer.model, trainer, _optimizer(case, trainer.model))


def check(case: Case, device: str) -> Findings:
    find = Findings()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = _start(case, device)
        other: _Run | None = None
        for number, kind in enumerate(_expanded(case.batches)):
            if number == case.resume:
                other = _resumed(find, case, run, device)
            _step(find, case, run, number, kind, device)
            if other is not None:
                _step(Findings(), case, other, number, kind, device)
            if len(find.failures) > 2:
                return find
        if other is not None:
            find.equal("resumed training", other.state(), run.state())
            scales = (other.trainer.loss_scale, run.trainer.loss_scale)
            find.that(scales[0] == scales[1], f"loss_scale after resuming and without: {scales}")
        counted = run.trainer.get_training_statistics()
        ought = {"steps": run.steps, "overflows": run.overflows}
        for name, value in ought.items():
            find.that(counted[name] == value, f"{name} is {counted[name]}; {value} were seen")
    return find


def _resumed(find: Findings, case: Case, run: _Run, device: str) -> _Run | None:
    """A new trainer that loads all saved states."""
    with find.trying("resuming"):
        other = _start(case, device)
        other.model.load_state_dict(contract.saved(run.model.state_dict()))
        other.optimizer.load_state_dict(contract.saved(run.optimizer.state_dict()))
        trainer: Any = other.trainer
        trainer.load_state_dict(contract.saved(run.trainer.state_dict()))  # type: ignore[attr-defined]
        return other
    return None


def _step(find: Findings, case: Case, run: _Run, number: int, kind: str, device: str) -> None:
    before = run.state()
    trainer, is_bad = run.trainer, kind in ("nan", "inf")
    for part in range(2 if kind == "twice" else 1):
        x, y = _batch(case, 1000 * part + number, kind, device)
        loss = trainer.training_step(x, y)
        if kind in ("good", "twice") and "huge" not in case.batches:
            find.that(math.isfinite(float(loss)), f"batch {number}: a good batch's loss is {loss}")
    grads = {n: p.grad for n, p in run.model.named_parameters() if p.grad is not None}
    scale = trainer.loss_scale
    given = [g.to_dense().float() / scale for g in grads.values()]
    finite = all(bool(g.isfinite().all()) for g in given)
    moves = any(bool((g != 0).any()) for g in given)
    try:
        taken = trainer.optimizer_step(run.optimizer, case.max_norm or None)
    except Exception as error:
        after = [g.to_dense().float() for g in grads.values()]
        event = f"optimizer_step raised {type(error).__name__}"
        same = same_bits(after, [g * scale for g in given])
        find.that(same, f"{event} and changed gradients")
        find.equal(f"{event}: weights and optimizer", run.state(), before)
        can_refuse = case.is_sparse and case.max_norm  # torch does not clip sparse gradients
        find.that(bool(can_refuse), f"{event}: {str(error)[:150]}")
        run.optimizer.zero_grad()
        return
    after_step = run.state()
    find.that(type(taken) is bool, f"optimizer_step gives {type(taken).__name__}")
    run.steps, run.overflows = run.steps + taken, run.overflows + (not taken)
    where = f"batch {number} ({kind})"
    if is_bad:
        find.that(not taken, f"{where}: a step is taken")
    if kind in ("good", "twice") and finite:
        find.that(taken, f"{where}: no step is taken of finite gradients")
    if not taken:
        find.equal(f"{where}: weights and optimizer after no step", after_step, before)
    elif moves and case.dtype == "float32" and kind != "huge":
        find.that(not same_bits(after_step[0], before[0]), f"{where}: a step moved nothing")
    _check_after(find, case, run, after_step, where)
    if taken and not find.failures:
        _check_update(find, case, run, before, grads, given, where)


def _check_after(find: Findings, case: Case, run: _Run, state: Any, where: str) -> None:
    """Checks after each step, taken or not."""
    numbers = [x for x in state[0].values() if isinstance(x, Tensor)]
    find.that(all(bool(x.isfinite().all()) for x in numbers), f"{where}: weights are not finite")
    left = [n for n, p in run.model.named_parameters() if p.grad is not None and p.grad.any()]
    find.that(not left, f"{where}: gradients are left in {left[:3]}")
    now = run.trainer.loss_scale
    if case.dtype != "float16" and not case.loss_scale:
        find.that(now == 1, f"{where}: loss_scale is {now} in {case.dtype}")
    find.that(now >= 1, f"{where}: loss_scale is {now}, below 1")


def _check_update(
    find: Findings, case: Case, run: _Run, before: Any, grads: Any, given: list[Tensor], where: str
) -> None:
    """Plain SGD steps by the learning rate times the unscaled and clipped gradient."""
    if case.optimizer != "sgd" or case.dtype != "float32" or case.is_sparse:
        return
    norm = float(torch.stack([g.double().norm() for g in given]).norm())
    factor = min(1.0, case.max_norm / (norm + 1e-6)) if case.max_norm else 1.0
    for (name, _), gradient in zip(grads.items(), given, strict=True):
        old = before[0][name].double()
        new = dict(run.model.named_parameters())[name].detach()
        true = old - 0.05 * factor * gradient.double()
        size = float(true.abs().max())
        find.close(f"{where}: {name}", new, true, 4e-6 * max(size, 1e-3))
