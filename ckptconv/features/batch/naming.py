"""Name the outputs of several inputs in one directory: by a template, or as each command would by itself."""

from __future__ import annotations

import os
import string
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ckptconv.errors import UsageError
from ckptconv.formats.model_files import SUFFIX
from ckptconv.outputs.default_names import file_name
from ckptconv.storage import stores
from ckptconv.storage.paths import basename, dirname, is_remote, join, normalize, resolved_name
from ckptconv.text import some

FIELDS = ("stem", "name", "parent", "number")
_INDEX = ".index.json"
# Templates by which an input has the same output, whatever else is named.
_STEADY = ("{parent}-{stem}", "{name}", "{parent}-{name}")


# The sentences on one input, and on several, that failed where others may be converted.
UNCONVERTED = "It was not converted.", "They were not converted."


class InputWord(NamedTuple):
    """An input as the user wrote it, and whether a directory is there."""

    word: str
    is_directory: bool = False


def output_paths(
    inputs: Sequence[InputWord],
    directory: str,
    template: str = "",
    resolve: Callable[[str], str] = resolved_name,
    suffix: str = SUFFIX,
) -> list[str | UsageError]:
    """Return the path of each input's output in `directory`; an error instead of a path that another output or an input
    has.

    `resolve` returns the canonical form of a path. Without a template, outputs end in `suffix`; those of directories do
    not if that is safetensors', and "" stands for outputs that are all directories. Raise UsageError for a template
    that is none, and for a name that leads out of the directory.
    """
    names = [_named(input_word, number, len(inputs), template, suffix) for number, input_word in enumerate(inputs, 1)]
    for input_word, name in zip(inputs, names, strict=True):
        _check_inside(name, directory, input_word.word)
    paths = [join(directory, *name.rstrip("/").split("/")) for name in names]
    return _apart(inputs, paths, resolve, directory, suffix)


def _named(input_word: InputWord, number: int, count: int, template: str, suffix: str) -> str:
    fields = fields_of(input_word, number, count)
    if template:
        return _filled_in(template, fields)
    if not suffix:
        return fields["stem"]
    # A file cannot stand for a sharded set in safetensors, which become a directory.
    is_set = input_word.is_directory or fields["name"].endswith(_INDEX)
    stem = fields["stem"] if input_word.is_directory else fields["parent"] if is_set else fields["stem"]
    return stem if is_set and suffix == SUFFIX else file_name(stem, suffix)


def fields_of(input_word: InputWord, number: int, count: int) -> dict[str, str]:
    """Return the values of a template's fields for the `number`-th of `count` inputs.

    `name` is the last part of its path, `stem` that without its suffix, or its revision on the hub; `parent` is the
    directory that it is in. `number` has as many digits as `count`.
    """
    path = normalize(input_word.word)
    path = path if is_remote(path) else os.path.abspath(path)
    name, place = basename(path), stores.plain(path)
    stem = basename(place) if input_word.is_directory else os.path.splitext(name.removesuffix(_INDEX))[0]
    return {"stem": stem, "name": name, "parent": basename(dirname(place)), "number": f"{number:0{len(str(count))}}"}


def _filled_in(template: str, fields: dict[str, str]) -> str:
    text = ""
    try:
        for literal, field, form, conversion in string.Formatter().parse(template):
            if field is not None and (field not in FIELDS or form or conversion):
                raise ValueError(f"{{{field}{'!' * bool(conversion)}{conversion or ''}{':' * bool(form)}{form}}}")
            text += literal + (fields[field] if field else "")
    except ValueError as error:
        raise UsageError(
            f"--output-name {template!r} is not a valid template for names: {error}.",
            f"Its fields are {', '.join(f'{{{field}}}' for field in FIELDS)}.",
        ) from error
    return text


def _check_inside(name: str, directory: str, word: str) -> None:
    parts = name.rstrip("/").split("/")
    # In the URL of a store, two colons begin the address of another one.
    chained = is_remote(directory) and "::" in name
    if chained or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise UsageError(
            f"The output of {word} would be called {name!r}, which is not a valid name in {directory}.",
            "Choose another --output-name.",
        )


def _apart(
    inputs: Sequence[InputWord], paths: Sequence[str], resolve: Callable[[str], str], directory: str, suffix: str
) -> list[str | UsageError]:
    """Return the path of each input's output; an error instead of a path that another output or an input has.

    All have the same number of parts below the directory, so none is in another.
    """
    words = {resolve(normalize(input_word.word)): input_word.word for input_word in inputs}
    places = [resolve(path) for path in paths]
    sharing: dict[str, list[str]] = {}
    for input_word, place in zip(inputs, places, strict=True):
        sharing.setdefault(place, []).append(input_word.word)
    clashes: dict[str, UsageError] = {}
    for place, path in zip(places, paths, strict=True):
        if place in words:
            clashes[place] = UsageError(
                f"The output of {some(sharing[place], form=str)} would be {path}, and {words[place]} is an input. "
                f"{UNCONVERTED[len(sharing[place]) > 1]}",
                "Choose another --output-dir or --output-name.",
            )
        elif len(sharing[place]) > 1:
            first, *others = dict.fromkeys(sharing[place])
            which = f"{some([first, *others[:-1]], form=str)} and {others[-1]}" if others else f"{first}, given twice,"
            together = "all" if len(sharing[place]) > 2 else "both"
            is_one = len({resolve(normalize(word)) for word in sharing[place]}) == 1
            clashes[place] = UsageError(
                f"The outputs of {which} would {together} be {path}. {UNCONVERTED[1]}",
                "Specify it once." if is_one else _apart_by(inputs, {*words}, resolve, directory, suffix),
            )
    return [clashes.get(place, path) for place, path in zip(places, paths, strict=True)]


def _apart_by(
    inputs: Sequence[InputWord], taken: set[str], resolve: Callable[[str], str], directory: str, suffix: str
) -> str:
    """Return advice with a template that gives the outputs of `inputs` different names, none of them `taken` in
    `directory`. The number is the last resort: it depends on the other inputs."""
    every = [fields_of(input_word, number, len(inputs)) for number, input_word in enumerate(inputs, 1)]
    # A file does not stand for a model of several files.
    is_set = any(input_word.is_directory or input_word.word.endswith(_INDEX) for input_word in inputs)
    ending = "" if is_set and suffix == SUFFIX else suffix
    for template in (f"{stem}{ending}" for stem in _STEADY):
        named = {resolve(join(directory, _filled_in(template, fields))) for fields in every}
        if len(named) == len(every) and not named & taken:
            return f"Use --output-name to give them different names, such as '{template}'."
    return (
        f"Use --output-name to give them different names, such as '{{number}}-{{stem}}{ending}'. {{number}} is the "
        "position in the command: if you insert an input, the outputs of the following inputs get other names."
    )
