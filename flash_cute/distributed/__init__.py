"""Attention over several GPUs: ranks of torch.distributed that share the tokens of a batch.

Ring attention, Ulysses, all-gather of keys and values, and two of them at once, behind one call:
:func:`cp_attention`. Exact, forward and backward. docs/distributed.md says which strategy when.
"""

from flash_cute.distributed import flops as flops
from flash_cute.distributed.attention import cp_attention
from flash_cute.distributed.context import ContextParallel
from flash_cute.distributed.costs import Links
from flash_cute.distributed.decode import cp_decode
from flash_cute.distributed.measure import measure_links
from flash_cute.distributed.plan import Plan

__all__ = ["ContextParallel", "Links", "Plan", "cp_attention", "cp_decode", "measure_links"]
