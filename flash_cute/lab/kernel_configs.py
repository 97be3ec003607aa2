"""The configs of the laboratory's kernels, and lists of them.

They are listed only here. The build runs this file as a script, without torch:
``python kernel_configs.py progression`` (or ``all``) prints the rows that CMake compiles. Fields,
rules and names are those of ``csrc/kernels/lab/config.h``.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ENVIRONMENT_VARIABLE = "KERNELS"
"""Names the set that :func:`get_kernel_configs` returns."""

_MOST_FRAGMENT_REGISTERS = 224
_MOST_SHARED_MEMORY = 99 * 1024


class DType(Enum):
    """The dtypes of the laboratory's tensors."""

    FP16 = "fp16"
    BF16 = "bf16"

    def to_cpp_str(self) -> str:
        """The value in C++: ``flash_cute::DType::BF16``."""
        return f"flash_cute::DType::{self.name}"

    def to_torch_dtype(self) -> torch.dtype:
        """``torch.float16`` or ``torch.bfloat16``."""
        import torch

        return {DType.FP16: torch.float16, DType.BF16: torch.bfloat16}[self]

    @classmethod
    def from_string(cls, s: str) -> DType:
        """The dtype that ``s`` names, in either case: ``fp16``, ``float16``, ``torch.float16`` or
        ``half``; ``bf16``, ``bfloat16`` or ``torch.bfloat16``; what ``str`` and
        :meth:`to_cpp_str` give. Raises ValueError for others, TypeError for what is no string."""
        if not isinstance(s, str):
            raise TypeError(f"s is {s!r}; expected a string, fp16 or bf16")
        name = s.lower().rpartition("::")[2].rpartition(".")[2]
        names = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
        try:
            return cls(names.get(name, name))
        except ValueError:
            raise ValueError(f"{s!r} is no dtype of the laboratory; give fp16 or bf16") from None


