"""Tools beside the kernels: validation of layers, timing. Each is imported by its own path."""
