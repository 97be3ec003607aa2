"""flash_cute.hardware: facts about devices, and models whose layout fits them."""

from __future__ import annotations

import copy

import pytest
import torch
from hardware_models import CPU, Attention, Make, Restless, encoder, images, mlp
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from flash_cute.hardware import (
    HardwareAbstractionLayer,
    available_memory,
    detect_available_devices,
)
from flash_cute.hardware import devices as hardware_devices


def test_devices_are_those_of_torch():
    found = detect_available_devices()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    assert found["cuda"] == [torch.device("cuda", i) for i in range(count)]
    assert found["cpu"] == [CPU]
    for group in found.values():
        for device in group:
            assert torch.ones(2, device=device).sum().item() == 2


def test_devices_that_torch_gains_are_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    found = detect_available_devices()
    assert found["cuda"] == [torch.device("cuda", i) for i in range(3)]
    hal = HardwareAbstractionLayer(found["cuda"][1:])
    assert hal.device == torch.device("cuda", 1)
    assert HardwareAbstractionLayer().device == torch.device("cuda", 0)


def test_another_accelerator_has_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch):
    accelerator = torch.accelerator
    monkeypatch.setattr(accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    monkeypatch.setattr(accelerator, "device_count", lambda: 2)
    assert detect_available_devices()["xpu"] == [torch.device("xpu", 0), torch.device("xpu", 1)]


def test_target_devices():
    assert HardwareAbstractionLayer([]).target_devices == [CPU]
    assert HardwareAbstractionLayer([torch.device("cpu", 0)]).device == CPU
    expected = (detect_available_devices()["cuda"] or [CPU])[0]
    assert HardwareAbstractionLayer().device == expected
    with pytest.raises(ValueError, match=r"target_devices\[1\] is cuda:99; available here: .*cpu"):
        HardwareAbstractionLayer([CPU, torch.device("cuda", 99)])
    for name in ("meta", "xyz"):
        with pytest.raises(ValueError, match=name):
            HardwareAbstractionLayer([name])
    with pytest.raises(TypeError, match="expected a list"):
        HardwareAbstractionLayer(CPU)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"target_devices\[0\] is 7"):
        HardwareAbstractionLayer([7])  # type: ignore[list-item]


def test_available_memory_of_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path):
    assert 2**26 < available_memory(CPU) < 2**50
    limit, used = tmp_path / "max", tmp_path / "current"
    limit.write_text(f"{2**20}\n")
    used.write_text("1024\n")
    monkeypatch.setattr(hardware_devices, "_CGROUP_FILES", ((str(limit), str(used)),))
    assert available_memory(CPU) == 2**20 - 1024
    limit.write_text("max\n")
    assert available_memory(CPU) > 2**26


