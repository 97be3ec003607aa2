"""Calls that tests of calibrations plan, and the kernels that could do them."""

from __future__ import annotations

from dataclasses import replace

import torch

from flash_cute import kernels
from flash_cute.kernels import GPUS, Problem

PROBLEM = Problem(batch=4, heads=32, heads_k=8, seqlen_q=4096, causal=True)
FEW_QUERIES = Problem(heads=32, heads_k=8, seqlen_q=16, seqlen_k=8192)
H100 = GPUS["h100"]


def fitting(problem, gpu="h100"):
    return [row.id for row in kernels.explain(problem, gpu) if row.verdict != "refused"]


def others(problem, gpu="h100"):
    """Those that could do it, and are not planned."""
    planned = kernels.plan(problem, gpu).kernel.id
    return [i for i in fitting(problem, gpu) if i != planned and i.startswith(problem.op)]


PROBLEMS = {
    "causal": PROBLEM,
    "packed": replace(PROBLEM, varlen=True),
    "window": replace(PROBLEM, causal=False, window_size=(256, 0)),
    "rules": replace(PROBLEM, softcap=True, dropout=True),
    "fp32": replace(PROBLEM, dtype=torch.float32),
    "backward": replace(PROBLEM, op="bwd", head_dim=64),
    "deterministic": replace(PROBLEM, op="bwd", head_dim=64, deterministic=True),
    "decode": replace(PROBLEM, op="decode", seqlen_q=1, seqlen_k=8192),
    "pages": replace(PROBLEM, op="decode", seqlen_q=1, seqlen_k=8192, page_size=64, lengths=True),
}
