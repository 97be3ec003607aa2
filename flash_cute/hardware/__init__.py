"""What hardware there is, and what a model needs of it: devices, layouts, memory, batch sizes."""

from flash_cute.hardware.devices import available_memory, detect_available_devices
from flash_cute.hardware.layer import HardwareAbstractionLayer

__all__ = ["HardwareAbstractionLayer", "available_memory", "detect_available_devices"]
