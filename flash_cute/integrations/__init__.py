"""flash_cute inside of other libraries, each by its own module, loaded where it is imported.

See docs/integrations.md for what each needs, how it is activated and what is tested.
"""
