"""Checks what a block's forward computes by running copies with random weights.

Outputs and gradients must equal those of its fused form, and its operators those of a Llama block
(``operators.py``).
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flash_cute.attention.fusion import operators

Call = dict[str, Any]
_TOLERANCE = 3e-4  # tolerance in fp32, relative to the largest number of a row
_SIZES = (2, 130)  # batch and tokens of the trial on numbers
_SMALL = ((1, 1), (1, 7), (3, 5))
_DROPOUT = "attention_dropout"
_COMPUTES_ELSE = "it computes something else than a Llama block of these parts"


def difference(block: nn.Module, fuse: Callable[[nn.Module], nn.Module]) -> str | None:
    """Why a block with Llama's submodules must not be replaced by its fused form; None if it may.

    Neither the block nor any random generator changes.
    """
    weight = next(block.parameters())
    exact = torch.promote_types(weight.dtype, torch.float32)
    with _undisturbed(weight.device) as drew:
        generator = torch.Generator().manual_seed(0)
        one = with_random_weights(block, exact, generator)
        before = _numbers_of(one)
        try:
            reason = _number_difference(one, fuse, generator) or operators.difference(block)
        except Exception as error:  # whatever another kind of block raises
            if is_out_of_memory(error):
                raise
            return f"a call as of a Llama block fails: {type(error).__name__}: {error}"
        if reason is None and drew():
            reason = "its forward draws random numbers"
        changed = sorted(name for name, x in _numbers_of(one).items() if before.get(name, one) != x)
        return reason or (f"its forward changes {changed}" if changed else None)


def agrees(block: nn.Module, fuse: Callable[[nn.Module], nn.Module]) -> bool:
    """Whether a block and a fused form compute the same for a few tokens."""
    generator = torch.Generator().manual_seed(0)
    weight = next(block.parameters())
    exact = torch.promote_types(weight.dtype, torch.float32)
    with _undisturbed(weight.device):
        try:
            one = with_random_weights(block, exact, generator).eval()
            calls = _calls(one, *_SMALL[-1], generator)
            return all(_same(one, fuse(one), call, gradients=False) for call in calls)
        except Exception as error:  # the fused form calls submodules in another way than the block
            if is_out_of_memory(error):
                raise
            return False


def is_out_of_memory(error: Exception) -> bool:
    """Whether a trial failed for lack of memory, which says nothing about the block."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


def with_random_weights(module: nn.Module, dtype: torch.dtype, generator: torch.Generator) -> Any:
    """A copy with random weights: products keep the scale of numbers, norms' weights are near 1."""

    def draw(p: Tensor) -> Tensor:
        noise = torch.randn(p.shape, generator=generator, device="cpu")
        values = noise * p.shape[1] ** -0.5 if p.dim() == 2 else 1 + 0.2 * noise
        return values.to(p.device, dtype)

    return operators.with_weights(module, draw)


# --- numbers -------------------------------------------------------------------------------------


def _number_difference(
    block: Any, fuse: Callable[[nn.Module], nn.Module], generator: torch.Generator
) -> str | None:
    if hasattr(block.self_attn, "attention_dropout"):
        block.self_attn.attention_dropout = 0.0  # dropout was checked by its operators
    fused = fuse(block)
    for training in (True, False):
        block.train(training)
        fused.train(training)
        for call in _calls(block, *_SIZES, generator):
            if not _same(block, fused, call, gradients=True):
                return _COMPUTES_ELSE
    for sizes in _SMALL:
        for call in _calls(block, *sizes, generator):
            if not _same(block, fused, call, gradients=False):
                return _COMPUTES_ELSE
    return None


