"""Decides which companions of a checkpoint are copied to an output; `copying` copies them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module

from ckptconv.formats.model_files import TORCH_MODELS
from ckptconv.formats.registered import DEEPSPEED
from ckptconv.formats.source import ADAPTER, ADAPTER_CONFIG, CONFIG, STEMS, Source
from ckptconv.options.table import Options
from ckptconv.outputs.computed import ways_of
from ckptconv.outputs.kinds import is_set
from ckptconv.outputs.targets import Target, is_beside
from ckptconv.plan import Input
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename, dirname, is_remote, join
from ckptconv.storage.stores import is_repository

# Modules with `with_left`, which names files of inputs' directories that the output lacks: {module: way to compute}.
LEAVING: dict[str, str] = {
    "ckptconv.features.model_checks.left": "",
    "ckptconv.features.merge.left": "merge",
}  # fmt: skip
# The beginnings of the names of files whose tensors a configuration describes.
_DESCRIBED = (*STEMS, *(name.partition(".")[0] for name in TORCH_MODELS))
# The reason why companions stay behind that nobody has asked for.
UNASKED = "not copied without --copy-config"


def accompanied(source: Source, target: Target, options: Options, parts: Collection[str] = ()) -> tuple[Source, Target]:
    """Return `source` with the companions that are copied to `target`, and with notes and warnings about them; and
    `target` with the companions of an earlier output, which are removed. Features name the files that stay behind.

    Companions of a reference go before those of the source. `_is_copied` says whose are copied without `copy_config`.
    A file at `target` stays unless an earlier output copied it, or it is the same. `parts` are folders of others.
    """
    source, goal, stays = _accompanied(source, target, options)
    if stays.get("") == UNASKED and (origin := _directory_of_file(source, goal, options)):
        source = source._replace(notes=[*source.notes, f"not copied from {origin}: {CONFIG} ({UNASKED})."])
    if goal.replaces - source.companions.keys():
        from ckptconv.features.companions.earlier import told_of_removal

        source = told_of_removal(source, goal, options)
    directory = dirname(target.path) if target.is_file else target.path
    may_be_less = options.include or options.exclude or is_set("partial", options)
    if source.config is None and may_be_less and CONFIG not in goal.replaces:
        from ckptconv.features.configs import configs

        # A configuration that cannot be read is no error: this conversion neither reads nor writes it.
        place = Location(directory, dict(options.storage_options)).join(CONFIG)
        source = source._replace(config=configs.known(place))
    for module, way in LEAVING.items():
        if way in source.computed if way else is_directory(source, options.storage_options):
            source, goal = import_module(module).with_left(source, goal, options.storage_options, stays, parts)
    return source, goal


def _accompanied(source: Source, target: Target, options: Options) -> tuple[Source, Target, Mapping[str, str]]:
    """Return what `accompanied` does, and the reasons why companions stay behind, by name; "" for any other."""
    directory = Location(target.path, dict(options.storage_options))
    origins = [origin for origin in (source.reference, source) if origin and _is_copied(origin, source, options)]
    if source.is_model and not (target.takes_copies and origins):
        source = source._replace(companions={}, config=None)
    if not target.takes_copies:
        reason = "OUTPUT is a single file" if target.is_file else "an output of this kind contains only its own files"
        if options.asked("copy_config"):
            from ckptconv.features.companions.copying import not_copied

            source = not_copied(source, reason, options)
        return source, target, {"": reason}
    # A store is asked only if something is copied. Parts there remove the manifest. In the directory of the input, and
    # in that of a reference, nothing is removed.
    is_near = is_beside(target.path, [origin for origin in (source, source.reference) if origin])
    is_known = not is_near and (not is_remote(target.path) or (bool(origins) and not is_set("part", options)))
    earlier: Collection[str] = ()
    if is_known and directory.kind == "directory":
        from ckptconv.features.companions.earlier import copied_earlier

        earlier = copied_earlier(directory)
    goal = target._replace(replaces=frozenset(earlier))
    if origins:
        from ckptconv.features.companions.copying import with_companions

        wanted = {owner: _wanted(owner, source, options) for owner in origins}
        stays = {} if wanted.get(source, ()) is None else {"": UNASKED}
        source, unfit = with_companions(source, wanted, directory, options, earlier)
        return source, goal, {**stays, **unfit}
    return source, goal, {"": UNASKED if options.asked("copy_config") is None else "--no-copy-config"}


def _directory_of_file(source: Source, target: Target, options: Options) -> str:
    """Return the directory of a model that was given by its file or index, if its configuration lies there, and not in
    `target`; else ""."""
    directory = dirname(source.path)
    if is_remote(source.path) or is_beside(target.path, [source]) or CONFIG in source.companions:
        return ""
    is_model = basename(source.path).startswith(_DESCRIBED) and not is_directory(source, options.storage_options)
    return directory if is_model and Location(join(directory, CONFIG)).kind == "file" else ""


def _is_copied(origin: Source, source: Source, options: Options) -> bool:
    """Return whether to copy the companions of `origin`, which is `source` or its reference."""
    asked: bool | None = options.asked("copy_config")
    if asked is None:
        is_bare = origin.component is not None or origin.stem == ADAPTER
        # The output's configuration has other settings.
        is_retold = bool(source.quantized and source.quantized.says) or any(
            way.retold for way in ways_of(source, options)
        )
        is_unasked = origin is source.reference or is_repository(origin.path) or is_bare or is_retold
        return is_unasked or _is_described(source, options)
    return asked


def is_directory(source: Source, options: Mapping[str, object]) -> bool:
    """Return whether `source` is a directory. Asks no store, with its `options`, about a file that was read."""
    files = (read.file.path for read in source.inputs.values() if isinstance(read, Input))
    return source.path not in files and Location(source.path, dict(options)).kind == "directory"


def _is_described(source: Source, options: Options) -> bool:
    """Return whether `source` is a model's directory whose configuration also describes the tensors of the output."""
    is_model = source.family == DEEPSPEED or any(name.startswith(_DESCRIBED) for name in source.inputs)
    if not is_model or not is_directory(source, options.storage_options):
        return False
    place = Location(source.path, dict(options.storage_options))
    if not any(CONFIG in near.names for near in (place, *(place.at(one).parent for one in source.pointers[:1]))):
        return False
    from ckptconv.features.companions.describing import is_described

    return is_described(source, place.names, options)


def _wanted(origin: Source, source: Source, options: Options) -> Collection[str] | None:
    """Return the names of the companions of `origin` that are copied; None: all. Without its own configuration, PEFT
    does not find an adapter: that file is copied without an option."""
    is_unasked = options.asked("copy_config") is None and origin is source and not is_repository(origin.path)
    return [ADAPTER_CONFIG] if is_unasked and origin.stem == ADAPTER else None
