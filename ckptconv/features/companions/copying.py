"""Copies the companions of a checkpoint to an output, unless files are there that they may not replace."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ckptconv.features.companions import reading
from ckptconv.features.companions.directory import QUANTIZED
from ckptconv.features.companions.reading import Companions, companions_of
from ckptconv.formats.registered import PIPELINES, pipelines
from ckptconv.formats.source import ADAPTER_CONFIG, Source
from ckptconv.options.table import Options
from ckptconv.outputs.computed import ways_of
from ckptconv.storage.location import Location
from ckptconv.storage.paths import join, resolved_name
from ckptconv.tensors.moves import BLOCK, File
from ckptconv.text import some


def with_companions(
    source: Source,
    wanted: Mapping[Source, Collection[str] | None],
    directory: Location,
    options: Options,
    earlier: Collection[str],
) -> tuple[Source, Mapping[str, str]]:
    """Return `source` with companions, of which those of the first of their owners replace those of the second; and the
    reasons why others are not copied, by name. `wanted` has the names by owner, None for all, and `earlier` are
    those in `directory` that an earlier output copied."""
    every = [companions_of(owner, directory.options, names) for owner, names in wanted.items()]
    others = [near for near in every if resolved_name(near.directory) != resolved_name(directory.path)]
    if not others:
        return not_copied(source, "OUTPUT is the input's directory", options), {}
    copies = {name: file for near in reversed(others) for name, file in near.files.items()}
    stays = (
        dict.fromkeys(every[-1].files, f"the file in {every[0].directory} is copied instead") if len(every) > 1 else {}
    )
    stays |= {} if ADAPTER_CONFIG in copies else {ADAPTER_CONFIG: "it belongs to an adapter"}
    stays |= {name: why for near in others for name, why in near.stays.items()}
    of_others = of_other_weights(source, options)
    stays |= of_others
    copies = {name: file for name, file in copies.items() if name not in of_others}
    unfit = [
        f"{join(near.directory, name)} was not copied: {why}." for near in others for name, why in near.stays.items()
    ]
    source = source._replace(warnings=[*source.warnings, *unfit])
    if not copies:
        places = " and ".join("the input's directory" if near.directory == "." else near.directory for near in others)
        needed = "model configuration, tokenizer or README; --like REF copies these files from REF"
        return not_copied(source, f"{places} has no {needed}", options), stays
    present = {name: entry.file for name, entry in directory.names.items()} if directory.kind == "directory" else {}
    kept = {
        name: present[name]
        for name, file in copies.items()
        if name in present
        and name not in earlier
        and not options.overwrite
        and not is_same_file(file, present[name], directory)
    }
    files = {name: file for name, file in copies.items() if name not in kept}
    if source.component is None:
        for module in pipelines(files):
            module.check_copied(source, files, directory.options)
    notes = [_copied(files, source, others)] if files else []
    source = reading.with_files(source, files, directory.options)
    if source.config is not None:
        notes += reading.code_notes(source.config)
        # Weights that are like a reference have the dtype of its configuration, unless another one is requested.
        usual = "keep" if source.reference else source.defaults.dtype
        cast = options.dtype if options.dtype not in (None, "keep") else usual
        is_changed = source.quantized is not None and bool(source.quantized.formats)
        dtype = "" if cast == "keep" or is_changed else cast
        of_parts = pipelines(PIPELINES if source.component is not None else ())
        told = (text for module in of_parts for text in module.cast_warnings(source, dtype, directory.options))
        source = source._replace(warnings=[*source.warnings, *told])
    replaced = [
        f"{file.path} was not replaced, because no earlier conversion wrote it: --overwrite replaces it with the "
        "input's file."
        for file in kept.values()
    ]
    source = source._replace(notes=[*source.notes, *notes], warnings=[*source.warnings, *replaced])
    return source, {**stays, **dict.fromkeys(kept, "the file in the output directory was not replaced")}


def of_other_weights(source: Source, options: Options) -> dict[str, str]:
    """Return the names of the companions of `source` that are not for the output, each with the reason."""
    of_others = {name: why for way in ways_of(source) for name, why in way.unfit(source).items()}
    if "codes" in {way.retold for way in ways_of(source, options)} or (source.quantized and source.quantized.formats):
        of_others[QUANTIZED] = "it describes weights that the output does not contain"
    return of_others


def _copied(files: Collection[str], source: Source, directories: Sequence[Companions]) -> str:
    """Return the note that says which files are copied, and from where if there is a reference."""
    if source.reference is None:
        named = [join(source.folder, name) if source.folder else name for name in files]
        return f"copied: {some(named, len(named), str)}"
    names_of: dict[str, list[str]] = {near.directory: [] for near in directories}
    for name in files:
        names_of[next(near.directory for near in directories if name in near.files)].append(name)
    parts = [f"{some(names, len(names), str)} from {directory}" for directory, names in names_of.items() if names]
    return f"copied: {'; '.join(parts)}"


def is_same_file(left: File, right: File, near: Location) -> bool:
    """Return whether two files have the same bytes. Both are read with the options of `near`."""
    if left.size != right.size or near.at(right.path).kind != "file":
        return False
    with near.at(left).open_reader() as first, near.at(right).open_reader() as second:
        sizes = ((at, min(BLOCK, left.size - at)) for at in range(0, left.size, BLOCK))
        return all(first.read_at(*span) == second.read_at(*span) for span in sizes)


def not_copied(source: Source, reason: str, options: Options) -> Source:
    """Return `source` with a warning that nothing is copied, if the user asked for it."""
    if not options.asked("copy_config"):
        return source
    option = "--for-hub" if options.for_hub else "--copy-config"
    return source._replace(warnings=[*source.warnings, f"{option} copies nothing: {reason}."])
