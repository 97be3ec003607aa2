"""Which tests there are, and their fixtures.

Every test that takes `device` runs on the CPU, and on CUDA where there is a GPU and kernels for it.
Those that take `cuda` exist there alone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import kvcache_calls
import pytest
import torch
from only_cuda import runs_on_cuda

from flash_cute.kernels import calibration
from flash_cute.native import library
from flash_cute.ops import has_fp8_attention
from flash_cute.testing import cases, kernels, kvcache

MakeInputs = Callable[..., cases.Inputs]
HAS_CUDA = library.can_use_cuda()
NO_CUDA = "no CUDA device, or a library without CUDA kernels"
_LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--only-cuda", action="store_true", help="leave out what needs no GPU")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--only-cuda") and not HAS_CUDA:
        raise pytest.UsageError(f"--only-cuda: {NO_CUDA}")


@pytest.hookimpl(tryfirst=True)  # what -k and -m leave out besides is not counted twice
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if HAS_CUDA and not config.getoption("--only-cuda"):
        return
    kept = [item for item in items if runs_on_cuda(item) == HAS_CUDA]
    others = [item for item in items if runs_on_cuda(item) != HAS_CUDA]
    config.hook.pytest_deselected(items=others)
    items[:] = kept
    config.stash[_LEFT_OUT] = 0 if HAS_CUDA else len(others)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of pytest-xdist tells the one that reports what it left out."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left_out"] = session.config.stash.get(_LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """All processes of pytest-xdist collect the same tests; one that crashed says nothing."""
    stash, output = node.config.stash, getattr(node, "workeroutput", {})
    stash[_LEFT_OUT] = max(stash.get(_LEFT_OUT, 0), output.get("left_out", 0))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    count = config.stash.get(_LEFT_OUT, 0)
    if count:
        terminalreporter.write_line(f"Tests that need CUDA, left out: {count} ({NO_CUDA})")


@pytest.fixture(params=["cpu", "cuda"] if HAS_CUDA else ["cpu"])
def device(request: pytest.FixtureRequest) -> str:
    """Where to run."""
    return request.getfixturevalue("cuda") if request.param == "cuda" else request.param


@pytest.fixture
def served(request: pytest.FixtureRequest) -> None:
    """Leaves out devices without the ops of e4m3 inputs, whose refusal other tests look at."""
    if "device" in request.fixturenames:
        device = torch.device(request.getfixturevalue("device"))
        if not has_fp8_attention(device):
            pytest.skip(f"no kernels of attention of e4m3 inputs on {device}")


@pytest.fixture
def cuda() -> Iterator[str]:
    """For tests of CUDA only. Large cached memory is freed, for tests in other processes."""
    yield "cuda"
    if torch.cuda.memory_reserved() > 2**32:
        torch.cuda.empty_cache()


@pytest.fixture
def no_garbage() -> Iterator[None]:
    """For tests that read torch.cuda.memory_allocated(): what earlier ones left in cycles of
    references is freed before the test, not by chance within it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def without_calibration() -> Iterator[None]:
    """What a test puts into use ends with it."""
    with calibration.suspended():
        yield


@pytest.fixture
def matmul_precision() -> Iterator[Callable[[str], None]]:
    """`matmul_precision("tf32")` is how torch multiplies fp32 on CUDA until the test ends."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    yield lambda precision: setattr(matmul, "fp32_precision", precision)
    matmul.fp32_precision = before


@pytest.fixture
def make(device: str) -> MakeInputs:
    """`make(case, seed=0)`: inputs on `device`.

    A case that CUDA has no kernel for must be refused by name, by the function and by the op; the
    test is skipped then.
    """

    def make_supported(case: cases.Case | cases.VarlenCase, seed: int = 0) -> cases.Inputs:
        inputs = cases.make_inputs(case, device, seed)
        missing = cases.unsupported_on_cuda(case) if device == "cuda" else None
        if missing is not None:
            with pytest.raises(NotImplementedError, match=f"(?i){missing}"):
                inputs.attend()
            with pytest.raises(RuntimeError, match=f"(?i){missing}"):
                inputs.forward()
            pytest.skip(f"refused on CUDA, as it should be: {missing}")
        return inputs

    return make_supported


@pytest.fixture(params=kernels.decode_choices())
def make_cache(
    request: pytest.FixtureRequest, device: str
) -> Iterator[Callable[..., kvcache.CacheInputs]]:
    """The same for `make_cache(case, seed=0)` over a key/value cache, in every family's kernels."""
    if device == "cpu" and request.param != "decode_":
        pytest.skip("there are no kernels on the CPU")

    def make_supported(case: kvcache.CacheCase, seed: int = 0) -> kvcache.CacheInputs:
        inputs = kvcache.make_cache_inputs(case, device, seed)
        missing = kvcache.unsupported_on_cuda(case) if device == "cuda" else None
        if missing is not None:
            with pytest.raises(NotImplementedError, match=missing):
                kvcache_calls.call(inputs)
            with pytest.raises(RuntimeError, match=missing):
                inputs.run()
            pytest.skip(f"refused on CUDA, as it should be: {missing}")
        return inputs

    if device == "cpu":
        yield make_supported
    else:
        with library.only(request.param, "fwd_", "bwd_"):
            yield make_supported
