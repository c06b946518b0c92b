"""Hooks of mkdocs: the pages beside mkdocs.yml and the schemas are part of the site, and links to them stay on it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Files outside docs/, and what they are called on the site.
OUTSIDE = {
    "README.md": "index.md",
    "SECURITY.md": "SECURITY.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    **{str(path.relative_to(ROOT)): f"schemas/{path.name}" for path in ROOT.glob("ckptconv/cli/schemas/*.json")},
}
FILES = "https://github.com/ckptconv/ckptconv/blob/main/"
PICTURES = "https://raw.githubusercontent.com/ckptconv/ckptconv/main/"
_LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside docs/."""
    from mkdocs.structure.files import File

    for name, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any = None, **_: Any) -> str:
    """Make the links of a page those of the site."""
    is_outside = page is not None and page.file.src_uri in OUTSIDE.values()
    return _LINK.sub(lambda link: f"]({here(link[1], is_outside)}{link[2] or ''})", markdown)


def here(target: str, is_outside: bool = False) -> str:
    """Return a link to a file of the repository as one to the page of the site, or to the repository where it is none.
    The link is on a page of docs/, or `is_outside`, on one beside mkdocs.yml.

    The pages of docs/ keep their places there, with the others beside them; a link between two of them stays as it is.
    """
    if is_outside and target.startswith("docs/"):
        return target.removeprefix("docs/")
    if (ROOT / "docs" / target.removeprefix("../")).is_file():
        return target
    name = target.removeprefix("../").removeprefix(FILES).removeprefix(PICTURES)
    if name == target and target not in OUTSIDE:
        return target
    if name in OUTSIDE:
        return OUTSIDE[name]
    return name.removeprefix("docs/") if name.startswith("docs/") else FILES + name
