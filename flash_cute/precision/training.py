"""Trains a model with fp8 products: the loss, its scale, and steps that overflow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_cute.hardware.devices import checked_device
from flash_cute.precision.formats import (
    LARGEST_LOSS_SCALE,
    FP8Config,
    FP8Format,
    check_positive,
)
from flash_cute.precision.fp8_convert import convert_model_to_fp8
from flash_cute.precision.fp8_linear import FP8LinearLayer
from flash_cute.precision.fp8_scales import histories_of, scales_of
from flash_cute.precision.gradients import all_finite, leaves_of, unscaled
from flash_cute.precision.loss_scale import LossScale
from flash_cute.precision.training_state import check_state

LossFunction = Callable[[Any, Any], Tensor]


def default_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy for integer targets, mean squared error for floating ones; in fp32.

    Args:
        output: logits (..., classes), also (classes,) of one sample, or cross_entropy's layout (n,
            classes, ...); for mean squared error any shape.
        targets: classes (...) or (n, ...), of an integer dtype; or values of the output's shape.

    Raises:
        TypeError: targets are bool, or one of the two is not a tensor.
        ValueError: the shapes fit neither loss, or there are no classes.
    """
    for name, given in (("output", output), ("targets", targets)):
        if not isinstance(given, Tensor):
            raise TypeError(f"the {name} is {type(given).__name__}, no tensor: give a loss_fn")
    if targets.dtype == torch.bool:
        raise TypeError(
            "targets are bool: give .long() for cross entropy, .float() for mean squared "
            "error, or a loss_fn"
        )
    shape = tuple(output.shape)
    if targets.is_floating_point():
        if shape == targets.shape:
            return F.mse_loss(output.float(), targets.float())
    elif shape[-1:] > (0,) and shape[:-1] == targets.shape:
        rows = output.float().reshape(targets.numel(), shape[-1])
        return F.cross_entropy(rows, targets.long().reshape(-1))
    elif shape[1:2] > (0,) and shape[:1] + shape[2:] == targets.shape:
        return F.cross_entropy(output.float(), targets.long())
    raise ValueError(
        f"targets {tuple(targets.shape)} of {targets.dtype} do not fit the output "
        f"{shape}: give classes of the output without its last size, "
        "values of its shape, or a loss_fn"
    )


