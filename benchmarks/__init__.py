"""Measures flash_cute beside other attention implementations; see README.md in this folder."""
