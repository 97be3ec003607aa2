"""``python -m flash_cute``: the command line of :mod:`flash_cute.cli`."""

from flash_cute.cli import main

main()