class FP8TrainingEngine:
    """Trains a model whose linear layers have fp8 products.

    The model is converted in place by `convert_model_to_fp8`, its Parameters stay the same objects,
    and it stays converted. The context manager returns the engine and closes nothing. Modes
    (`train`, `eval`), autocast and the optimizer are the caller's.

    `optimizer_step` checks that gradients are finite, which synchronises with the device once;
    `training_step` never does.

    Args:
        model: an nn.Module with at least one nn.Linear.
        fp8_config: options. Default ``FP8Config()``; layers that are fp8 already keep theirs.

    Raises:
        TypeError, ValueError: as `convert_model_to_fp8`.

    Attributes:
        model: the converted model.
        batches, steps, overflows: calls of `training_step`, optimizer steps, and skipped steps.
        loss_scale: the present factor of losses; ``parameter.grad`` is scaled by it between the two
            calls of a step. It stays 1 unless parameters are fp16 when the engine is made, or one
            is given, by the config (`FP8Config`) or by setting it: after overflows it returns to
            the highest that was set.

    Example::

        import torch
        from flash_cute.precision import FP8Config, FP8TrainingEngine

        model = torch.nn.Linear(64, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs, targets = torch.randn(32, 64), torch.randint(10, (32,))
        with FP8TrainingEngine(model, FP8Config()) as trainer:
            loss = trainer.training_step(inputs, targets)
            taken = trainer.optimizer_step(optimizer)
        torch.save({"model": model.state_dict(), "trainer": trainer.state_dict()}, "state.pt")
    """

    def __init__(self, model: nn.Module, fp8_config: FP8Config | None = None) -> None:
        self.config = fp8_config
        self.model = model
        self.setup_fp8_training()
        self._scale = LossScale.of(self.model, fp8_config or FP8Config())
        self.batches = self.steps = self.overflows = 0
        self._last_loss: Tensor | None = None
        self._optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()  # those that stepped
        self._loaded: dict[str, Tensor] = {}  # histories, until the next training_step

    def __getstate__(self) -> dict[str, Any]:
        """All but weak references, which cannot be pickled."""
        return {name: x for name, x in vars(self).items() if name != "_optimizers"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _optimizers=WeakSet())

    def __enter__(self) -> FP8TrainingEngine:
        self.setup_fp8_training()
        return self

    def __exit__(self, *exception: object) -> None:
        """The model stays converted."""

    @property
    def loss_scale(self) -> float:
        return self._scale.value

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        check_positive("loss_scale", value, LARGEST_LOSS_SCALE)
        self._scale.give(value)

    def setup_fp8_training(self) -> None:
        """Converts the linear layers that are not yet fp8, such as those added since. The
        constructor and the context manager do so, too."""
        self.model = convert_model_to_fp8(self.model, self.config)

    def training_step(
        self, inputs: Any, targets: Any, loss_fn: LossFunction | None = None
    ) -> Tensor:
        """Runs the model, its loss and the backward pass; gradients add up until `optimizer_step`.

        Args:
            inputs: the model's one argument, or a tuple of its arguments. Tensors are moved to the
                model's device, if all of its parameters are on one.
            targets: integers are classes for cross entropy, floats values for the mean squared
                error. They are moved to the output's device.
            loss_fn: ``loss_fn(output, targets)``, a scalar, instead of these two.

        Returns:
            The true loss, unscaled and detached, on the device where it was computed.

        Raises:
            TypeError: the loss is not a tensor, or ``loss_fn`` cannot be called.
            ValueError: targets fit no default loss, or the loss is not a scalar.
        """
        loss_fn = default_loss if loss_fn is None else loss_fn
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function, not {type(loss_fn).__name__}")
        self._load_histories()
        self._loaded = {}
        devices = {parameter.device for parameter in self.model.parameters()}
        device = devices.pop() if len(devices) == 1 else None
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        output = self.model(*(moved(argument, device) for argument in arguments))
        loss = loss_fn(output, moved(targets, getattr(output, "device", device)))
        if not isinstance(loss, Tensor):
            raise TypeError(f"the loss must be a tensor, not {type(loss).__name__}")
        if loss.numel() != 1:
            raise ValueError(f"the loss must be a scalar, not of shape {tuple(loss.shape)}")
        self._rescale(loss_fn, loss)
        (loss.float() * self.loss_scale).backward()
        self.batches += 1
        self._last_loss = loss.detach()
        return self._last_loss

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, max_norm: float | None = None
    ) -> bool:
        """Steps if all gradients that the optimizer would get are finite; clears them in any case.

        Needs room for a copy of the gradients if they are scaled or clipped.

        Args:
            optimizer: steps once, with unscaled gradients.
            max_norm: if given, gradients are clipped to this total norm before. Positive.

        Returns:
            True: a step was taken. False: a gradient was not finite; weights and the optimizer's
            state are as before, the overflow is counted, the loss scale halved, if it is above 1,
            and delayed scales begin anew.

        Raises:
            TypeError: it is not an optimizer, or ``max_norm`` not a number.
            ValueError: ``max_norm`` is not positive.
            RuntimeError: no parameter has a gradient: `training_step` comes first.
            Exception: what the optimizer raises; gradients are then as before, scaled.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            kind = type(optimizer).__name__
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {kind}")
        if max_norm is not None:
            check_positive("max_norm", max_norm)
        self._optimizers.add(optimizer)
        parameters = [p for p in parameters_of(optimizer) if p.grad is not None]
        if not parameters:
            raise RuntimeError("the optimizer's parameters have no gradients: training_step first")
        scaled: list[Any] = [p.grad for p in parameters]
        given = unscaled(scaled, self._scale.of_gradients, max_norm)
        if is_finite := all_finite(given):
            set_gradients(parameters, given)
            try:
                optimizer.step()
            finally:
                set_gradients(parameters, scaled)
            self.steps += 1
        else:
            self.overflows += 1
            for scales in scales_of(self.model):
                scales.reset_parameters()
        optimizer.zero_grad()
        self._scale.count(is_finite)
        return is_finite

    def _rescale(self, loss_fn: LossFunction, loss: Tensor | None = None) -> None:
        """Rescales existing gradients, and their delayed scales' histories, to the present loss
        scale: another optimizer may step later. They are gradients of the model, of all optimizers
        that stepped, and of the leaves of this loss."""
        factor = self._scale.begin_batch()
        if factor == 1:
            return
        modules = [x for x in (self.model, loss_fn) if isinstance(x, nn.Module)]
        parameters: set[Tensor] = {p for module in modules for p in module.parameters()}
        parameters.update(p for optimizer in self._optimizers for p in parameters_of(optimizer))
        parameters.update(() if loss is None else leaves_of(loss))
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        for scales in (scales for module in modules for scales in scales_of(module)):
            if scales.gradient_history is not None:
                scales.gradient_history.mul_(factor).clamp_(max=torch.finfo(torch.float32).max)

    def get_training_statistics(self) -> dict[str, Any]:
        """Statistics of the training so far; synchronises with the device for the loss.

        Returns:
            ``steps``: steps taken. ``overflows``: steps left out. ``batches``:
            calls of `training_step`. ``loss``: the last one, a float, or None. ``loss_scale``: now.
            ``fp8_layers``: how many `FP8LinearLayer` the model has.
        """
        layers = (module for module in self.model.modules() if isinstance(module, FP8LinearLayer))
        return {
            "steps": self.steps,
            "overflows": self.overflows,
            "batches": self.batches,
            "loss": None if self._last_loss is None else self._last_loss.item(),
            "loss_scale": self.loss_scale,
            "fp8_layers": len(list(layers)),
        }

    def state_dict(self) -> dict[str, Any]:
        """What a training run needs to resume bit by bit, in addition to the states of the model
        and the optimizer: numbers, and copies of histories. Synchronises with the device.

        Gradients are not included: save after `optimizer_step`.
        """
        self._load_histories()
        histories = histories_of(self.model)
        return {
            "loss_scale": self.loss_scale,
            "scale_of_gradients": self._scale.of_gradients,
            "highest_loss_scale": self._scale.highest,
            "good_batches": self._scale.good_batches,
            "batches": self.batches,
            "steps": self.steps,
            "overflows": self.overflows,
            "loss": None if self._last_loss is None else self._last_loss.item(),
            "histories": {name: history.clone() for name, history in histories.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a `state_dict`; the model may be loaded before or after.

        Raises:
            TypeError, ValueError: the state is not of a trainer of such a model; nothing is loaded.
        """
        check_state(state, histories_of(self.model))
        loss = state["loss"]
        loss = None if loss is None else torch.tensor(loss, dtype=torch.float64)
        self._loaded = {name: x.detach().clone() for name, x in state["histories"].items()}
        self._last_loss = loss
        self._scale.value = float(state["scale_of_gradients"])
        self._rescale(default_loss)
        self._scale.value = float(state["loss_scale"])
        self._scale.good_batches = state["good_batches"]
        self._scale.highest = max(self._scale.value, state.get("highest_loss_scale", 0.0))
        self.batches, self.steps = state["batches"], state["steps"]
        self.overflows = state["overflows"]
        self._load_histories()

    def _load_histories(self) -> None:
        """Restores loaded histories, if any: loading the model has cleared its histories."""
        present = histories_of(self.model) if self._loaded else {}
        for name in present.keys() & self._loaded.keys():
            present[name].copy_(self._loaded[name])


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters of an optimizer, each once."""
    return list(dict.fromkeys(p for group in optimizer.param_groups for p in group["params"]))


def set_gradients(parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if parameter.grad is not gradient:
            parameter.grad = gradient


def moved(argument: Any, device: torch.device | None) -> Any:
    """A tensor moved to the device, if there is one; anything else unchanged."""
    if device is None or not isinstance(argument, Tensor):
        return argument
    return argument.to(device, non_blocking=True)


def create_fp8_trainer(
    model: nn.Module,
    forward_format: FP8Format = FP8Format.E4M3,
    backward_format: FP8Format = FP8Format.E5M2,
    device: torch.device | str | None = None,
) -> FP8TrainingEngine:
    """An `FP8TrainingEngine` for the model, which is converted in place.

    Args:
        model: an nn.Module with at least one nn.Linear.
        forward_format: format of inputs and weights. Default E4M3.
        backward_format: format of the gradients of outputs. Default E5M2.
        device: where to move the model, in place. Default: it stays where its parameters are.

    Raises:
        TypeError: a format is not an FP8Format, or the model not an nn.Module.
        ValueError: the model has no nn.Linear, or the device is not available; nothing is
            converted then.

    Example::

        import torch
        from flash_cute.precision import create_fp8_trainer

        trainer = create_fp8_trainer(torch.nn.Linear(8, 4))
        loss = trainer.training_step(torch.ones(2, 8), torch.zeros(2, 4))
    """
    config = FP8Config(forward_format=forward_format, backward_format=backward_format)
    if device is not None:
        checked_device(device)
    trainer = FP8TrainingEngine(model, config)
    if device is not None:
        trainer.model.to(device)
    return trainer
