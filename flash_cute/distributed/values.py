"""Values on GPUs that all ranks must have, compared without waiting for the GPU."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from flash_cute.distributed import comm
from flash_cute.distributed.description import digest


class ValuesOnGPU:
    """Comparisons under way. After a call the GPUs exchange digests of tensors. Once these are on
    the host, a later call raises an error if they differ."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[list[str], Tensor, torch.cuda.Event]] = deque()

    def compare(self, tensors: dict[str, Tensor | None], group: Any) -> None:
        """Starts to compare the tensors that are on a GPU. Every rank makes the same call."""
        given = {name: x for name, x in tensors.items() if x is not None and x.is_cuda}
        if not given:
            return
        with torch.cuda.device(next(iter(given.values())).device):
            if torch.cuda.is_current_stream_capturing():
                return
            mine = torch.stack([digest(x) for x in given.values()])
            gathered, work = comm.all_gather(mine, group)
            work.wait()
            on_host = torch.empty(gathered.shape, dtype=torch.int64, device="cpu", pin_memory=True)
            on_host.copy_(gathered, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._under_way.append((list(given), on_host, event))

    def problem(self) -> ValueError | None:
        """The error of values that are known by now to differ; None if there are none."""
        if self._under_way and torch.cuda.is_current_stream_capturing():
            return None
        while self._under_way and self._under_way[0][2].query():
            names, digests, _ = self._under_way.popleft()
            of_ranks = digests.view(-1, len(names)).T.tolist()
            for name, of_rank in zip(names, of_ranks, strict=True):
                if len(set(of_rank)) > 1:
                    by_rank = ", ".join(f"{x % 2**64:016x}" for x in of_rank)
                    return ValueError(
                        f"ranks gave {name} of different values in an earlier call (digests by "
                        f"rank: {by_rank}); all must give the same"
                    )
        return None

    def forget(self) -> None:
        """Drops the comparisons under way, after an error of all ranks."""
        self._under_way.clear()
