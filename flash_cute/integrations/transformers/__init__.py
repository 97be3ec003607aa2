"""Hugging Face transformers: ``attn_implementation="flash_cute"``.

Example::

    from flash_cute.integrations import transformers
    from transformers import AutoModelForCausalLM, LlamaConfig

    transformers.register()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=100, num_attention_heads=4, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="flash_cute")
    # of a checkpoint: AutoModelForCausalLM.from_pretrained(name, attn_implementation="flash_cute")
"""

from flash_cute.integrations.transformers.attention import attention
from flash_cute.integrations.transformers.masks import mask
from flash_cute.integrations.transformers.registry import NAME, register, unregister

__all__ = ["NAME", "attention", "mask", "register", "unregister"]
