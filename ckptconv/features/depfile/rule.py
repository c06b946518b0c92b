"""The inputs of a conversion as a rule for make: https://www.gnu.org/software/make/manual."""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence

from ckptconv.errors import UsageError
from ckptconv.formats.registered import is_companion_name
from ckptconv.formats.source import CONFIG, Source
from ckptconv.options.table import Options
from ckptconv.outputs.planning import Output
from ckptconv.outputs.targets import named_inputs
from ckptconv.plan import Input
from ckptconv.publish.staging.local import LocalStaging
from ckptconv.storage.paths import is_remote, normalize
from ckptconv.storage.reading import Reader
from ckptconv.tensors.moves import File

# The escapes of characters that are special to make. "=" would make the rule an assignment, "&" a grouped target. ";"
# begins a recipe, even after a backslash. As the result of a function they are plain: make expands it too late for
# that.
_ESCAPED = {
    "$": "$$",
    "=": "$(if ,,=)",
    "&": "$(if ,,&)",
    ";": "\\$(if ,,;)",
    **{character: "\\" + character for character in " #:*?[|"},
}
# Characters that cannot be escaped, in any name (parentheses denote an archive member) and in a target. Control
# characters cannot be either; some end a name.
_NOWHERE, _IN_NO_TARGET = frozenset("\\()\x7f"), frozenset("%|")
# As a target, a name such as .IGNORE or .ONESHELL changes how make runs, and make strips a leading "./". With the
# current directory in front (its blanks escaped by a backslash) it is an ordinary file.
_SPECIAL = re.compile(r"\.[A-Z_]+")
_HERE = "$(subst $() ,\\ ,$(CURDIR))/"
# As the first input, such a word would begin the definition of a variable.
_WORDS = ("define", "undefine", "export", "unexport", "override", "private")
_WIDTH = 120
# The size of the largest file that is taken for a rule.
_LARGEST = 64 << 20


@contextlib.contextmanager
def staged(
    path: str, sources: Sequence[Source], outputs: Sequence[Output], inputs: Sequence[File], options: Options
) -> Iterator[None]:
    """Stage a rule for the outputs at `path`; commit it after the block has committed them."""
    path = normalize(path)
    if is_remote(path):
        raise UsageError(f"{path}: --depfile must be a local file.")
    read = [*(file.path for file in inputs), *options.files()]
    for source in sources:
        read.extend([*named_inputs(source), *source.pointers, *(file.path for file in source.companions.values())])
        # Maps, casts and other kinds of output read it, also where they do not copy it.
        directory = source.path if os.path.isdir(source.path) else os.path.dirname(source.path)
        read.append(os.path.join(directory, CONFIG))
    for output in outputs:
        read.extend(content.file.path for content in output.inputs.values() if isinstance(content, Input))
    # make can check neither a pipe nor a remote file later.
    read = [os.path.normpath(name) for name in read if os.path.isfile(name)]
    targets = [_last_path(output) for output in outputs]
    runs = dict.fromkeys(source.path for source in sources if not source.pointers)
    read += [os.path.normpath(run) for run in runs if _is_chosen_in(run, read, [path, *targets])]
    text = os.fsencode(rule(targets, read))
    with LocalStaging(path, outputs[0].plan.plan_id, options.fsync) as staging:
        staging.made_as = "depfile"
        staging.seal(staging.put("", text))
        yield
        staging.commit([""])


def _is_chosen_in(run: str, read: Sequence[str], written: Sequence[str]) -> bool:
    """Return whether a directory was listed to choose one of its entries: each file that was `read` is in one of them.
    The directory's time changes with each new entry. With `written` files in it, it would always be newer than these.
    """
    if not os.path.isdir(run):
        return False
    run = os.path.abspath(run)
    parents = [os.path.dirname(os.path.abspath(name)) for name in read]
    is_inside = any(os.path.commonpath([run, os.path.abspath(name)]) == run for name in written)
    return run not in parents and any(parent.startswith(os.path.join(run, "")) for parent in parents) and not is_inside


def is_ours(reader: Reader) -> bool:
    """Return whether this program wrote a rule: each input has an empty rule of its own."""
    if not 0 < reader.file.size <= _LARGEST:
        return False
    lines = reader.read_at(0, reader.file.size).decode(errors="surrogateescape").replace(" \\\n ", " ").splitlines()
    first, *others = lines
    head, colon, named = first.partition(": ")
    return bool(colon and head and others) and named == " ".join(rule.removesuffix(":") for rule in others)


def rule(targets: Sequence[str], inputs: Iterable[str]) -> str:
    """Return a rule that makes `targets` depend on `inputs`; if an input is gone, make rebuilds instead of failing.

    Raises UsageError for names that a Makefile cannot hold.
    """
    for target in targets:
        if _IN_NO_TARGET.intersection(target) or _SPECIAL.fullmatch(target):
            raise _unspeakable(target)
    names = [escaped(name) for name in dict.fromkeys(inputs)]
    lines = [*_wrapped(f"{' '.join(map(escaped, targets))}:", names), *(f"{name}:" for name in names)]
    return "\n".join(lines) + "\n"


def escaped(name: str) -> str:
    """Return a name escaped for a Makefile. Raises UsageError if that is impossible."""
    if not name or name.startswith("~") or _NOWHERE.intersection(name) or min(name) < " ":
        raise _unspeakable(name)
    if name in _WORDS:
        return f"$(if ,,{name})"
    plain = "".join(_ESCAPED.get(character, character) for character in name)
    return _HERE + plain if _SPECIAL.fullmatch(posixpath.normpath(name)) else plain


def _unspeakable(name: str) -> UsageError:
    return UsageError(f"--depfile cannot write {name!r}: Makefiles do not support this name.", "Rename it.")


def _wrapped(first: str, names: Sequence[str]) -> list[str]:
    lines = [first]
    for name in names:
        if len(lines[-1]) + 1 + len(name) > _WIDTH and lines[-1] != first:
            lines[-1] += " \\"
            lines.append(f" {name}")
        else:
            lines[-1] += f" {name}"
    return lines


def _last_path(output: Output) -> str:
    """Return the path of the file that gets its final name last: once it exists, so do the others."""
    names = [file.name for file in output.plan.files if output.target.is_tree or not is_companion_name(file.name)]
    index = output.target.last
    last = index if index in names else names[-1 if output.target.is_tree else 0]
    return output.target.final(last)
