"""Trains a small GPT, then generates text from prompts of unequal lengths with a paged cache.

Requests come and go (continuous batching): each step takes the whole prompt of those that begin and
one token of those that are under way, all in one call a layer. In the end every token must be the
one that the full forward over the whole sequence finds most likely; the exit status is 1 otherwise.

    PYTHONPATH=. python examples/generate.py --steps 300 --tokens 100
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import cast

import torch
from gpt import GPT, Block, flash_cute_attention
from progress import Progress
from torch import Tensor
from train_gpt import CPU, CUDA, Settings, load_text, train

from flash_cute import flash_attn_with_kvcache
from flash_cute.library import can_use_cuda

PAGE_SIZE = 16
PROMPTS = (
    "def __init__(self, ",
    "import ",
    "class Error(Exception):\n    ",
    "    for name in sorted(names):\n        if name.startswith('_'):\n            continue\n",
    "# ",
    "return",
)


@dataclass
class Request:
    """A sequence that grows by a token a step."""

    tokens: list[int]
    wanted: int  # tokens to generate
    pages: list[int] = field(default_factory=list)
    cached: int = 0  # tokens whose keys and values are in the cache


class Engine:
    """A model with a paged cache and the requests that share it.

    Raises ValueError for a request that could never fit, has no prompt, or wants no token.
    """

    def __init__(self, model: GPT, pages: int, most_at_once: int) -> None:
        if most_at_once < 1:
            raise ValueError(f"most_at_once is {most_at_once}; expected at least 1")
        self.model = model
        self.most_at_once = most_at_once
        self.pages = pages
        self.free = list(range(pages))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.blocks = [cast(Block, block) for block in model.blocks]
        rotary = self.blocks[0].rotary
        self.context = len(rotary.cos)
        self.device: torch.device = rotary.cos.device
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.cos, self.sin = (x[:, 0].to(self.dtype).contiguous() for x in (rotary.cos, rotary.sin))
        shape = (len(self.blocks), 2, pages, PAGE_SIZE, self.blocks[0].heads_k, self.blocks[0].dim)
        self.cache = torch.zeros(shape, dtype=self.dtype, device=self.device)

    def add(self, prompt: bytes, wanted: int) -> Request:
        if not prompt or wanted < 1:
            raise ValueError(f"a prompt of {len(prompt)} bytes and {wanted} tokens to generate")
        length = len(prompt) + wanted
        if length > self.context or -(-length // PAGE_SIZE) > self.pages:
            raise ValueError(f"{length} tokens do not fit into the context and the cache")
        self.waiting.append(Request(list(prompt), wanted))
        return self.waiting[-1]

    def run(self) -> int:
        """Serves every request; returns the number of steps."""
        steps = 0
        while self.waiting or self.running:
            self._admit()
            for request, token in zip(self.running, self._next_tokens(), strict=True):
                request.cached = len(request.tokens)
                request.tokens.append(token)
                request.wanted -= 1
                if request.wanted == 0:
                    self.free += request.pages
            self.running = [request for request in self.running if request.wanted > 0]
            steps += 1
        return steps

    def _admit(self) -> None:
        """Takes in requests while there are pages for all that they will ever hold."""
        while self.waiting and len(self.running) < self.most_at_once:
            request = self.waiting[0]
            pages = -(-(len(request.tokens) + request.wanted) // PAGE_SIZE)
            if pages > len(self.free):
                return
            request.pages = [self.free.pop() for _ in range(pages)]
            self.running.append(self.waiting.popleft())

    @torch.no_grad()
    def _next_tokens(self) -> list[int]:
        """The most likely next token of every running request."""
        new = [request.tokens[request.cached :] for request in self.running]
        integers = partial(torch.tensor, dtype=torch.int32, device=self.device)
        ends = torch.tensor([len(tokens) for tokens in new]).cumsum(0).tolist()
        most_pages = max(len(request.pages) for request in self.running)
        offsets = integers([0, *ends])
        call = partial(
            flash_attn_with_kvcache,
            rotary_cos=self.cos,
            rotary_sin=self.sin,
            rotary_interleaved=False,
            cache_seqlens=integers([request.cached for request in self.running]),
            block_table=integers(
                [r.pages + [0] * (most_pages - len(r.pages)) for r in self.running]
            ),
            cu_seqlens_q=offsets,
            cu_seqlens_k_new=offsets,
            max_seqlen_q=max(map(len, new)),
            causal=True,
        )
        x = self.model.embedding(torch.tensor(list(chain.from_iterable(new)), device=self.device))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            for block, cache in zip(self.blocks, self.cache, strict=True):
                q, k, v = (part.to(self.dtype) for part in block.project(x))
                x = x + block.proj(call(q, cache[0], cache[1], k, v).flatten(-2))
                x = x + block.mlp(block.norm2(x))
            last = integers(ends) - 1
            return self.model.head(self.model.norm(x[last])).argmax(-1).tolist()


@torch.no_grad()
def worst_choice(model: GPT, tokens: list[int], prompt_length: int) -> float:
    """How far a generated token's logit is from the best one's, by the full forward, at most."""
    device: torch.device = model.embedding.weight.device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        sequence: Tensor = torch.tensor([tokens], device=device)
        logits = model(sequence[:, :-1])[0, prompt_length - 1 :].float()
    chosen = logits.gather(-1, sequence[0, prompt_length:, None])[:, 0]
    return float((logits.amax(-1) - chosen).max())


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, generates, prints, checks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if can_use_cuda() else "cpu",
        help="default: cuda where usable",
    )
    parser.add_argument("--steps", type=int, default=100, help="of training; default: %(default)s")
    parser.add_argument(
        "--tokens", type=int, default=60, help="to generate, at most; default: %(default)s"
    )
    parser.add_argument(
        "--at-once", type=int, default=3, help="requests that run together; default: %(default)s"
    )
    options = parser.parse_args(argv)
    for name in ("steps", "tokens", "at_once"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; at least 1")
    settings: Settings = replace(CUDA if options.device == "cuda" else CPU, steps=options.steps)
    torch.manual_seed(settings.seed)
    model = settings.model(flash_cute_attention).to(options.device)
    losses, _ = train(
        model,
        load_text(None).to(options.device),
        settings,
        Progress("training step", options.steps),
    )
    print(f"loss after {options.steps} steps: {losses[-1]:.3f}")

    engine = Engine(model, pages=3 * settings.context // PAGE_SIZE, most_at_once=options.at_once)
    prompts = [prompt.encode() for prompt in PROMPTS]
    wanted = [max(1, options.tokens - 7 * i) for i in range(len(prompts))]
    requests = [engine.add(*one) for one in zip(prompts, wanted, strict=True)]
    print(f"{sum(wanted)} tokens in {engine.run()} steps")
    tolerance = 0.0 if options.device == "cpu" else 0.1  # bf16 rounds logits near each other
    wrong = 0
    for prompt, request in zip(prompts, requests, strict=True):
        print("-" * 72 + "\n" + bytes(request.tokens).decode(errors="replace"))
        wrong += worst_choice(model, request.tokens, len(prompt)) > tolerance
    print(f"{wrong} of {len(requests)} texts differ from those of the full forward")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
