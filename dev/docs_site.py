"""Hooks of the documentation site.

Links to files of the repository lead to pages with their content: a copy of the site needs no
repository beside it, and shows the files of its own version. Pages forbid the browser to load
anything from elsewhere, since scripts of the theme would in some cases.

Decisions: docs/decisions/documentation-and-tests.md.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs/"
OUTSIDE = "repository/"
MAX_SHOWN_BYTES = 100_000
ONLY_FROM_HERE = (
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'self' file: data: blob: 'unsafe-inline'\">"
)
NOT_SEARCHED = "---\nsearch: {exclude: true}\n---\n"
LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".toml": "toml",
    ".proto": "protobuf",
}
# Code comes first, so that links in it are left alone.
LINK = re.compile(
    r"(?:```.*?^ *```|`[^`\n]+`)|\]\(([^)\s#]*)(#[^)\s]*)?\)", re.MULTILINE | re.DOTALL
)


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each file or folder outside of docs/ that a page links to."""
    todo = [DOCS + file.src_uri for file in files.documentation_pages()]
    seen = set(todo)
    while todo:
        for target in sorted({*_outside(todo.pop())} - seen):
            seen.add(target)
            files.append(_added(target, config))
            todo += [target] if _is_page(target) else []
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links lead to the added pages."""
    del config, files
    place = page.file.src_uri
    return _relinked(markdown, _origin(place), place)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Allow no other host as a source of scripts, fonts and pictures."""
    del page, config
    return output.replace("<head>", f"<head>{ONLY_FROM_HERE}", 1)


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """The same for the page of unknown addresses."""
    del template_name, config
    return output_content.replace("<head>", f"<head>{ONLY_FROM_HERE}", 1)


def _origin(place: str) -> str:
    """Path in the repository of what a page shows."""
    if not place.startswith(OUTSIDE):
        return DOCS + place
    inner = place.removeprefix(OUTSIDE)
    return inner.removesuffix("/files.md") if inner.endswith("/files.md") else inner


def _relinked(markdown: str, origin: str, place: str) -> str:
    def changed(match: re.Match[str]) -> str:
        target = _target(match[1], origin)
        if target is None:
            return match[0]
        there = posixpath.relpath(_place(target), posixpath.dirname(place) or ".")
        return f"]({there}{match[2] or ''})"

    return LINK.sub(changed, markdown)


def _outside(origin: str) -> Iterator[str]:
    for match in LINK.finditer((ROOT / origin).read_text()):
        target = _target(match[1], origin)
        if target is not None and not target.startswith(DOCS):
            yield target


def _target(link: str | None, origin: str) -> str | None:
    """Path in the repository of a link; None if it leads elsewhere, or to nothing."""
    if not link or "://" in link:
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))
    return path if (ROOT / path).exists() else None


def _is_page(path: str) -> bool:
    return path.endswith(".md")


def _place(path: str) -> str:
    """Where the site has a file or folder of the repository."""
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    if (ROOT / path).is_dir():
        return f"{OUTSIDE}{path}/files.md"
    return OUTSIDE + path + ("" if _is_page(path) or not _is_shown(path) else ".md")


def _is_shown(path: str) -> bool:
    return (ROOT / path).suffix in LANGUAGES and (ROOT / path).stat().st_size < MAX_SHOWN_BYTES


def _added(path: str, config: Any) -> File:
    place = _place(path)
    kept = {"inclusion": InclusionLevel.NOT_IN_NAV}
    if _is_page(path):
        return File.generated(
            config, place, content=NOT_SEARCHED + (ROOT / path).read_text(), **kept
        )
    if (ROOT / path).is_dir():
        return File.generated(config, place, content=NOT_SEARCHED + _folder(path), **kept)
    if _is_shown(path):
        content = f"{NOT_SEARCHED}# `{path}`\n\n{_shown(path)}"
        return File.generated(config, place, content=content, **kept)
    return File.generated(config, place, abs_src_path=str(ROOT / path), **kept)


def _folder(path: str) -> str:
    """A page with all files of a folder."""
    parts = [f"# `{path}`\n"]
    for name in _tracked(path):
        if _is_shown(name):
            parts.append(f"## `{posixpath.relpath(name, path)}`\n\n{_shown(name)}")
    return "\n".join(parts)


def _shown(path: str) -> str:
    return f"````{LANGUAGES[Path(path).suffix]}\n{(ROOT / path).read_text()}````\n"


@cache
def _tracked(folder: str) -> tuple[str, ...]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", folder]
    listed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return tuple(sorted(listed.stdout.split()))
