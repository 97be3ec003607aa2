# wgmma of 72 and 136 columns: V's dims and 8 columns of ones.
set(definitions CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED)
