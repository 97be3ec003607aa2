"""All checks of one problem: forward, its optional results, backward, repeats."""

from __future__ import annotations

from torch import Tensor

from flash_cute.native import library
from flash_cute.testing import bounds
from flash_cute.testing.cases import Inputs
from flash_cute.testing.kernels import forward_families


def verify(inputs: Inputs, with_dlse: bool = False, deterministic: bool = False) -> float:
    """Assert that the op under test is right on `inputs`, forward and, without pages, backward.

    `with_dlse` adds a gradient of softmax_lse. Repeatable results are computed twice.

    Returns:
        The largest error, as a fraction of its bound.

    Raises:
        AssertionError: from `flash_cute.testing.bounds`.
    """
    out, lse, ratio = _verify_forward(inputs)
    ratios = [ratio]
    if inputs.lengths.get("block_table") is None:
        dlse = inputs.dlse if with_dlse else None
        grads, repeated = (
            inputs.backward(out, lse, dlse, deterministic=deterministic) for _ in range(2)
        )
        ratios.append(bounds.check_gradients(grads, inputs, out, with_dlse))
        for name in grads if deterministic else ("k", "v"):
            bounds.check_same_bits(f"d{name}", repeated[name], grads[name])
    return max(ratios)


def verify_forward(inputs: Inputs) -> float:
    """What `verify` asserts of forward; returns and raises the same."""
    return _verify_forward(inputs)[2]


def _verify_forward(inputs: Inputs) -> tuple[Tensor, Tensor, float]:
    """out, softmax_lse and the largest error."""
    out, lse, row_max, softmax = inputs.forward(
        return_row_max=True, return_softmax=not inputs.lists
    )
    oracle = bounds.forward_oracle(inputs)
    ratios = [
        bounds.check_forward(out, lse, oracle),
        bounds.check_lse("row_max", row_max, oracle.row_max, oracle.logit_size),
    ]
    if not inputs.lists:
        ratios.append(bounds.check_softmax(softmax, oracle))
    for name, x, again in zip(("out", "softmax_lse"), (out, lse), inputs.forward(), strict=False):
        bounds.check_same_bits(name, again, x)
    return out, lse, max(ratios)


def verify_families(inputs: Inputs, with_dlse: bool = False, deterministic: bool = False) -> float:
    """`verify`, also with every older family of kernels, which a newer GPU would not use.

    Sparse problems: forward, also with the oldest family, which does all of them in 16 bits.
    """
    ratio = verify(inputs, with_dlse, deterministic)
    families = forward_families(inputs.q.device) if inputs.q.is_cuda else []
    if families and inputs.lists:
        if inputs.q.element_size() == 2:
            with library.only(families[0]):
                ratio = max(ratio, verify_forward(inputs))
        return ratio
    for family in families[:-1]:
        with library.only(family, "decode_", "bwd_"):
            ratio = max(ratio, verify(inputs, with_dlse, deterministic))
    return ratio
