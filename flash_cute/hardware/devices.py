"""The devices that torch sees, and the memory that they have left."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Dict, List  # noqa: UP035  (names of the documented signature)

import torch

_CGROUP_FILES = (  # limit and use, in version 2 and in version 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
_OWN_GROUPS = Path("/proc/self/cgroup")


def detect_available_devices() -> Dict[str, List[torch.device]]:  # noqa: UP006
    """All devices that torch can use in this process, by type.

    Returns:
        A dict that always has the keys ``cuda`` and ``cpu``: ``cuda`` is empty without a GPU, and
        holds AMD's GPUs if torch is built for ROCm (``torch.version.hip``). Another accelerator
        that torch sees (``mps``, ``xpu``, ...) has a key of its own. It is listed, but flash_cute's
        attention runs only on CUDA and the CPU.

    Example::

        from flash_cute.hardware import detect_available_devices

        devices = detect_available_devices()
        print(devices)  # with a GPU {'cuda': [device(type='cuda', index=0)], 'cpu': [..]}
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = {
        "cuda": [torch.device("cuda", index) for index in range(count)],
        "cpu": [torch.device("cpu")],
    }
    other = torch.accelerator.current_accelerator(check_available=True)
    if other is not None and other.type not in devices:
        count = torch.accelerator.device_count()
        devices[other.type] = [torch.device(other.type, index) for index in range(count)]
    return devices


def checked(devices: Sequence[torch.device | str]) -> list[torch.device]:
    """The same devices with their indices.

    Raises:
        TypeError: ``devices`` is not a list of devices.
        ValueError: a device is not available; the message lists those that are.
    """
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Sequence):
        raise TypeError(f"target_devices is {devices!r}; expected a list of torch.device")
    there = [device for group in detect_available_devices().values() for device in group]
    return [_checked(device, f"target_devices[{i}]", there) for i, device in enumerate(devices)]


def checked_device(device: torch.device | str) -> torch.device:
    """:func:`checked` for one device."""
    there = [device for group in detect_available_devices().values() for device in group]
    return _checked(device, "device", there)


def named_device(name: str, given: torch.device | str | int) -> torch.device:
    """``torch.device(given)``, available or not.

    Raises:
        ValueError: torch knows no such name; the message begins with the argument's.
    """
    try:
        return torch.device(given)
    except RuntimeError:
        raise ValueError(f"{name} is {given!r}; expected the name of a device") from None


def _checked(given: torch.device | str, name: str, there: list[torch.device]) -> torch.device:
    if not isinstance(given, (str, torch.device)):
        raise TypeError(f"{name} is {given!r}; expected a torch.device")
    device = named_device(name, given)
    if device.type != "cpu" and device.index is None:
        device = torch.device(device.type, 0)
    if device.type == "cpu":
        device = torch.device("cpu")
    if device not in there:
        raise ValueError(f"{name} is {given}; available here: {', '.join(map(str, there))}")
    return device


def available_memory(device: torch.device | str) -> int:
    """Bytes that this process can still allocate on ``device``.

    On CUDA: free memory, and memory that torch's allocator has cached. On the CPU: memory that the
    system has without swapping, at most what the limits of the process's control groups leave.

    Raises:
        TypeError, ValueError: it is not a device, or not available.
        NotImplementedError: torch cannot report the memory of the device.

    Example::

        from flash_cute.hardware import available_memory

        print(f"{available_memory('cpu') / 1e9:.1f} GB")
    """
    device = checked_device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "cpu":
        return min([_system_memory(), *_memory_of_control_group()])
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        raise NotImplementedError(f"torch cannot report the free memory of {device}")
    return int(module.mem_get_info(device)[0])


def _system_memory() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _memory_of_control_group() -> list[int]:
    """The bytes that each limit leaves. Inactive file pages, which the kernel would free, do not
    count as used."""
    left = []
    for limit, used in (*_CGROUP_FILES, *_own_groups()):
        try:
            taken = int(Path(used).read_text()) - _inactive_files(Path(used).parent)
            left.append(int(Path(limit).read_text()) - taken)
        except (OSError, ValueError):  # no such file, or no limit ("max")
            continue
    return [max(0, x) for x in left]


def _own_groups() -> list[tuple[str, str]]:
    """(limit, use) files of this process's groups and of their parents: any may have a limit."""
    found = []
    lines = _OWN_GROUPS.read_text().splitlines() if _OWN_GROUPS.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        for limit, used in _CGROUP_FILES[1:] if controllers else _CGROUP_FILES[:1]:
            for group in (Path(path), *Path(path).parents)[:-1]:
                folder = Path(limit).parent / group.relative_to("/")
                found.append((str(folder / Path(limit).name), str(folder / Path(used).name)))
    return found


def _inactive_files(group: Path) -> int:
    stat = group / "memory.stat"
    lines = stat.read_text().splitlines() if stat.exists() else []
    sizes = dict(line.split() for line in lines)
    return int(sizes.get("total_inactive_file", sizes.get("inactive_file", 0)))
