""":mod:`flash_cute.tiled.sizes`, sizes of tiles and of memory, by a second path."""

from flash_cute.tiled.sizes import estimate_memory_usage, get_optimal_block_sizes

__all__ = ["estimate_memory_usage", "get_optimal_block_sizes"]
