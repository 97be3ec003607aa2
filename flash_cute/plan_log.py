"""``FLASH_CUTE_LOG=plan``: every attention call says what it is and which kernel it runs.

Lines go to the logger ``flash_cute`` of Python's ``logging``, at level INFO; without any handler
they go to standard error. The variable is read when flash_cute is imported; :func:`switched` does
the same inside of a block. A line costs about a millisecond, as the plan is computed again for it.
Calls that torch.compile traces are not logged.

Example::

    import flash_cute
    import torch

    q, k, v = torch.randn(3, 2, 100, 8, 64).unbind()
    with flash_cute.plan_log.switched():
        flash_cute.flash_attn_func(q, k, v, causal=True)
    # A line of an H100:
    # fwd bfloat16 b4 h16/16 q4096 k4096 d128/128 causal: fwd_sm90_bf16_plain_d128x128_m192_...
"""

from flash_cute.kernels.plan_log import is_on, switched

__all__ = ["is_on", "switched"]
