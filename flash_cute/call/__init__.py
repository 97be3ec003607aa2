"""What belongs to any attention call: spellings of its arguments, their validation, fp8 inputs, and
the random state of dropout."""
