"""Hugging Face transformers: ``attn_implementation="flash_cute"``.

Example::

    from transformers import AutoModelForCausalLM
    from flash_cute.integrations import transformers

    transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flash_cute")
"""

from flash_cute.integrations.transformers.attention import attention
from flash_cute.integrations.transformers.masks import mask
from flash_cute.integrations.transformers.registry import NAME, register, unregister

__all__ = ["NAME", "attention", "mask", "register", "unregister"]
