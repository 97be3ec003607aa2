"""flash-attn 2.8's package over flash_cute: ``flash_attn_interface``, ``bert_padding``,
``layers.rotary``.

Arguments, layouts and results are flash-attn's. What differs:

- The third result of ``return_attn_probs=True`` with dropout is the normalised probabilities in
  their exact shape, negative where dropout drops; flash-attn's are not normalised, and padded.
- Dropout masks differ from flash-attn's for the same seed.
- ``rng_state`` is int64 (2,) on the device of q.
"""

from flash_cute.compat.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__version__ = "2.8.3"

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
