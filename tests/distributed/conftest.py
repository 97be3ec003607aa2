"""Processes that tests of this folder share: started once for each number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.multiprocessing as mp

from flash_cute.testing.ranks import Ranks

# Else each rank imports them, for seconds.
mp.set_forkserver_preload(["flash_cute.testing.distributed", "torch._dynamo"])


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    with Ranks(2, method="forkserver") as ranks:
        yield ranks


@pytest.fixture(scope="session")
def three() -> Iterator[Ranks]:
    with Ranks(3, method="forkserver") as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    with Ranks(4, method="forkserver") as ranks:
        yield ranks


@pytest.fixture(params=["two", "three", "four"])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Of 2, 3 and 4 processes."""
    return request.getfixturevalue(request.param)