@dataclass(frozen=True)
class FlashForwardKernelConfig:
    """One kernel of FlashAttention-2's forward (arXiv 2307.08691), each technique on or off.

    Args:
        dtype: of q, k, v and the output.
        d_head: head dim, 64 or 128.
        B_r: query rows a block; a multiple of 16 n_warps.
        B_c: key rows a block; a multiple of 32.
        n_warps: of a CTA, 4 or 8.
        async_copy: blocks arrive in shared memory by cp.async, else through registers.
        eager_load_blocks: V arrives while scores are computed, and the next block of K during the
            product with V; else each is loaded right before its use. Needs ``async_copy``.
        swizzled: 16-byte vectors of a row in shared memory lie at their column XOR row % 8, so that
            eight rows of a column are in different banks.
        Q_mma_load_K_tiles: steps of 16 dims of Q that are in registers at a time. 0: all; Q then
            stays in registers for the whole kernel, else it is read again for each block of keys.
        K_mma_load_K_tiles: the same of K, in each product. 0: all of a block at once.
        V_mma_load_K_tiles: steps of 16 keys of V. 0: all of a block at once.
        mma_double_buffer_loads: the next steps of operands are loaded while products of the current
            ones run. Needs Q, K or V to be loaded in tiles.
        optimized_softmax: one FFMA and one exp2 a score, under the product before, and outputs are
            rescaled only where a maximum has risen far; else each block is scaled, its maxima
            subtracted, exponentiated by expf, and all outputs rescaled.

    Configs are hashable and comparable. Any combination is a valid value: :meth:`problems` says why
    one cannot be built.

    Raises:
        TypeError: a field is of another type.

    Example::

        from flash_cute.lab.kernel_configs import get_kernel_progression_configs

        config = get_kernel_progression_configs()[-1]
        print(config.short_form())
        # (BF16, 128, 128, 64, 4): async+eager+swizzled+load_1_1_1_tiles+buffer+opt_softmax
    """

    dtype: DType
    d_head: int
    B_r: int
    B_c: int
    n_warps: int
    async_copy: bool
    eager_load_blocks: bool
    swizzled: bool
    Q_mma_load_K_tiles: int
    K_mma_load_K_tiles: int
    V_mma_load_K_tiles: int
    mma_double_buffer_loads: bool
    optimized_softmax: bool

    def __post_init__(self) -> None:
        kinds = {"DType": DType, "int": int, "bool": bool}
        for field in fields(self):
            value, kind = getattr(self, field.name), str(field.type)
            if not isinstance(value, kinds[kind]) or (kind == "int" and isinstance(value, bool)):
                raise TypeError(f"{field.name} is {value!r}; expected {kind}")

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory of a CTA: a block each of Q, K and V."""
        return (self.B_r + 2 * self.B_c) * self.d_head * 2

    @property
    def fragment_registers(self) -> int:
        """Registers of a thread's accumulators and operands, in the larger product."""
        threads = 32 * self.n_warps
        q_stays = self.Q_mma_load_K_tiles == 0
        ahead = 2 if self.mma_double_buffer_loads else 1
        q_steps = self.d_head // 16 if q_stays else self.Q_mma_load_K_tiles * ahead
        q = 4 * (self.B_r // (16 * self.n_warps)) * q_steps
        k = 4 * (self.B_c // 16) * (self.K_mma_load_K_tiles or self.d_head // 16)
        v = 4 * (self.d_head // 16) * (self.V_mma_load_K_tiles or self.B_c // 16)
        output, scores = self.B_r * self.d_head // threads, self.B_r * self.B_c // threads
        return output + scores + max(q + k, (q if q_stays else 0) + v)

    def problems(self) -> list[str]:
        """Why a config cannot be built; empty if it can. ``csrc/kernels/lab`` refuses it with the
        same texts."""
        if self.d_head not in (64, 128):
            return ["d_head must be 64 or 128"]
        if self.n_warps not in (4, 8):
            return ["n_warps must be 4 or 8"]
        blocks = {
            "B_r must be a multiple of 16 * n_warps": _multiple(self.B_r, 16 * self.n_warps),
            "B_c must be a multiple of 32": _multiple(self.B_c, 32),
        }
        found = [words for words, holds in blocks.items() if not holds]
        if found:
            return found
        tiles = (self.Q_mma_load_K_tiles, self.K_mma_load_K_tiles, self.V_mma_load_K_tiles)
        d_steps, key_steps = self.d_head // 16, self.B_c // 16
        rules = {
            "eager_load_blocks needs async_copy": self.async_copy or not self.eager_load_blocks,
            "Q_mma_load_K_tiles must be 0 or divide d_head / 16 and be less": _divides(
                self.Q_mma_load_K_tiles, d_steps
            ),
            "K_mma_load_K_tiles must be 0 or divide d_head / 16 and be less": _divides(
                self.K_mma_load_K_tiles, d_steps
            ),
            "V_mma_load_K_tiles must be 0 or divide B_c / 16 and be less": _divides(
                self.V_mma_load_K_tiles, key_steps
            ),
            "mma_double_buffer_loads needs Q, K or V to be loaded in tiles": any(tiles)
            or not self.mma_double_buffer_loads,
            "fragments need more than 224 registers a thread": self.fragment_registers
            <= _MOST_FRAGMENT_REGISTERS,
            "blocks need more than 99 KiB of shared memory": self.smem_bytes <= _MOST_SHARED_MEMORY,
        }
        return [words for words, holds in rules.items() if not holds]

    def to_cpp_struct(self) -> str:
        """The value in C++: ``FlashForwardKernelConfig{flash_cute::DType::BF16, 128, ...}``."""
        return f"FlashForwardKernelConfig{{{self._cpp_fields()}}}"

    def _cpp_fields(self) -> str:
        values = (getattr(self, field.name) for field in fields(self))
        return ", ".join(map(_in_cpp, values))

    def kernel_name(self) -> str:
        """Name of the kernel in ``torch.ops.flash_cute.lab_kernels()`` and in the names of symbols:
        ``lab_fwd_bf16_d128_r64_c64_w4_q0_k1_v1_async_eager_swizzled_buffer_optsoftmax``."""
        numbers = (
            f"lab_fwd_{self.dtype.value}_d{self.d_head}_r{self.B_r}_c{self.B_c}_w{self.n_warps}"
            f"_q{self.Q_mma_load_K_tiles}_k{self.K_mma_load_K_tiles}_v{self.V_mma_load_K_tiles}"
        )
        flags = {
            "async": self.async_copy,
            "eager": self.eager_load_blocks,
            "swizzled": self.swizzled,
            "buffer": self.mma_double_buffer_loads,
            "optsoftmax": self.optimized_softmax,
        }
        return "_".join((numbers, *(name for name, on in flags.items() if on)))

    def short_form(self) -> str:
        """For people, and :meth:`from_short_form`:
        ``(BF16, 128, 64, 64, 4): async+eager+swizzled+load_0_1_1_tiles+buffer+opt_softmax``."""
        sizes = (self.dtype.name, self.d_head, self.B_r, self.B_c, self.n_warps)
        tiles = (self.Q_mma_load_K_tiles, self.K_mma_load_K_tiles, self.V_mma_load_K_tiles)
        flags = {
            "async": self.async_copy,
            "eager": self.eager_load_blocks,
            "swizzled": self.swizzled,
            f"load_{tiles[0]}_{tiles[1]}_{tiles[2]}_tiles": True,
            "buffer": self.mma_double_buffer_loads,
            "opt_softmax": self.optimized_softmax,
        }
        return f"({', '.join(map(str, sizes))}): " + "+".join(x for x, on in flags.items() if on)

    __str__ = short_form

    @classmethod
    def from_short_form(cls, text: str) -> FlashForwardKernelConfig:
        """The config with this :meth:`short_form`. Raises ValueError if there is none."""
        match = _SHORT_FORM.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"{text!r} is no short form of a config; an example is '{_EXAMPLE.short_form()}'"
            )
        parts = match.groupdict()
        number = {name: int(parts[name]) for name in "drcwqkv"}
        on = {name: parts[name] is not None for name in _FLAGS}
        return cls(
            dtype=DType[parts["dtype"]],
            d_head=number["d"],
            B_r=number["r"],
            B_c=number["c"],
            n_warps=number["w"],
            async_copy=on["async"],
            eager_load_blocks=on["eager"],
            swizzled=on["swizzled"],
            Q_mma_load_K_tiles=number["q"],
            K_mma_load_K_tiles=number["k"],
            V_mma_load_K_tiles=number["v"],
            mma_double_buffer_loads=on["buffer"],
            optimized_softmax=on["opt_softmax"],
        )

    def attn_flop(self, n_samples: int, n_heads: int, seq_len: int) -> int:
        """Floating-point operations of the two matrix products, ``n_samples`` being the batch:
        4 n_samples n_heads seq_len^2 d_head."""
        return 4 * n_samples * n_heads * seq_len**2 * self.d_head

    def total_flop(self, n_samples: int, n_heads: int, seq_len: int) -> int:
        """:meth:`attn_flop`, and the softmax: of each score a scaling, a maximum, a subtraction, an
        exponential and an addition, and of each output a rescaling for each block of keys and a
        division."""
        rows = n_samples * n_heads * seq_len
        softmax = 5 * rows * seq_len + rows * self.d_head * (seq_len // self.B_c + 1)
        return self.attn_flop(n_samples, n_heads, seq_len) + softmax


def _multiple(x: int, of: int) -> bool:
    return x > 0 and x % of == 0


def _divides(tiles: int, steps: int) -> bool:
    return tiles == 0 or (0 < tiles < steps and steps % tiles == 0)


def _in_cpp(x: object) -> str:
    if isinstance(x, DType):
        return x.to_cpp_str()
    return str(x).lower()  # True is true


_FLAGS = ("async", "eager", "swizzled", "buffer", "opt_softmax")
_SHORT_FORM = re.compile(
    r"\((?P<dtype>FP16|BF16), (?P<d>\d+), (?P<r>\d+), (?P<c>\d+), (?P<w>\d+)\): "
    r"(?:(?P<async>async)\+)?(?:(?P<eager>eager)\+)?(?:(?P<swizzled>swizzled)\+)?"
    r"load_(?P<q>\d+)_(?P<k>\d+)_(?P<v>\d+)_tiles(?P<buffer>\+buffer)?"
    r"(?P<opt_softmax>\+opt_softmax)?"
)
# The first step of the progression: the algorithm without optimizations.
_PLAIN = FlashForwardKernelConfig(
    DType.BF16, 128, 64, 32, 4, False, False, False, 0, 0, 0, False, False
)
_EXAMPLE = replace(_PLAIN, async_copy=True, swizzled=True)
_STEPS: tuple[tuple[str, dict[str, object]], ...] = (
    ("FlashAttention-2, nothing else", {}),
    ("swizzled shared memory", {"swizzled": True}),
    ("asynchronous copies", {"async_copy": True}),
    ("copies ahead of their use", {"eager_load_blocks": True}),
    ("K and V in tiles of registers", {"K_mma_load_K_tiles": 1, "V_mma_load_K_tiles": 1}),
    ("twice the keys a block", {"B_c": 64}),
    ("fragments loaded ahead", {"mma_double_buffer_loads": True}),
    ("optimized softmax", {"optimized_softmax": True}),
    ("twice the queries a warp", {"B_r": 128, "Q_mma_load_K_tiles": 1}),
)
PROGRESSION_STEPS = tuple(title for title, _ in _STEPS)
"""The technique that each config of :func:`get_kernel_progression_configs` adds."""


def get_kernel_progression_configs(dtype: DType = DType.BF16) -> list[FlashForwardKernelConfig]:
    """From the bare algorithm to all techniques, d_head 128: each config adds one
    (:data:`PROGRESSION_STEPS`) to the one before."""
    configs = []
    config = replace(_PLAIN, dtype=dtype)
    for _, change in _STEPS:
        config = replace(config, **change)  # type: ignore[arg-type]
        configs.append(config)
    return configs


def get_autotuning_kernel_configs(
    dtypes: Iterable[DType] = (DType.BF16, DType.FP16), all_block_sizes: bool = False
) -> list[FlashForwardKernelConfig]:
    """Candidates for autotuning: swizzled, with early copies and the optimized softmax, for d_head
    64 and 128, over block sizes, tiles of operands and double buffering.

    ``all_block_sizes`` adds blocks of 96 and 128 keys, and CTAs of 8 warps.
    """
    columns, warps = ((32, 64, 96, 128), (4, 8)) if all_block_sizes else ((32, 64), (4,))
    return [config for dtype in dtypes for config in _tuning_configs(dtype, columns, warps)]


def _tuning_configs(
    dtype: DType, columns: tuple[int, ...], warps: tuple[int, ...]
) -> Iterator[FlashForwardKernelConfig]:
    for d_head, n_warps, rows, B_c, q, k, v, buffer in itertools.product(
        (64, 128), warps, (16, 32), columns, (0, 1), (1, 2), (1, 2), (False, True)
    ):
        config = FlashForwardKernelConfig(
            dtype, d_head, rows * n_warps, B_c, n_warps, True, True, True, q, k, v, buffer, True
        )
        if not config.problems():
            yield config


def get_kernels_to_build(
    which: str | None = None, dtypes: Iterable[DType] = (DType.BF16, DType.FP16)
) -> list[FlashForwardKernelConfig]:
    """The distinct configs of a build: ``progression``, those of the progression in ``dtypes``; or
    ``all``, the autotuning ones, too.

    Without ``which``, those of the loaded library; if it was built without CUDA, those that the
    environment variable ``FLASH_CUTE_LAB`` selects for a build, by default ``progression``.

    Raises:
        ValueError: ``which`` is not a set.
    """
    if which is None and (built := _built()):
        return [config for config in built if config.dtype in tuple(dtypes)]
    which = which or os.environ.get("FLASH_CUTE_LAB") or "progression"
    if which not in ("progression", "all", "none"):
        raise ValueError(f"{which!r} is no set of kernels to build; give progression, all or none")
    dtypes = tuple(dtypes)
    configs = [config for dtype in dtypes for config in get_kernel_progression_configs(dtype)]
    configs += get_autotuning_kernel_configs(dtypes) if which == "all" else []
    return list(dict.fromkeys(configs)) if which != "none" else []


def _built() -> list[FlashForwardKernelConfig]:
    """The configs of the loaded library."""
    from flash_cute.native.library import lab_kernels

    names = set(lab_kernels())
    every = get_kernels_to_build("all") if names else []
    return [config for config in every if config.kernel_name() in names]


def get_kernel_configs(which: str | None = None) -> list[FlashForwardKernelConfig]:
    """The set ``which``, by default that of the environment variable ``KERNELS``: ``progression``
    (also without the variable), ``all`` or ``tune``.

    Only kernels that were built can be run: :func:`get_kernels_to_build`.

    Raises:
        ValueError: no such set.
    """
    which = which or os.environ.get(ENVIRONMENT_VARIABLE) or "progression"
    sets = {
        "progression": get_kernel_progression_configs,
        "all": lambda: get_kernels_to_build("all"),
        "tune": get_autotuning_kernel_configs,
    }
    if which not in sets:
        raise ValueError(
            f"{which!r} is no set of kernels; give {ENVIRONMENT_VARIABLE} (or `which`) one of "
            f"{', '.join(sets)}"
        )
    return sets[which]()


def rows(which: str) -> str:
    """What the build compiles for ``which``: one line of C++ for each config."""
    return "".join(f"LAB_KERNEL({c._cpp_fields()})\n" for c in get_kernels_to_build(which))


if __name__ == "__main__":
    sys.stdout.write(rows(sys.argv[1]))
