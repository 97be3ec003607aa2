"""Trains a model with fp8 products: the loss, its scale, and steps that overflow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_cute.precision.formats import FP8Config, FP8Format
from flash_cute.precision.fp8_convert import convert_model_to_fp8
from flash_cute.precision.fp8_linear import FP8LinearLayer

LossFunction = Callable[[Any, Any], Tensor]
FP16_LOSS_SCALE = 65536.0


def default_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy for integer targets, mean squared error for floating ones; in fp32.

    Args:
        output: logits (..., classes), or as cross_entropy takes them (n, classes, ...); for mean
            squared error any shape.
        targets: classes (...) or (n, ...), of an integer dtype; or values of the output's shape.

    Raises:
        TypeError: targets are bool.
        ValueError: the shapes fit neither.
    """
    if targets.dtype == torch.bool:
        raise TypeError(
            "targets are bool: give .long() for cross entropy, .float() for mean squared "
            "error, or a loss_fn"
        )
    if targets.is_floating_point():
        if output.shape == targets.shape:
            return F.mse_loss(output.float(), targets.float())
    elif output.shape[:-1] == targets.shape:
        return F.cross_entropy(output.float().flatten(0, -2), targets.long().flatten())
    elif output.dim() > 2 and output.shape[:1] + output.shape[2:] == targets.shape:
        return F.cross_entropy(output.float(), targets.long())
    raise ValueError(
        f"targets {tuple(targets.shape)} of {targets.dtype} do not fit the output "
        f"{tuple(output.shape)}: give classes of the output without its last size, "
        "values of its shape, or a loss_fn"
    )


