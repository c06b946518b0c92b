"""Messages, help and pages use the words of the field, and are understood at one reading."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from said import PACKAGE, texts_of_the_package  # noqa: E402

# Phrases that need two readings, and what the field says instead.
TWICE_READ = {
    r"of no use": "has no effect, ignored",
    r"there is (nothing )?to (do|know|finish|compare)": "name the thing",
    r"\bwhat (decides|differs|is read|was tried|comes out|they were|was made|it was|changes)\b": "a noun",
    r"\bmakes? (weights|codes|checkpoints|tensors|files|safetensors|an average) of\b": "converts, computes",
    r"\bmade of what\b": "a manifest of inputs and outputs",
    r"\bthe way (there|back)\b": "converting, converting back, resuming",
    r"\bnobody here\b": "an actor: the list, the program",
    r"\b(is|are) told of\b": "an error names",
    r"\bthose of which\b": "a relative clause with a noun",
    r"\bcarr(y|ies) an attack\b": "malicious",
    r"\bsuch a part\b": "it",
    r"\bunder a final name\b": "published",
    r"\bmaps that come with\b": "built-in maps",
    r"\bin the memory of any conversion\b": "within the same memory bound",
}
# Further ones, in messages and help, which are short.
IN_MESSAGES = {
    r"^(what|whether) (?!.*\?)": "a noun first",
    r"\bwhat (comes|goes|is|was|were|are|the|many|each|\S+ (holds|has|had|says|wrote|read|made))\b": "a noun",
    r"\bnothing (tells|says how|in (it|them) (says|tells))\b": "an actor: the files do not say",
    r"\bno(body| one) (can|has|knows)\b": "an actor",
    r"\b(beside|in the place of)\b": "next to, instead of",
    r"\bthere (is|are) (no|nothing|none)\b.*\b(is|are) there\b": "a verb",
    r"\b(is|are) none\b": "is not valid",
    r"\btake[sn]? (it |them )?for\b": "read as",
    r"\bdo(es)? not tell\b": "record, say",
    r"\blies? (in|before|beside|outside)\b": "is",
}
# Pages that are made from the program, and one for developers.
_OTHERS = {"cli.md", "json.md", "map-catalogue.md", "api.md", "SKILL.md", "core.md"}


def found(texts: Iterable[tuple[str, str]], phrases: dict[str, str]) -> list[str]:
    return [
        f"{place}: {match[0]!r}: say {instead}"
        for place, text in texts
        for pattern, instead in phrases.items()
        if (match := re.search(pattern, text, re.IGNORECASE))
    ]


def messages() -> Iterator[tuple[str, str]]:
    """The texts in the package that people may read: those with blanks, without the docstrings."""
    return ((place, text) for place, text in texts_of_the_package() if text.strip().count(" ") > 1)


def helps() -> Iterator[tuple[str, str]]:
    """What the help says of each command and option."""

    def texts(value: object) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, (dict, list)):
            for inner in value.values() if isinstance(value, dict) else value:
                yield from texts(inner)

    shown = json.loads((PACKAGE / "cli" / "reference.json").read_text("utf-8"))
    return (("reference.json", text) for text in texts(shown))


def test_pages_for_users_say_it_in_the_words_of_the_field() -> None:
    pages = [ROOT / "README.md", *(page for page in (ROOT / "docs").glob("*.md") if page.name not in _OTHERS)]
    assert len(pages) > 20
    prose = (
        (page.name, re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)) for page in pages
    )
    assert found(prose, TWICE_READ) == []


def test_messages_and_help_say_it_in_the_words_of_the_field() -> None:
    texts = [*messages(), *helps()]
    assert len(texts) > 3000
    assert found(texts, {**TWICE_READ, **IN_MESSAGES}) == []


def test_docstrings_begin_with_their_object() -> None:
    pattern = re.compile(
        r'^ *r?"""(?:What|How|Which|Those|Who|Where)\b.*|^.*\) -> .*:\n *r?"""Whether\b.*', re.MULTILINE
    )
    # Fields and properties, which have a value that is true or false, begin with "Whether".
    properties = re.compile(r"@(?:functools.cached_)?property\n *def .*:\n.*")
    modules = {path: properties.sub("", path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}
    assert [f"{path}: {match[0]}" for path, text in modules.items() for match in pattern.finditer(text)] == []
