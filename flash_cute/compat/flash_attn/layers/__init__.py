"""flash-attn's layers: ``rotary`` alone."""
