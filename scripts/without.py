"""Copies the checkout without one feature: its code, options, command, tests, pages, and its lines in registries.

    python scripts/house.py --without NAME [DIRECTORY]      makes the copy; in build/without/NAME by default
    python scripts/house.py --without                       lists the features

What is left is written anew from its own tables: help, manual pages, schemas, types of keywords, the picture of rooms.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FEATURES = Path("ckptconv", "features")
# What makes files of others, in this order.
MAKERS = ("scripts/keywords.py", "scripts/reference.py", "scripts/house.py")
# Files whose lines belong to features: registries, lists of pages and of public names.
LINES = (".py", ".pyi", ".md", ".yml", ".toml")


def names() -> list[str]:
    """The features there are."""
    return sorted(path.name for path in (ROOT / FEATURES).iterdir() if (path / "__init__.py").exists())


def copy(name: str, into: Path) -> None:
    """Make the copy without the feature `name`. Raise SystemExit if there is none of this name."""
    if name not in names():
        sys.exit(f"There is no feature {name}: there are {', '.join(names())}.")
    shutil.rmtree(into, ignore_errors=True)
    pages = pages_of(name)
    gone = [f"{FEATURES / name}/", f"tests/features/{name}/", *(f"docs/{page}" for page in pages)]
    public = list(public_names(name))
    mentions = re.compile(
        "|".join(
            [
                rf"\bfeatures[./]{name}\b",
                *(rf"^(\||- |\d+\. ).*\bdocs/{page}|^(\||- ).*\({page}|: {page}$" for page in pages),
                *(rf"^(\s+\"?{each}\"?,|    \"{each}\": .*|::: ckptconv\.{each})$" for each in public),
            ]
        ),
        re.MULTILINE,
    )
    # In a sentence the words stay, and the link goes.
    links = re.compile(rf"\[([^\]]*)\]\([^)\s]*(?:{'|'.join(pages) or '(?!)'})(?:#[^)]*)?\)")
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for path in listed.rstrip("\0").split("\0"):
        if path.startswith(tuple(gone)) or not (ROOT / path).exists():
            continue
        target = into / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, target, follow_symlinks=False)
        if path.endswith(LINES):
            lines = target.read_text("utf-8").splitlines(keepends=True)
            kept = "".join(line for line in lines if not mentions.search(line.rstrip("\n")))
            target.write_text(links.sub(r"\1", kept), "utf-8")
    for maker in MAKERS:
        subprocess.run(
            [sys.executable, maker], cwd=into, check=True, env={"PYTHONPATH": str(into)}, capture_output=True
        )


def pages_of(name: str) -> tuple[str, ...]:
    """The pages in docs that its `__init__` lists, as PAGES."""
    for node in ast.parse((ROOT / FEATURES / name / "__init__.py").read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PAGES":
            return tuple(ast.literal_eval(node.value))
    return ()


def public_names(name: str) -> Iterator[str]:
    """The names of the library that live in the feature: functions, and the types of their keywords."""
    for path, home in (("__init__.py", r"\(\"features"), ("options/keywords.py", r"\"ckptconv\.features")):
        text = (ROOT / "ckptconv" / path).read_text("utf-8")
        yield from re.findall(rf'^    "(\w+)": {home}\.{name}\.', text, re.MULTILINE)


def main(words: list[str]) -> None:
    if not words:
        print(*names(), sep="\n")
        return
    name, *rest = words
    into = Path(*rest) if rest else ROOT / "build" / "without" / name
    copy(name, into.resolve())
    print(into)
