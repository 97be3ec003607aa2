"""Compiled kernels that no compiler made, and a record of a check of them."""

from __future__ import annotations

import struct

import kernel_hash
from kernel_hash import Code

FWD = (
    "_ZN10flash_cute4sm907forwardIXtl12KernelConfigLNS_2OpE0ELNS_4ArchE90ELNS_5DTypeE1ELNS_4TierE0"
    "ELi64ELi64ELi192ELi128ELi4ELi12ELi1ELi2EEEEEvNS0_13ForwardParamsE"
)
FWD_ID = "fwd_sm90_bf16_plain_d64x64_m192_n128_s4_w12_c1_x2"
BWD = (
    "_ZN10flash_cute4sm808backwardIXtl12KernelConfigLN11flash_cute2OpE1ELNS2_4ArchE80ELNS2_5DType"
    "E3ELNS2_4TierE1ELi32ELi48ELi64ELi64ELi1ELi4ELi2ELi1EEEEEvNS_10BwdProblemE"
)
BWD_ID = "bwd_sm80_tf32x3_rich_d32x48_m64_n64_s1_w4_c2"
PASS = "_ZN10flash_cute12_GLOBAL__N_14fillENS_7GapFillE"


def elf(sections: dict[str, bytes]) -> bytes:
    """A file of 64 bits that holds these sections, as a cubin has them."""
    names, contents, headers = b"\0", b"", [(0,) * 6]
    for name, content in {**sections, ".shstrtab": b""}.items():
        headers.append((len(names), 1, 0, 0, 64 + len(contents), len(content)))
        names, contents = names + name.encode() + b"\0", contents + content
    name, kind, *_ = headers[-1]
    headers[-1] = (name, kind, 0, 0, 64 + len(contents), len(names))
    table = b"".join(struct.pack("<2I4Q", *header) for header in headers)
    head = b"\x7fELF".ljust(40, b"\0") + struct.pack("<Q", 64 + len(contents) + len(names))
    head = head.ljust(58, b"\0") + struct.pack("<3H", 40, len(headers), len(headers) - 1)
    return head + contents + names + table


def code(**bodies: bytes) -> Code:
    """Code for sm_90 of the kernels FWD, BWD and PASS."""
    texts = {f".text.{globals()[name]}": body for name, body in bodies.items()}
    return kernel_hash.code_of([("lib.1.sm_90.cubin", elf(texts))])


def recorded(now: Code, **changes: object) -> dict:
    record = {"commit": "abc", "source": "s", "host": "h", "failures": [], "not_memchecked": []}
    return record | now._asdict() | changes


CHECKED = code(FWD=b"1", BWD=b"2", PASS=b"3")