def _calls(block: Any, batch: int, seqlen: int, generator: torch.Generator) -> Iterator[Call]:
    """Calls as models make them: with a mask, without one, with positions that restart, and without
    positions if the block allows it."""
    weight, dim = block.self_attn.q_proj.weight, block.self_attn.head_dim

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(weight.device, weight.dtype)

    x = draw(batch, seqlen, weight.shape[1]) * 10 ** draw(batch, seqlen, 1)
    position = {"position_embeddings": tuple(draw(1, seqlen, dim) for _ in "cs")}
    seen = draw(batch, 1, seqlen, seqlen) > -0.5
    seen |= torch.eye(seqlen, dtype=torch.bool, device=x.device)
    mask = {"attention_mask": torch.zeros_like(seen, dtype=x.dtype).masked_fill(~seen, -torch.inf)}
    yield {"hidden_states": x, **mask, **position}
    yield {"hidden_states": x, "attention_mask": None, **position}
    if accepts(block, "position_ids"):
        ids = torch.arange(seqlen, device=x.device).remainder(seqlen // 2 + 1).expand(batch, -1)
        yield {"hidden_states": x, "attention_mask": None, "position_ids": ids, **position}
    without = {"hidden_states": x, **mask, "position_embeddings": None}
    try:
        with torch.no_grad():
            block(**without)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return
    yield without


def accepts(block: Any, name: str) -> bool:
    """Whether a block's forward has an argument of this name, or ``**kwargs``."""
    parameters = inspect.signature(block.forward).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _same(block: Any, fused: Any, call: Call, gradients: bool) -> bool:
    results = []
    x = call["hidden_states"]
    upstream = x.roll(1, 0).tanh()
    for one in (block, fused):
        leaf = x.clone().requires_grad_(gradients)
        with torch.set_grad_enabled(gradients):
            out = one(**{**call, "hidden_states": leaf})
        if not isinstance(out, Tensor) or out.shape != x.shape:
            return False
        grads: tuple[Any, ...] = ()
        if gradients:
            grads = torch.autograd.grad(
                out, [leaf, *block.parameters()], upstream, materialize_grads=True
            )
        results.append((out.detach(), *grads))
    (wanted, *of_block), (got, *of_fused) = results
    near = bool(((wanted - got).abs().amax(-1) <= _TOLERANCE * (wanted - x).abs().amax(-1)).all())
    # The gradient of the keys' bias is 0 but for rounding: its bound is that of the largest one.
    largest = max((grad.abs().max() for grad in of_block[1:]), default=x.new_zeros(()))
    return near and all(
        _near(*both, 0.01 * largest) for both in zip(of_block, of_fused, strict=True)
    )


def _near(wanted: Tensor, got: Tensor, least: Tensor) -> bool:
    scale = wanted.abs().amax(-1, keepdim=True) if wanted.dim() == 3 else wanted.abs().max()
    return bool(((wanted - got).abs() <= 3 * _TOLERANCE * scale.clamp(min=least)).all())


# --- side effects --------------------------------------------------------------------------------


def _numbers_of(module: nn.Module) -> dict[str, Any]:
    """Attributes of a module and its children, without their mode, and lengths of collections."""
    found = {}
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if isinstance(value, (int, float, str)) and key not in ("training", _DROPOUT):
                found[f"{name}.{key}"] = value
            elif isinstance(value, (list, dict, set)):
                found[f"{name}.{key}"] = len(value)
    return found


@contextmanager
def fixed_settings() -> Iterator[None]:
    """Inside, the caller's modes, default dtype and precision of fp32 products do not apply; all
    are restored."""
    mkldnn: Any = torch.backends.mkldnn
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends], torch.get_default_dtype()
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        torch.set_default_dtype(torch.float32)
        with ExitStack() as stack:
            for device in ("cpu", "cuda"):
                stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            yield
    finally:
        torch.set_default_dtype(before[1])
        for backend, precision in zip(backends, before[0], strict=True):
            backend.fp32_precision = precision


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Restores the random generators of torch, Python and NumPy. Yields a function that says
    whether the last two were used."""
    numpy = sys.modules.get("numpy")
    before = random.getstate(), numpy and numpy.random.get_state()
    devices = [device] if device.type == "cuda" else []

    def drew() -> bool:
        return repr((random.getstate(), numpy and numpy.random.get_state())) != repr(before)

    try:
        with torch.random.fork_rng(devices=devices):
            yield drew
    finally:
        random.setstate(before[0])
        if numpy:
            numpy.random.set_state(before[1])
