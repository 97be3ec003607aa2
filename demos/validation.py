"""ComponentValidator on a right attention layer and on broken ones, and the latency of one.

python demos/validation.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flash_cute.utils.compiler_optimization_assistant import benchmark_attention_performance
from flash_cute.utils.validation_framework import ComponentValidator

WIDTH, HEADS = 64, 4


class Broken(nn.Module):
    """nn.MultiheadAttention with something wrong behind it."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        out = self.attention(x, x, x, need_weights=False)[0]
        if self.fault == "entries of a batch mix":
            return out + out.mean(0)
        if self.fault == "no gradient":
            return out.detach()
        return 2 * out  # twice too large


def main() -> int:
    right = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    layers: dict[str, nn.Module] = {"nn.MultiheadAttention": right}
    for fault in ("entries of a batch mix", "no gradient", "twice too large"):
        layers[fault] = Broken(fault)
    validator = ComponentValidator(device=torch.device("cpu"))
    print(f"{'layer':<26}{'passed':<10}failed checks")
    outcomes = []
    for name, layer in layers.items():
        results = validator.validate_attention_component(layer, WIDTH, HEADS)
        failed = [n for n, check in results["checks"].items() if check["passed"] is False]
        outcomes.append(results["passed"])
        print(f"{name:<26}{results['passed']!s:<10}{', '.join(failed)}")
    latency = benchmark_attention_performance(right, (2, 128, WIDTH), num_trials=20)
    print(f"nn.MultiheadAttention, 2 x 128 tokens: {latency['avg_latency']:.2f} ms")
    return 0 if outcomes == [True, False, False, False] else 1


if __name__ == "__main__":
    raise SystemExit(main())
