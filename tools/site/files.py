"""A hook of mkdocs: copies files of the repository that pages link to into the site.

Pages of docs/ link to files outside of docs/, as on GitHub. Each such file is copied to the folder
``repository`` of the site, also those that copied Markdown links to, and all links are rewritten.
mkdocs warns of broken links.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
COPIES = "repository"
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"""(\]\(|\bsrc=")([^)\s"]+)""")


def _source(uri: str) -> str:
    """The path in the repository of a page or file of the site."""
    return uri.removeprefix(f"{COPIES}/") if uri.startswith(f"{COPIES}/") else f"docs/{uri}"


def _place(source: str) -> str:
    """The path in the site of a file of the repository."""
    return source.removeprefix("docs/") if source.startswith("docs/") else f"{COPIES}/{source}"


def _target(source: str, link: str) -> str | None:
    """The file of the repository that a link of another one names, if there is one."""
    path = link.partition("#")[0]
    if not path or re.match(r"[a-z]+:", path):
        return None
    found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    return found if (ROOT / found).is_file() else None


def _linked(source: str) -> Iterator[str]:
    """What a Markdown file links to."""
    for part in _FENCE.split((ROOT / source).read_text(encoding="utf-8"))[::2]:
        for _, link in _LINK.findall(part):
            if target := _target(source, link):
                yield target


def on_files(files: Files, config: Any) -> Files:
    """Adds the files that pages link to, and those that these link to."""
    sources = [_source(file.src_uri) for file in files.documentation_pages()]
    known = set(sources)
    while sources:
        for target in _linked(sources.pop()):
            if target in known:
                continue
            known.add(target)
            if files.get_file_from_path(_place(target)) is None:
                path = str(ROOT / target)
                files.append(File.generated(config, _place(target), abs_src_path=path))
            if target.endswith(".md"):
                sources.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrites links to the files' paths in the site."""
    uri = page.file.src_uri

    def anew(match: re.Match[str]) -> str:
        before, link = match.groups()
        target = _target(_source(uri), link)
        if target is None:
            return match[0]
        place = posixpath.relpath(_place(target), posixpath.dirname(uri) or ".")
        if before != "](":  # mkdocs does not rewrite HTML: the link is relative to the page
            place = posixpath.relpath(_place(target), page.url or ".")
        return before + place + link[len(link.partition("#")[0]) :]

    parts = _FENCE.split(markdown)
    parts[::2] = [_LINK.sub(anew, part) for part in parts[::2]]
    return "".join(parts)
