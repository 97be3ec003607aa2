"""Tools for tests of attention: random cases, error bounds, guarded memory."""