class FP8TrainingEngine:
    """Trains a model whose linear layers have fp8 products.

    The model is converted in place as `convert_model_to_fp8` does, its Parameters stay the same
    objects, and it stays converted. The context manager returns the engine and keeps nothing open.
    Modes (`train`, `eval`), autocast and the optimizer are the caller's.

    Gradients that are not finite are looked for in `optimizer_step`, which waits for the device
    once. `training_step` never does.

    Args:
        model: an nn.Module with at least one nn.Linear.
        fp8_config: options. Default ``FP8Config()``.

    Raises:
        TypeError, ValueError: as `convert_model_to_fp8`.

    Attributes:
        model: the converted model.
        loss_scale: what losses are multiplied by now; ``parameter.grad`` is scaled by it between
            the two calls of a step. It is 1 unless parameters are fp16 or the config gives one.

    Example::

        with FP8TrainingEngine(model, FP8Config()) as trainer:
            loss = trainer.training_step(inputs, targets)
            taken = trainer.optimizer_step(optimizer)
    """

    def __init__(self, model: nn.Module, fp8_config: FP8Config | None = None) -> None:
        self.config = fp8_config
        self.model = model
        self.setup_fp8_training()
        is_fp16 = any(p.dtype is torch.float16 for p in model.parameters())
        given = self.config.loss_scale if self.config else None
        self.largest_scale = given or (FP16_LOSS_SCALE if is_fp16 else 1.0)
        self.loss_scale = self._scale_of_gradients = self.largest_scale
        self.batches = self.steps = self.overflows = 0
        self._steps_since_overflow = 0
        self._last_loss: Tensor | None = None

    def __enter__(self) -> FP8TrainingEngine:
        self.setup_fp8_training()
        return self

    def __exit__(self, *exception: object) -> None:
        """The model stays converted."""

    def setup_fp8_training(self) -> None:
        """Converts the linear layers that are not yet in fp8, such as those added since. The
        constructor and the context do so too."""
        self.model = convert_model_to_fp8(self.model, self.config)

    def training_step(
        self, inputs: Any, targets: Any, loss_fn: LossFunction | None = None
    ) -> Tensor:
        """Runs the model, its loss and the backward pass; gradients add up until `optimizer_step`.

        Args:
            inputs: the model's one argument, or a tuple of its arguments. Tensors are moved to the
                model's device.
            targets: what the loss compares the output with. Integers: classes for cross entropy.
                Floating point: values for the mean squared error. Moved likewise.
            loss_fn: ``loss_fn(output, targets)``, a scalar, in place of these two.

        Returns:
            The true loss, unscaled and detached, on the model's device.

        Raises:
            ValueError: targets fit no default loss, or the loss is no scalar.
        """
        device = next(self.model.parameters()).device
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        output = self.model(*(moved(argument, device) for argument in arguments))
        loss = (loss_fn or default_loss)(output, moved(targets, device))
        if loss.numel() != 1:
            raise ValueError(f"the loss must be a scalar, not of shape {tuple(loss.shape)}")
        self._rescale()
        (loss.float() * self.loss_scale).backward()
        self.batches += 1
        self._last_loss = loss.detach()
        return self._last_loss

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, max_norm: float | None = None
    ) -> bool:
        """Steps if all gradients of the optimizer's parameters are finite; clears them always.

        Args:
            optimizer: steps once, with unscaled gradients.
            max_norm: if given, gradients are clipped to this total norm before.

        Returns:
            True: a step was taken. False: a gradient was not finite; weights and the optimizer's
            state are as before, the overflow is counted and the loss scale halved.

        Raises:
            TypeError: it is no optimizer.
            RuntimeError: no parameter has a gradient: `training_step` comes first.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            kind = type(optimizer).__name__
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {kind}")
        parameters: list[Any] = [p for p in parameters_of(optimizer) if p.grad is not None]
        if not parameters:
            raise RuntimeError("the optimizer's parameters have no gradients: training_step first")
        gradients = [values(p.grad) for p in parameters]
        finite = bool(nn.utils.get_total_norm(gradients, norm_type=torch.inf).isfinite())
        if finite:
            if self._scale_of_gradients != 1:
                for parameter in parameters:
                    parameter.grad.div_(self._scale_of_gradients)
            if max_norm is not None:
                nn.utils.clip_grad_norm_(parameters, max_norm)
            optimizer.step()
        optimizer.zero_grad()
        self._count(finite)
        return finite

    def _rescale(self) -> None:
        """Gradients that are there already, of an optimizer that steps later than another one, get
        the loss scale of those to come."""
        if self._scale_of_gradients != self.loss_scale:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(self.loss_scale / self._scale_of_gradients)
            self._scale_of_gradients = self.loss_scale

    def _count(self, finite: bool) -> None:
        if not finite:
            self.overflows += 1
            self._steps_since_overflow = 0
            self.loss_scale /= 2
            return
        self.steps += 1
        self._steps_since_overflow += 1
        interval = (self.config or FP8Config()).growth_interval
        if self._steps_since_overflow % interval == 0:
            self.loss_scale = min(2 * self.loss_scale, self.largest_scale)

    def get_training_statistics(self) -> dict[str, Any]:
        """What happened so far; waits for the device, for the loss.

        Returns:
            ``steps``: steps taken. ``overflows``: steps left out. ``batches``: calls of
            `training_step`. ``loss``: the last one, a float, or None. ``loss_scale``: now.
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


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    """All that the optimizer may change."""
    for group in optimizer.param_groups:
        yield from group["params"]


def moved(argument: Any, device: torch.device) -> Any:
    """A tensor on that device; anything else as it is."""
    return argument.to(device, non_blocking=True) if isinstance(argument, Tensor) else argument


def values(gradient: Tensor) -> Tensor:
    """The gradient, of a sparse one its values."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


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
        ValueError: the model has no nn.Linear.

    >>> trainer = create_fp8_trainer(nn.Linear(8, 4))
    >>> trainer.training_step(torch.ones(2, 8), torch.zeros(2, 4)).shape
    torch.Size([])
    """
    config = FP8Config(forward_format=forward_format, backward_format=backward_format)
    if device is not None and isinstance(model, nn.Module):
        model = model.to(device)
    return FP8TrainingEngine(model, config)
