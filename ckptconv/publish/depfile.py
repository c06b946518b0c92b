"""What a conversion read, as a rule for make: https://www.gnu.org/software/make/manual. Pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Sequence

from ckptconv.errors import UsageError

# How names in a Makefile have what else would mean something there. An equals sign would make an assignment of the
# rule, an ampersand a group, and a semicolon begins a recipe, even after a backslash: make looks at what a function
# gives too late for that.
_ESCAPED = {
    "$": "$$",
    "=": "$(if ,,=)",
    "&": "$(if ,,&)",
    ";": "\\$(if ,,;)",
    **{character: "\\" + character for character in " #:*?[|"},
}
# These there is no way to write (parentheses are members of an archive), nor control characters, some of which end a
# name; in a target, nor those.
_NOWHERE, _IN_NO_TARGET = frozenset("\\()\x7f"), frozenset("%|")
# As a target such a name, as .IGNORE or .ONESHELL, changes how make runs; make itself takes "./" away from it. With the
# directory in front, blanks in which have their backslash, it is a file like any other.
_SPECIAL = re.compile(r"\.[A-Z_]+")
_HERE = "$(subst $() ,\\ ,$(CURDIR))/"
_WIDTH = 120


def rule(targets: Sequence[str], inputs: Iterable[str]) -> str:
    """`targets` depend on `inputs`, and are made anew, not missed, when one of those is gone.

    Raises UsageError for names that no Makefile can hold.
    """
    for target in targets:
        if _IN_NO_TARGET.intersection(target) or _SPECIAL.fullmatch(target):
            raise _unspeakable(target)
    names = [escaped(name) for name in dict.fromkeys(inputs)]
    lines = [*_wrapped(f"{' '.join(map(escaped, targets))}:", names), *(f"{name}:" for name in names)]
    return "\n".join(lines) + "\n"


def escaped(name: str) -> str:
    """A name as a Makefile has it."""
    if not name or name.startswith("~") or _NOWHERE.intersection(name) or min(name) < " ":
        raise _unspeakable(name)
    plain = "".join(_ESCAPED.get(character, character) for character in name)
    return _HERE + plain if _SPECIAL.fullmatch(posixpath.normpath(name)) else plain


def _unspeakable(name: str) -> UsageError:
    return UsageError(f"{name!r} cannot be named in a Makefile, for --depfile. Nothing was written.", "Rename it.")


def _wrapped(first: str, names: Sequence[str]) -> list[str]:
    lines = [first]
    for name in names:
        if len(lines[-1]) + 1 + len(name) > _WIDTH and lines[-1] != first:
            lines[-1] += " \\"
            lines.append(f" {name}")
        else:
            lines[-1] += f" {name}"
    return lines
