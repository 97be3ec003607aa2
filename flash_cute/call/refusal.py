"""Which errors refuse a call, and which say that a valid one failed."""

from __future__ import annotations


def is_refusal(error: Exception) -> bool:
    """Whether an op says this of the call itself, so that validation may have better words for it;
    not for torch's errors, such as those of memory that is out."""
    is_worded = isinstance(error, (TypeError, ValueError, NotImplementedError))
    return is_worded or "flash_cute: " in str(error)  # behind a place in csrc
