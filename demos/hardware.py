"""What hardware there is, what steps of a few models need on it, and which batch fits.

python demos/hardware.py [--device cpu]
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from flash_cute.hardware import (
    HardwareAbstractionLayer,
    available_memory,
    detect_available_devices,
)

MODELS: dict[str, nn.Module] = {
    "MLP, width 512": nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)),
    "encoder layer, width 256": nn.TransformerEncoderLayer(256, 8, batch_first=True),
    "6 encoder layers": nn.Sequential(
        *[nn.TransformerEncoderLayer(256, 8, batch_first=True) for _ in range(6)]
    ),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", help="default: the first GPU, else the CPU")
    device = parser.parse_args(argv).device
    for kind, devices in detect_available_devices().items():
        print(f"{kind}: {', '.join(map(str, devices)) or 'none'}")
    hal = HardwareAbstractionLayer([torch.device(device)] if device else None)
    print(f"{hal.device} has {available_memory(hal.device) / 2**30:.1f} GiB left")
    print(f"{'model':<26}{'training, 8':>14}{'inference, 8':>14}{'batch that fits':>17}")
    for name, model in MODELS.items():
        model = hal.optimize_for_hardware(model)
        training, inference = (
            hal.estimate_memory_usage(model, 8, training=training) / 2**20
            for training in (True, False)
        )
        batch = hal.get_optimal_batch_size(model)
        print(f"{name:<26}{training:>10.1f} MiB{inference:>10.1f} MiB{batch:>17}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
