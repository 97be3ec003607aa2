"""Validation of layers, and timing. Each tool is imported by its own path."""
