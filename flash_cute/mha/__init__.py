"""FlashAttention's C++ functions, as PyTorch has them, over the ops of flash_cute.

Names, arguments, their order and the results are those of ``flash_api.h`` in PyTorch
(``aten/src/ATen/native/transformers/cuda/flash_attn``), for code that calls these. They make the
checks of the public functions, and have no autograd: forward's results are backward's arguments.
In addition to the original they support the CPU, all dtypes and head dims of flash_cute, another
head dim of v, softcap with dropout, and ``return_softmax`` without dropout. Differences:

- ``softmax_lse`` is (heads, total_q) for packed sequences, and -inf for a row that sees no key.
- ``philox_seed`` and ``philox_offset`` are int64 scalars on q's device, 0 without dropout.
- The last result of forward is the signed probabilities, not padded; without ``return_softmax`` it
  is an empty tensor. ``softmax_d`` is not padded either.
- A negative softcap is refused; 0 switches it off. ``block_table_`` may have pages of any size.
"""

from flash_cute.mha.functions import mha_bwd, mha_fwd, mha_varlen_bwd, mha_varlen_fwd

__all__ = ["mha_bwd", "mha_fwd", "mha_varlen_bwd", "mha_varlen_fwd"]
