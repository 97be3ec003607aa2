"""A process that destroys its groups ends: nothing of flash_cute keeps gloo's threads."""

from __future__ import annotations

from pathlib import Path

import fresh
import pytest

RANK = """
import atexit, os, sys
from torch import distributed as dist

def threads():
    return len(os.listdir("/proc/self/task"))

def at_the_end():  # the first that is registered runs last
    left = threads() - before
    print(left, "threads are left", file=sys.stderr)
    os._exit(left != 0)

atexit.register(at_the_end)
import torch
from torch.distributed.device_mesh import init_device_mesh
from flash_cute.attention import create_context_parallel_attention, create_ring_attention
from flash_cute.distributed import ContextParallel, cp_attention

torch.set_num_threads(1)
x = torch.randn(1, 6, 2, 8, requires_grad=True)
(x * x).sum().backward()
before = threads()
rank, store, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
assert threads() > before
if kind == "layer":
    layer = create_context_parallel_attention(16, 2, 2)
    layer(x.flatten(2)).sum().backward()
elif kind == "layer_of_group":
    layer = create_ring_attention(16, 2, group=dist.new_group([0, 1]))
    layer(x.flatten(2)).sum().backward()
else:
    ranks = {
        "context": lambda: None,
        "group": lambda: dist.new_group([0, 1]),
        "mesh": lambda: init_device_mesh("cpu", (2,)),
        "mesh_of_two": lambda: init_device_mesh("cpu", (2, 1)),
    }[kind]()
    cp = ContextParallel(ranks)
    del ranks
    plan = cp.plan(12, causal=True, heads=2)
    cp_attention(x, x, x, plan).sum().backward()
dist.destroy_process_group()
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
@pytest.mark.parametrize(
    "kind", ["context", "group", "mesh", "mesh_of_two", "layer", "layer_of_group"]
)
def test_no_thread_of_a_group_outlives_what_flash_cute_holds(tmp_path: Path, kind: str) -> None:
    given = [
        f"import sys; sys.argv[1:] = [{i}, {str(tmp_path)!r} + '/store', {kind!r}]\n"
        for i in (0, 1)
    ]
    ends = fresh.run_together([x + RANK for x in given])
    assert [x.returncode for x in ends] == [0, 0], "\n".join(x.stderr for x in ends)
