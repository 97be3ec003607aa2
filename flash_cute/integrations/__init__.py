"""flash_cute as a backend of other libraries, one module for each.

See docs/integrations.md for what each needs, how it is activated and what is tested.
"""
