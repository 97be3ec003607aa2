"""Runs the tests of ops, autograd and compile on other releases of torch.

``torch_versions.py RELEASE ... [--tests ARGUMENT ...]``: a RELEASE is such as ``2.10.0``, or
``newest``: the newest that pip would install here, or that is in the cache. Arguments after
``--tests`` go to pytest, instead of TESTS.

Each release has a virtual environment of its own, ``torch-RELEASE`` in the folder
``$FLASH_CUTE_TORCH_CACHE``, else in ``~/.cache/flash_cute``. It is made if it does not exist; one
with a torch for CUDA takes 4 to 6 GB. All of them load one library, ``$FLASH_CUTE_LIBRARY``, else
the one that the package finds.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("FLASH_CUTE_TORCH_CACHE") or "~/.cache/flash_cute").expanduser()
TESTS = [
    "tests/ops/test_ops.py",
    "tests/ops/test_op_errors.py",
    "tests/ops/test_unknown_arguments.py",
    "tests/ops/test_fp32_gradients.py",
    "tests/ops/test_meta.py",
    "tests/ops/test_autograd.py",
    "tests/ops/test_packed.py",
    "tests/ops/test_functional.py",
    "tests/ops/test_accept.py",
    "tests/ops/test_rng.py",
    "tests/ops/test_check.py",
    "tests/ops/test_check_warnings.py",
    "tests/ops/test_mha.py",
    "tests/ops/test_kvcache_errors.py",
    "tests/ops/test_kvcache_functions.py",
    "tests/ops/test_compile.py",
    "tests/ops/test_compile_constants.py",
    "tests/ops/test_compile_views.py",
    "tests/ops/test_package.py",
    "tests/ops/test_attend_quantized_kvcache.py",
    "tests/ops/test_quantized_kvcache.py",
    "tests/ops/test_quantized_kvcache_errors.py",
    "tests/ops/test_quantized_kvcache_places.py",
    "tests/ops/test_quantized_kvcache_traced.py",
    "tests/sparse/test_sparse_kvcache.py",
    "tests/sparse/test_value_compiled.py",
    "tests/ops/test_tiled_ops.py",
    "tests/ops/test_vmap.py",
    "tests/ops/test_vmap_gradients.py",
    "tests/ops/test_autocast.py",
    "tests/ops/test_fake_cuda.py",
    "tests/ops/test_flops.py",
    "tests/kernels/test_determinism.py",
    "tests/unit/test_support.py",
    "tests/unit/test_torch_internals.py",
    "tests/unit/test_torch_internals_graphs.py",
    "tests/unit/test_torch_internals_counted.py",
    "tests/kernels/test_cpu_plain.py",
    "tests/unit/test_import.py",
    "tests/unit/test_benchmark_random.py",
    "tests/integrations/test_dtensor.py",
    "tests/integrations/test_sdpa.py",
    "tests/integrations/test_torch_tools.py",
    "tests/kernels/test_tiled.py",
    "tests/unit/test_tiled_sizes.py",
    "tests/kernels/test_fp8_inputs.py",
    "tests/kernels/test_fp8_descales.py",
    "tests/ops/test_quantize_fp8.py",
    "tests/ops/test_quantize_fp8_attention.py",
    "tests/ops/test_quantize_fp8_errors.py",
    "tests/ops/test_quantize_fp8_traced.py",
    "tests/ops/test_quantize_e4m3.py",
    "tests/ops/test_dequantize_e4m3.py",
    "tests/ops/test_e4m3_prompts.py",
    "tests/ops/test_fp8_fwd_traced.py",
    "tests/kernels/test_fp8_routes.py",
    "tests/kernels/test_lab.py",
    "tests/systems/test_layer_transforms.py",
    "tests/systems/test_fp8_attention.py",
    "tests/systems/test_fp8_kept.py",
    "tests/systems/test_hardware.py",
    "tests/systems/test_hardware_batch.py",
    "tests/systems/test_hardware_memory.py",
    "tests/distributed/test_interfaces.py",
    "tests/distributed/test_disagreement.py",
]
NEEDED = ["numpy", "pytest", "pytest-xdist"]
# PyPI's torch requires it, but inductor works without it on the CPU. CUDA's libraries are needed:
# the import of torch loads all of them.
NOT_NEEDED = ["triton"]
CHECK = "import numpy, pytest, torch, xdist; print(torch.__version__)"


def release(version: str) -> tuple[int, ...] | None:
    """The numbers of ``2.10.0`` or ``2.10.0+cpu``; None for anything else, a nightly build too."""
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(\+\w+)?", version)
    return tuple(map(int, match.groups()[:3])) if match else None


def newest(versions: Iterable[str]) -> str | None:
    numbers = [number for number in map(release, versions) if number]
    return ".".join(map(str, max(numbers))) if numbers else None


def cached(cache: Path) -> list[str]:
    """Releases with an environment in the cache."""
    return [path.name.removeprefix("torch-") for path in cache.glob("torch-*")]


def newest_from_pip() -> str | None:
    """The release that pip would install here; None if it finds none."""
    command = [*install(sys.executable), "--dry-run", "--no-deps", "--ignore-installed"]
    command += ["--timeout=30", "--retries=2", "--report=-", "torch"]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if result.returncode != 0:
        return None
    return json.loads(result.stdout)["install"][0]["metadata"]["version"]


def find_newest(cache: Path) -> str:
    from_pip, from_cache = newest_from_pip(), newest(cached(cache))
    found = newest(version for version in (from_pip, from_cache) if version)
    if found is None:
        sys.exit("pip finds no torch (its messages are above), and the cache holds none")
    if from_pip is None:
        print(f"pip finds no torch (see above); the newest in the cache is {found}", flush=True)
    else:
        print(f"newest: {found}; pip finds {from_pip}, the cache has {from_cache}", flush=True)
    return found


def install(python: str | Path) -> list[str]:
    return [str(python), "-I", "-m", "pip", "install", "--quiet"]


def is_usable(environment: Path, version: str) -> bool:
    """Whether the environment has this release of torch and the tests' packages."""
    python = environment / "bin/python"
    if not python.exists():
        return False
    result = subprocess.run([python, "-I", "-c", CHECK], stdout=subprocess.PIPE, text=True)
    return result.returncode == 0 and release(result.stdout.strip()) == release(version)


