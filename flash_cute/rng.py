""":mod:`flash_cute.call.rng`, the random state of dropout, by a short path."""

from flash_cute.call.rng import rng_state

__all__ = ["rng_state"]
