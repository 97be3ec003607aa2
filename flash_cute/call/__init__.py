"""The arguments of attention calls: other spellings, sizes, validation, fp8 inputs, and the random
state of dropout."""
