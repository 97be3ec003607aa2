"""Devices and their free memory, and the memory, layouts and batch sizes of models."""

from flash_cute.hardware.devices import available_memory, detect_available_devices
from flash_cute.hardware.layer import HardwareAbstractionLayer

__all__ = ["HardwareAbstractionLayer", "available_memory", "detect_available_devices"]
