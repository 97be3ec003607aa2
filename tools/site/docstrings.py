"""A hook of mkdocs: removes roles and double colons of Sphinx from docstrings in the site."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":\w+:<code>~?")
_CODE_FOLLOWS = re.compile(r"::</p>")


def on_page_content(html: str, **_: Any) -> str:
    """ ":func:`f`" is "`f`", and "Example::" is "Example:"."""
    return _CODE_FOLLOWS.sub(":</p>", _ROLE.sub("<code>", html))
