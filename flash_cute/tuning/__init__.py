"""Measures which kernel is the fastest for calls of some sizes, and writes a calibration file.

docs/tuning.md explains it. Nothing here runs by itself.
"""

from flash_cute.kernels.calibration import Loaded, Miss, load, use_calibration
from flash_cute.kernels.choice import Choice
from flash_cute.tuning.autotune import autotune
from flash_cute.tuning.clock import Clock, CudaClock
from flash_cute.tuning.report import Gain, Report

__all__ = [
    "Choice",
    "Clock",
    "CudaClock",
    "Gain",
    "Loaded",
    "Miss",
    "Report",
    "autotune",
    "load",
    "use_calibration",
]
