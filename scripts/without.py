"""Copies the checkout without one feature: its code, options, command, tests, pages, and its lines in registries; and
without those that add to it.

    python scripts/house.py --without NAME [DIRECTORY]      makes the copy; in build/without/NAME by default
    python scripts/house.py --without NAME --check [FLAG…]  makes it, and runs the checks and all tests there, with
                                                            these flags of pytest
    python scripts/house.py --without --turn [FLAG…]        does so for one feature, by turns, with the tests of
                                                            the trunk and of two other features
    python scripts/house.py --without                       lists the features

What is left is written anew from its own tables: help, manual pages, schemas, types of keywords, the picture of rooms.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from said import saying

ROOT = Path(__file__).resolve().parents[1]
FEATURES = Path("ckptconv", "features")
# What makes files of others, in this order: where it is called, and how.
MAKERS = (
    (".", ("scripts/keywords.py",)),
    (".", ("scripts/reference.py",)),
    (".", ("scripts/house.py",)),
    ("tests", ("-m", "attacks.corpus", "--manifest")),
    (".", ("-m", "ruff", "format", "--quiet", ".")),
)
# Files whose lines belong to features: registries, lists of pages and of public names.
LINES = (".py", ".pyi", ".md", ".yml", ".yaml", ".toml")
# Its lines between fences quote messages.
QUOTING = "docs/troubleshooting.md"
# What others' pre-commit may run: each item is a command.
HOOKS = ".pre-commit-hooks.yaml"


def names() -> list[str]:
    """The features there are."""
    return sorted(path.name for path in (ROOT / FEATURES).iterdir() if (path / "__init__.py").exists())


def copy(name: str, into: Path) -> None:
    """Make the copy without the feature `name`, and those that need it. Raise SystemExit if there is no such one."""
    if name not in names():
        sys.exit(f"There is no feature {name}: there are {', '.join(names())}.")
    shutil.rmtree(into, ignore_errors=True)
    left_out = [name, *needing(name)]
    pages = [page for each in left_out for page in listed_by(each, "PAGES")]
    gone = [f"{folder}/{each}/" for each in left_out for folder in (FEATURES, "tests/features")]
    gone += [f"docs/{page}" for page in pages]
    gone += [f"scripts/{script}" for each in left_out for script in listed_by(each, "SCRIPTS")]
    files = [file for each in left_out for file in listed_by(each, "FILES")]
    gone += files
    public = [found for each in left_out for found in public_names(each)]
    mentions = re.compile(
        "|".join(
            [
                rf"\bfeatures[./](?:{'|'.join(left_out)})\b",
                *(rf"^(\||- |\d+\. ).*\bdocs/{page}|^(\||- ).*\({page}|: {page}$" for page in pages),
                *(rf"^(\s+{in_list(each)},|    \"{each}\": (?!\"{each}\").*|::: ckptconv\.{each})$" for each in public),
            ]
        ),
        re.MULTILINE,
    )
    # Examples of its commands and functions, and lines that are about them; in other sentences the words stay, and the
    # link goes.
    about = re.compile(
        "|".join(
            [
                *(rf"\bckptconv {command}\b" for each in left_out for command in commands_of(each)),
                *(rf"\bckptconv\.{each}\(" for each in public),
                *(rf"\bckptconv .*{flag}(?![\w-])|^ +With {flag}," for each in left_out for flag in flags_of(each)),
                *(rf"\bckptconv\.convert\(.*\b{keyword(flag)}=" for each in left_out for flag in flags_of(each)),
                *(
                    rf"\bckptconv convert [^-\s]\S* \S+\{end}\b"
                    for each in left_out
                    for end in listed_by(each, "ENDINGS")
                ),
            ]
        )
        or "(?!)"
    )
    # What was measured stays as it was measured.
    measured = re.compile(r"^\|.*\| *[\d.]+ *\|")
    links = re.compile(rf"\[([^\]]*)\]\([^)\s]*(?:{'|'.join([*pages, *files]) or '(?!)'})(?:#[^)]*)?\)")
    # What one feature adds to another, and tests of both together: a module or a folder.
    together = re.compile(rf"^(?:ckptconv|tests)/features/\w+/with_(?:{'|'.join(left_out)})(?:/|\.py$)")

    def is_gone(path: str) -> bool:
        return path.startswith(tuple(gone)) or bool(together.search(path))

    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for path in listed.rstrip("\0").split("\0"):
        if is_gone(path) or not (ROOT / path).exists():
            continue
        target = into / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, target, follow_symlinks=False)
        if path.endswith(LINES):
            lines = target.read_text("utf-8").splitlines(keepends=True)
            kept = "".join(line for line in lines if not mentions.search(line.rstrip("\n")))
            if path == HOOKS:
                hooks = re.split(r"^(?=- id:)", kept, flags=re.MULTILINE)
                kept = "".join(hook for hook in hooks if not about.search(hook))
            if path.startswith("ckptconv/"):
                # Examples of commands in what they say of themselves, and sentences about options.
                said = re.compile(r"^ +(?:ckptconv|With) .*\n", re.MULTILINE)
                kept = said.sub(lambda line: line[0] * (not about.search(line[0])), kept)
            if path.endswith(".md"):
                kept = "".join(part for part in parts_of(kept) if measured.search(part) or not about.search(part))
            if path == QUOTING:
                kept = without_quotes(kept, is_gone)
            target.write_text(links.sub(r"\1", kept), "utf-8")
    env = {"PYTHONPATH": str(into)}
    for folder, words in MAKERS:
        subprocess.run([sys.executable, *words], cwd=into / folder, check=True, env=env, capture_output=True)


def in_list(name: str) -> str:
    """A pattern for a public name in a list: types stand there by themselves too, other names are also those of
    variables."""
    return rf"\"{name}\"" if name.islower() else rf"\"?{name}\"?"


def parts_of(page: str) -> list[str]:
    """The lines of a page, where an example is one, with what it prints."""
    return re.findall(
        r"^```(?:python|sh)\n.*?^```\n(?:\n```text\n.*?^```\n)?|^[^\n]*\n", page, re.MULTILINE | re.DOTALL
    )


def without_quotes(page: str, is_gone: Callable[[str], object]) -> str:
    """The page without the messages that only modules say that are gone."""
    lines, quoted = [], False
    for line in page.splitlines(keepends=True):
        quoted = line == "```text\n" or (quoted and line != "```\n")
        modules = saying(line.rstrip("\n")) if quoted else []
        if not modules or not all(is_gone(f"ckptconv/{module}") for module in modules):
            lines.append(line)
    return "".join(lines)


def flags_of(name: str) -> Iterator[str]:
    """The options that the feature adds to commands of others, and the values of --to that ask for its outputs."""
    kinds = (ROOT / "ckptconv" / "outputs" / "kinds.py").read_text("utf-8")
    for kind in re.findall(rf'^    "[\w-]+": OfFeature\("{name}",.* to="([\w-]+)"', kinds, re.MULTILINE):
        yield f"--to {kind}"
    tables = "".join(path.read_text("utf-8") for path in sorted((ROOT / FEATURES).glob("*/options.py")))
    modules = re.findall(rf'^    "\w+": "ckptconv\.(features\.{name}\.\w+)",', tables, re.MULTILINE)
    registered = (ROOT / "ckptconv" / "options" / "registered.py").read_text("utf-8")
    # Of the tables there, the first one says which features have options of their own.
    having = re.search(r"^FEATURES\b.*?^}", registered, re.MULTILINE | re.DOTALL)
    modules += [f"features.{name}.options"] if having and f'\n    "{name}": "' in having[0] else []
    for module in modules:
        text = (ROOT / "ckptconv" / f"{module.replace('.', '/')}.py").read_text("utf-8")
        for option in re.findall(r"^    (\w+)(?:: .*)? = ", text, re.MULTILINE):
            yield f"--{option.replace('_', '-')}"


def keyword(flag: str) -> str:
    """The name in Python of an option."""
    return flag.removeprefix("--").replace("-", "_")


def commands_of(name: str) -> list[str]:
    """The commands of the feature, or the groups of them."""
    registered = (ROOT / "ckptconv" / "cli" / "registered.py").read_text("utf-8")
    return re.findall(rf'^ +"([\w-]+)": "ckptconv\.features\.{name}\.', registered, re.MULTILINE)


def listed_by(name: str, what: str) -> tuple[str, ...]:
    """What the feature's `__init__` lists: PAGES in docs, SCRIPTS in scripts, other FILES, features that it NEEDS, and
    ENDINGS of the names of outputs that it writes."""
    for node in ast.parse((ROOT / FEATURES / name / "__init__.py").read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == what:
            return tuple(ast.literal_eval(node.value))
    return ()


def needing(name: str) -> list[str]:
    """The features that add to the feature or build on it, at once or by others, and are gone without it."""
    gone = [name]
    for lost in gone:
        gone += [each for each in names() if lost in listed_by(each, "NEEDS") and each not in gone]
    return gone[1:]


def public_names(name: str) -> Iterator[str]:
    """The names of the library that live in the feature: functions, and the types of their keywords."""
    for path, home in (("__init__.py", r"\(\"features"), ("options/keywords.py", r"\"ckptconv\.features")):
        text = (ROOT / "ckptconv" / path).read_text("utf-8")
        yield from re.findall(rf'^    "(\w+)": {home}\.{name}\.', text, re.MULTILINE)


def check(name: str, others: list[str], flags: list[str]) -> None:
    """Make the copy without the feature `name`, and run the linters, mypy and pytest with `flags` there: the tests of
    the trunk, and those of the features `others`. Raise SystemExit if one of them fails."""
    into = ROOT / "build" / "without" / name
    copy(name, into)
    # The copy has no environment of its own: its code comes first on the path.
    environment = {**os.environ, "PYTHONPATH": str(into)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    (into / ".venv").symlink_to(Path(sys.prefix))
    left_out = [f"--ignore=tests/features/{each}" for each in names() if each not in (name, *needing(name), *others)]
    for command in (
        ["git", "init", "--quiet", "."],
        ["git", "add", "--all"],
        [f"{sys.prefix}/bin/ruff", "check", "."],
        [f"{sys.prefix}/bin/mypy"],
        [sys.executable, "scripts/house.py", "--check"],
        [sys.executable, "-m", "pytest", *flags, *left_out],
    ):
        done = subprocess.run(command, cwd=into, check=False, env=environment)
        if done.returncode:
            sys.exit(f"Without {name}, this fails in {into}: {' '.join(command)}")


def turn() -> tuple[str, list[str]]:
    """The feature whose turn it is, and two others: another one after each commit."""
    count = subprocess.run(["git", "rev-list", "--count", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
    every = names()
    at = int(count.stdout) % len(every)
    chosen, *others = [*every[at:], *every[:at]][:3]
    return chosen, others


def main(words: list[str]) -> None:
    if not words:
        print(*names(), sep="\n")
    elif words[0] == "--turn":
        name, others = turn()
        print(f"without {name}, with the tests of {', '.join(others) or 'the trunk alone'}", flush=True)
        check(name, others, words[1:])
    elif words[1:2] == ["--check"]:
        check(words[0], names(), words[2:])
    else:
        name, *rest = words
        into = Path(*rest) if rest else ROOT / "build" / "without" / name
        copy(name, into.resolve())
        print(into)
