"""Names that ``--gpu`` takes: those of ``flash_cute.kernels.GPUS``, further cards, and archs."""

from __future__ import annotations

from typing import Any

KNOWN = ("a100", "a10", "l40s", "h100", "h200")  # of flash_cute.kernels.GPUS

# As fields of flash_cute.kernels.Gpu: capability, shared memory of a CTA, SMs, GB/s, bytes of L2.
CARDS = {
    "rtx3090": (86, 101_376, 82, 936, 6 << 20),
    "a6000": (86, 101_376, 84, 768, 6 << 20),
    "a40": (86, 101_376, 84, 696, 6 << 20),
    "rtx4090": (89, 101_376, 128, 1008, 72 << 20),
    "l4": (89, 101_376, 58, 300, 48 << 20),
    "b200": (100, 232_448, 148, 8000, 126 << 20),
    "rtx5090": (120, 101_376, 170, 1792, 96 << 20),
}
ARCHS = {
    "sm_80": "a100",
    "sm_86": "a10",
    "sm_89": "l40s",
    "sm_90": "h100",
    "sm_100": "b200",
    "sm_120": "rtx5090",
}
NAMES = (*KNOWN, *CARDS, *ARCHS)


def card(name: str) -> Any:
    """The :class:`flash_cute.kernels.Gpu` of one of NAMES; for an arch, that of a card with it."""
    from flash_cute.kernels import GPUS, Gpu

    name = ARCHS.get(name, name)
    return GPUS[name] if name in GPUS else Gpu(name, *CARDS[name])
