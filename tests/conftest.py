"""Fixtures: every test that takes `device` runs on the CPU, and on CUDA where kernels are built."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import kvcache_calls
import pytest
import torch
from only_cuda import runs_on_cuda

from flash_cute import library
from flash_cute.testing import cases, kernels, kvcache

MakeInputs = Callable[..., cases.Inputs]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--only-cuda", action="store_true", help="leave out what needs no GPU")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--only-cuda"):
        others = [item for item in items if not runs_on_cuda(item)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if runs_on_cuda(item)]


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """Where to run; CUDA is skipped without a GPU or without kernels for it."""
    return request.getfixturevalue("cuda") if request.param == "cuda" else request.param


@pytest.fixture
def cuda() -> Iterator[str]:
    """For tests that make sense on CUDA only. Much memory is given back, for tests beside them."""
    if not library.can_use_cuda():
        pytest.skip("no CUDA device, or a library without CUDA kernels")
    yield "cuda"
    if torch.cuda.memory_reserved() > 2**32:
        torch.cuda.empty_cache()


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
