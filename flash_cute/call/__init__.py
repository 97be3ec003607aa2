"""The arguments of attention calls: other spellings, validation, fp8 inputs, and the random state
of dropout."""
