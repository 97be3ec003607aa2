"""Utilities for checks of the laboratory's kernels; it has no tests."""
