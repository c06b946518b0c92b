"""Decides which companions of a checkpoint are copied to an output, and which files there they may replace."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ckptconv.formats import companions, pipelines
from ckptconv.formats.registered import DCP, DEEPSPEED
from ckptconv.formats.source import ADAPTER, Source
from ckptconv.options.table import Options
from ckptconv.outputs.computed import ways_of
from ckptconv.outputs.kinds import is_set
from ckptconv.outputs.targets import Target, is_beside
from ckptconv.publish.earlier import Directory
from ckptconv.storage import stores
from ckptconv.storage.location import Location
from ckptconv.storage.paths import dirname, is_remote, join, resolved_name
from ckptconv.structure.record import FILE_NAME
from ckptconv.tensors.moves import BLOCK, File
from ckptconv.text import some

# Files that are named in a note.
_NAMED = 100


def accompanied(source: Source, target: Target, options: Options, parts: Collection[str] = ()) -> tuple[Source, Target]:
    """Return `source` with the companions that are copied to `target`, and with notes and warnings about them; and
    `target` with the companions of an earlier output, which are removed.

    Companions of a reference go before those of the source. Without `copy_config`, only a reference and a repository of
    the hub have any, and quantized weights. A file at `target` stays unless an earlier output copied it, or it is the
    same. Other files in the directory of `source` stay behind, and a note names them; `parts` are folders of other
    sources.
    """
    source, goal = _accompanied(source, target, options)
    may_be_less = options.include or options.exclude or is_set("partial", options)
    if source.config is None and may_be_less and companions.CONFIG not in goal.replaces:
        source = source._replace(config=_config_at(target, options))
    directory, left = _left(source, target, options, parts)
    if left:
        is_unasked = options.copy_config is None and source.reference is None and not target.is_file
        can_copy = is_unasked and source.is_model and companions.CONFIG in left
        hint = " --copy-config copies the configuration and tokenizer." if can_copy else ""
        source = source._replace(notes=[*source.notes, f"left in {directory}: {some(left, _NAMED, str)}.{hint}"])
    return source, goal


def _config_at(target: Target, options: Options) -> Mapping[str, Any] | None:
    """Return the configuration in the directory of the output; None if there is none."""
    from ckptconv.formats import configs

    path = join(dirname(target.path) if target.is_file else target.path, companions.CONFIG)
    # A configuration that cannot be read is no error: this conversion neither reads nor writes it.
    return configs.known(Location(path, dict(options.storage_options)))


def _left(source: Source, target: Target, options: Options, parts: Collection[str]) -> tuple[str, list[str]]:
    """Return the directory of `source`, and the names in it that are neither read nor copied; none for an output in the
    same directory."""
    stores, path, files = dict(options.storage_options), source.path, None
    if source.family in (DEEPSPEED, DCP):
        # Files of ranks, of which some repeat others, are the format's own: only companions are named, which may lie
        # next to the file that points to the step. A store is not asked for them.
        if is_remote(path):
            return path, []
        near = companions.siblings(source, stores)
        path, files = near.directory, [name for name in near.files if name not in source.companions]
    place = Location(path, stores)
    root, output = resolved_name(path), resolved_name(target.path)
    if place.kind != "directory" or root in (output, dirname(output) if target.is_file else output):
        return path, []
    paths = [*(file.path for file in source.companions.values()), *source.pointers, target.path]
    beside = {resolved_name(path)[len(root) + 1 :] for path in paths if resolved_name(path).startswith(f"{root}/")}
    read = [name for name in source.inputs_of_all if not companions.is_companion_name(name)]
    used = {FILE_NAME} | {name.partition("/")[0] for name in (*read, *beside, *parts)}
    return path, [name for name in (place.names if files is None else files) if name not in used and name[0] != "."]


def _accompanied(source: Source, target: Target, options: Options) -> tuple[Source, Target]:
    directory = Location(target.path, dict(options.storage_options))
    origins = [origin for origin in (source.reference, source) if origin and _is_copied(origin, source, options)]
    if source.is_model and (target.is_file or not origins):
        source = source._replace(companions={}, config=None)
    if target.is_file:
        return _not_copied(source, "one file has no directory to copy to", options), target
    # A store is asked only if something is copied. Parts there remove the manifest. In the directory of the input, and
    # in that of a reference, nothing is removed.
    is_near = is_beside(target.path, [origin for origin in (source, source.reference) if origin])
    is_known = not is_near and (not is_remote(target.path) or (bool(origins) and not is_set("part", options)))
    earlier = earlier_companions(directory) if is_known else {}
    goal = target._replace(replaces=frozenset(earlier))
    if not origins and options.copy_config is None and source.quantized and source.quantized.says:
        warning = f"{source.quantized.path} was not copied: --copy-config writes it without its quantization settings."
        return source._replace(notes=[*source.notes, warning]), goal
    return (_with_companions(source, origins, directory, options, earlier) if origins else source), goal


def _is_copied(origin: Source, source: Source, options: Options) -> bool:
    """Whether the companions of `origin`, which is `source` or its reference, are to be copied."""
    if options.copy_config is None:
        is_bare = origin.component is not None or origin.stem == ADAPTER
        return origin is source.reference or stores.at(origin.path).repository or is_bare or _is_retold(source, options)
    return options.copy_config


def _is_retold(source: Source, options: Options) -> bool:
    """Whether the configuration of an output states other settings than that of `source`."""
    return any(way.retold for way in ways_of(source, options))


def _wanted(origin: Source, source: Source, options: Options) -> Collection[str]:
    """Return the names of the companions of `origin` that are copied. Without its own configuration, PEFT
    does not find an adapter: that file is copied without an option."""
    is_unasked = options.copy_config is None and origin is source and not stores.at(origin.path).repository
    return [companions.ADAPTER_CONFIG] if is_unasked and origin.stem == ADAPTER else companions.NAMES


def _with_companions(
    source: Source, origins: Sequence[Source], directory: Location, options: Options, earlier: Collection[str]
) -> Source:
    """Return `source` with the companions of `origins`; those of the first replace those of the second."""
    every = [companions.siblings(owner, directory.options, copied=_wanted(owner, source, options)) for owner in origins]
    others = [near for near in every if resolved_name(near.directory) != resolved_name(directory.path)]
    if not others:
        return _not_copied(source, "OUTPUT is the directory of the input", options)
    copies = {name: file for near in reversed(others) for name, file in near.files.items()}
    if _is_retold(source, options) or (source.quantized and source.quantized.formats):
        copies.pop(companions.QUANTIZED, None)  # it describes weights that the output does not have
    source = source._replace(warnings=[*source.warnings, *(warning for near in others for warning in near.warnings)])
    if not copies:
        places = " and ".join("the current directory" if near.directory == "." else near.directory for near in others)
        return _not_copied(source, f"{places} has no configuration, tokenizer or README", options)
    present = _present(directory)
    kept = {
        name: present[name]
        for name, file in copies.items()
        if name in present
        and name not in earlier
        and not options.overwrite
        and not _is_same(file, present[name], directory)
    }
    files = {name: file for name, file in copies.items() if name not in kept}
    if source.component is None:
        for module in pipelines.told_by(files):
            module.check_copied(source, files, directory.options)
    notes = [_copied(files, source, others)] if files else []
    source = companions.with_files(source, files, directory.options)
    if source.config is not None:
        # Weights that are like a reference have the dtype of its configuration, unless another one is requested.
        usual = "keep" if source.reference else source.defaults.dtype
        cast = options.dtype if options.dtype not in (None, "keep") else usual
        is_changed = source.quantized is not None and bool(source.quantized.formats)
        dtype = "" if cast == "keep" or is_changed else cast
        notes += companions.notes(source.config, dtype)
        source = source._replace(
            warnings=[*source.warnings, *pipelines.cast_warnings(source, dtype, directory.options)]
        )
    stays = [
        f"{file.path} was not replaced, because no earlier output wrote it: --overwrite replaces it with the input's "
        "file."
        for file in kept.values()
    ]
    return source._replace(notes=[*source.notes, *notes], warnings=[*source.warnings, *stays])


def _copied(files: Collection[str], source: Source, directories: Sequence[companions.Companions]) -> str:
    """Return the note that says which files are copied, and from where if there is a reference."""
    if source.reference is None:
        named = [join(source.folder, name) if source.folder else name for name in files]
        return f"copied for from_pretrained: {some(named, len(named), str)}"
    left, parts = list(files), []
    for near in directories:
        names = [name for name in left if name in near.files]
        left = [name for name in left if name not in names]
        parts += [f"{some(names, len(names), str)} of {near.directory}"] if names else []
    return f"copied for from_pretrained: {'; '.join(parts)}"


def earlier_companions(directory: Location) -> Mapping[str, File]:
    """Return the companions that an earlier output copied to `directory`, and that are unchanged."""
    names = [name for name in _present(directory) if companions.is_companion_name(name)]
    earlier = Directory(directory) if names else None  # a manifest may be large
    return {name: earlier.names[name].file for name in names if earlier and earlier.made_as(name)}


def _present(directory: Location) -> dict[str, File]:
    """Return the entries of `directory` by name."""
    return {name: entry.file for name, entry in directory.names.items()} if directory.kind == "directory" else {}


def _is_same(left: File, right: File, near: Location) -> bool:
    """Whether two files have the same bytes; both are reached by the options of `near`."""
    if left.size != right.size or near.at(right.path).kind != "file":
        return False
    with near.at(left).open_reader() as first, near.at(right).open_reader() as second:
        sizes = ((at, min(BLOCK, left.size - at)) for at in range(0, left.size, BLOCK))
        return all(first.read_at(*span) == second.read_at(*span) for span in sizes)


def _not_copied(source: Source, reason: str, options: Options) -> Source:
    """Return `source` with a warning that nothing is copied, if the user asked for it."""
    if not options.copy_config:
        return source
    option = "--for-hub" if options.for_hub else "--copy-config"
    return source._replace(warnings=[*source.warnings, f"{option} copies nothing: {reason}."])