def test_limits_of_nested_control_groups_count(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Of version 2 and of version 1, of any group above; pages of files can be had."""
    roots = [tmp_path / "two", tmp_path / "one"]
    names = [("memory.max", "memory.current"), ("limit_in_bytes", "usage_in_bytes")]
    files = [tuple(str(root / n) for n in pair) for root, pair in zip(roots, names, strict=True)]
    monkeypatch.setattr(hardware_devices, "_CGROUP_FILES", tuple(files))
    own = tmp_path / "cgroup"
    monkeypatch.setattr(hardware_devices, "_OWN_GROUPS", own)
    for root, (limit, used), line in zip(
        roots, names, ("0::/slice/task", "4:cpu,memory:/slice/task"), strict=True
    ):
        own.write_text(f"9:freezer:/other\n{line}\n")
        deep = root / "slice" / "task"
        deep.mkdir(parents=True)
        (deep / limit).write_text("max")
        (deep / used).write_text("2048")
        (deep.parent / limit).write_text(str(2**20))
        (deep.parent / used).write_text("4096")
        assert available_memory(CPU) == 2**20 - 4096
        (deep.parent / "memory.stat").write_text("anon 7\ninactive_file 1024\n")
        assert available_memory("cpu") == 2**20 - 3072
        (deep / limit).write_text("5000")
        assert available_memory(CPU) == 5000 - 2048


def test_available_memory_of_no_device():
    with pytest.raises(TypeError, match="device is 3; expected"):
        available_memory(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="available here"):
        available_memory("cuda:99")


def test_available_memory_of_cuda(cuda):
    device = torch.device(cuda, 0)
    before = available_memory(device)
    x = torch.empty(2**28, dtype=torch.uint8, device=device)
    taken = before - available_memory(device)
    assert abs(taken - x.numel()) < 2**25
    del x
    assert abs(available_memory(device) - before) < 2**25  # what is cached can be had


# --- optimize_for_hardware -----------------------------------------------------------------------


@pytest.mark.parametrize("make", [mlp, encoder, Attention, images])
def test_optimize_keeps_the_function(make: Make, device: str):
    shape = {mlp: (9, 256), images: (2, 3, 12, 10)}.get(make, (2, 9, 64))
    model = make().eval()
    plain, x = copy.deepcopy(model).to(device), torch.randn(*shape, device=device)
    parameters, keys = list(model.parameters()), list(model.state_dict())
    hal = HardwareAbstractionLayer([torch.device(device)])
    optimized = hal.optimize_for_hardware(model)
    assert optimized is model
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert {p.device.type for p in model.parameters()} == {device}
    assert list(model.state_dict()) == keys and not model.training
    plain.load_state_dict(model.state_dict())
    expected = plain(x)
    torch.testing.assert_close(optimized(x), expected, rtol=1e-5, atol=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = optimized.train()(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad is not None for p in model.parameters())
    assert losses[-1] < losses[0]


def test_optimize_says_and_does_what_it_says():
    hal = HardwareAbstractionLayer([CPU])
    model = hal.optimize_for_hardware(images())
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not model[0].weight.is_contiguous()
    assert model(torch.randn(2, 3, 9, 9)).is_contiguous(memory_format=torch.channels_last)
    assert hal.report == ["0: weight is channels-last", "2: weight is channels-last"]
    named = nn.Conv2d(3, 8, 3)
    named.other, weight = named.weight, named.weight
    del named.weight
    named.weight = weight  # the second name that its parameter has
    assert hal.optimize_for_hardware(named).weight.is_contiguous(memory_format=torch.channels_last)
    volume = hal.optimize_for_hardware(nn.Conv3d(2, 3, 2))
    assert volume.weight.is_contiguous(memory_format=torch.channels_last_3d)
    for nothing_to_do in (mlp(), volume, weight_norm(nn.Conv2d(2, 3, 3))):
        hal.optimize_for_hardware(nothing_to_do)
        assert hal.report == []


def test_optimize_moves_to_cuda(cuda):
    hal = HardwareAbstractionLayer([torch.device(cuda)])
    model = hal.optimize_for_hardware(Restless())
    assert {x.device for x in model.state_dict().values()} == {torch.device(cuda, 0)}
    assert hal.report == ["moved to cuda:0"]


def test_optimize_refuses_what_has_no_values():
    hal = HardwareAbstractionLayer([])
    with pytest.raises(ValueError, match="weight has no values"):
        hal.optimize_for_hardware(nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match="has no values"):
        hal.optimize_for_hardware(nn.LazyLinear(2))
    with pytest.raises(TypeError, match="expected an nn"):
        hal.optimize_for_hardware(torch.ones(2))  # type: ignore[arg-type]


def test_the_documented_example_runs():
    model = mlp()
    hal = HardwareAbstractionLayer()
    optimized_model = hal.optimize_for_hardware(model)
    batch_size = hal.get_optimal_batch_size(optimized_model)
    assert batch_size > 0
    devices = detect_available_devices()
    HardwareAbstractionLayer(devices["cuda"])
