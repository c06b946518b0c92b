"""Read companions: the small files next to a checkpoint that `from_pretrained` needs too, such as config.json."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError
from ckptconv.features.companions.directory import LARGEST, places_of
from ckptconv.features.configs import configs
from ckptconv.formats.registered import is_companion_name
from ckptconv.formats.source import ADAPTER, ADAPTER_CONFIG, CONFIG, Source
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_remote
from ckptconv.storage.reading import Entry
from ckptconv.tensors.moves import File
from ckptconv.text import some

# Directories of huggingface_hub's cache, beside each other: the links in the first lead to files in the second.
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"


class Companions(NamedTuple):
    """Files of a model directory that are copied, by name; reasons why others of such names are not; and its path."""

    files: Mapping[str, File]
    stays: Mapping[str, str] = {}
    directory: str = ""


def companions_of(source: Source, options: Mapping[str, object], names: Collection[str] | None = None) -> Companions:
    """Return the companions of `source`, of these `names` if they are given, in the first of its places with any.

    Those that it has already go first. A file that is too large, or a link that leads out of the directory, is none.
    But links of huggingface_hub's cache lead to the same repository.
    """

    def is_one(name: str) -> bool:
        if name == ADAPTER_CONFIG and source.stem != ADAPTER:
            # Beside a model, loaders would take it for a request for the adapter.
            from ckptconv.formats.adapter_names import are_factors

            return are_factors(source.weights)
        return is_companion_name(name) if names is None else name in names

    for place in places_of(source, options):
        near = {name: entry for name, entry in place.names.items() if is_one(name)}
        unfit = {name: not_file(entry) or _unfit(place.path, entry.file) for name, entry in near.items()}
        files = {name: entry.file for name, entry in near.items() if not unfit[name]}
        if files:
            break
    own = {name: file for name, file in source.companions.items() if is_one(name)}
    return Companions({**files, **own}, {name: f"it is {why}" for name, why in unfit.items() if why}, place.path)


def not_file(entry: Entry) -> str:
    """Return the kind of a directory's entry that is not a file; else ""."""
    return {"file": "", "missing": "a broken link"}.get(entry.kind, "no file")


def _unfit(directory: str, file: File) -> str:
    """Return the reason why a file in `directory` cannot be copied; "" if there is none."""
    if file.size > LARGEST:
        return f"larger than {LARGEST >> 20} MiB"
    if is_remote(file.path):
        return ""
    root, real = os.path.realpath(directory), os.path.realpath(file.path)
    above, kind = os.path.split(os.path.dirname(root))
    roots = [root, os.path.join(above, _BLOBS)] if kind == _SNAPSHOTS else [root]
    is_inside = any(os.path.commonpath([inner, real]) == inner for inner in roots)
    return "" if is_inside else "a link to a file outside its directory"


def read_files(source: Source, options: Mapping[str, object], *names: str) -> dict[str, File]:
    """Return the files of these `names` among the companions of `source`, or in its directory; if none are there, in
    the next of its places. Links are followed. Raise CorruptError for one of them that is no file."""
    files: dict[str, File] = {}
    for place in places_of(source, options):
        for name in (name for name in place.names if name in names):
            if kind := not_file(place.names[name]):
                raise CorruptError(
                    f"{place.join(name)} is {kind}, but its contents are needed.", "Copy it again, or remove it."
                )
            files[name] = place.names[name].file
        if files:
            break
    return files | {name: file for name, file in source.companions.items() if name in names}


class Configuration(NamedTuple):
    """A configuration next to weights: its file, and its content."""

    file: File
    says: Mapping[str, Any]


def configurations(source: Source, options: Mapping[str, object], *names: str) -> Iterator[tuple[str, Configuration]]:
    """Yield the configurations of these `names` next to `source`, in this order. Raise the errors of `configs.read`."""
    files = read_files(source, options, *names)
    for name in (name for name in names if name in files):
        yield name, Configuration(files[name], _read(files[name], source, options))


def together(source: Source, options: Mapping[str, object], names: Collection[str] | None = None) -> dict[str, File]:
    """Return the companions of `source` and of its reference; of those that both have, the reference's. If `names` are
    given, return these, as files that are read."""
    files: dict[str, File] = {}
    for owner in filter(None, (source, source.reference)):
        files |= companions_of(owner, options).files if names is None else read_files(owner, options, *names)
    return files


def with_files(source: Source, files: Mapping[str, File], options: Mapping[str, object]) -> Source:
    """Return `source` with these companions, and with their configuration. Raise CorruptError if it is none."""
    config = _read(files[CONFIG], source, options) if CONFIG in files else None
    return source._replace(companions=files, config=config)


def _read(file: File, source: Source, options: Mapping[str, object]) -> Mapping[str, Any]:
    """Return the configuration in `file`. One that is derived is that of `source`, and its file is empty."""
    derived = source.config if file == source.companions.get(CONFIG) and not file.size else None
    return configs.read(Location(file.path, dict(options))) if derived is None else derived


def code_named(config: Mapping[str, Any]) -> list[str]:
    """Return the files of code that a configuration names: of its own repository, or those of others, after "--"."""
    own = config.get("auto_map")
    # A tokenizer has a list of two classes.
    every = [value if isinstance(value, list) else [value] for value in own.values()] if isinstance(own, dict) else []
    parts = (text.rpartition("--") for values in every for text in values if isinstance(text, str))
    return list(dict.fromkeys(f"{repository}{mark}{name.split('.')[0]}.py" for repository, mark, name in parts))


def code_notes(config: Mapping[str, Any]) -> list[str]:
    """Return a note if a configuration that is copied names code, which is not."""
    code = [name for name in code_named(config) if "--" not in name]
    if not code:
        return []
    needed = "Loading the model requires this code, and runs it."
    return [f"{CONFIG} refers to code in the repository, which was not copied: {some(code, form=str)}. {needed}"]