def make_environment(environment: Path, version: str) -> None:
    """Makes an environment, or raises CalledProcessError."""
    subprocess.run([sys.executable, "-I", "-m", "venv", environment], check=True)
    python = str(environment / "bin/python")
    packages = [f"torch=={version}", *NEEDED]
    subprocess.run([*install(python), "--no-compile", *packages], check=True)
    uninstall = [python, "-I", "-m", "pip", "uninstall", "--quiet", "--yes"]
    subprocess.run([*uninstall, *NOT_NEEDED], check=True)


def prepare(cache: Path, version: str) -> Path:
    """The environment of a release: that of the cache, else a new one."""
    environment, making = cache / f"torch-{version}", cache / f"making-{version}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_usable(environment, version):
            return environment
        for left_over in cache.glob("making-*"):  # of an interrupted run: the lock is ours
            shutil.rmtree(left_over)
        started = time.monotonic()
        try:
            make_environment(making, version)
        except subprocess.CalledProcessError as error:
            sys.exit(f"torch {version}: its environment cannot be made, see above. {error}")
        if not is_usable(making, version):
            sys.exit(f"torch {version}: its environment was made, but cannot be used, see above")
        shutil.rmtree(environment, ignore_errors=True)
        making.rename(environment)  # breaks the scripts in bin/, but not python -m
        print(f"torch {version}: made {environment} in {time.monotonic() - started:.0f} s")
    return environment


def passes(environment: Path, tests: list[str]) -> bool:
    command = [str(environment / "bin/python"), "-m", "pytest", "-p", "no:cacheprovider"]
    variables = {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
    result = subprocess.run([*command, "-n", "2", *tests], cwd=ROOT, env=os.environ | variables)
    return result.returncode == 0


def release_argument(argument: str) -> str:
    if argument != "newest" and release(argument) is None:
        raise argparse.ArgumentTypeError(f"{argument!r} is neither a release nor 'newest'")
    return argument


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("releases", nargs="+", type=release_argument, metavar="RELEASE")
    parser.add_argument("--tests", nargs=argparse.REMAINDER, default=TESTS, metavar="ARGUMENT")
    args = parser.parse_args()
    results = []
    for name in args.releases:
        version = find_newest(CACHE) if name == "newest" else name
        environment = prepare(CACHE, version)
        print(f"torch {version}: {environment}", flush=True)
        started = time.monotonic()
        passed = passes(environment, args.tests)
        results.append((version, passed, time.monotonic() - started))
    for version, passed, seconds in results:
        print(f"torch {version}: tests {'pass' if passed else 'FAIL'}, {seconds:.0f} s")
    return 0 if all(passed for _, passed, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
