"""What checks of the laboratory's kernels need; nothing here is a test itself."""
