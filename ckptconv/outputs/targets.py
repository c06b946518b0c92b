"""Determine the places of outputs: the meaning of an output's name, and whether it may be written to."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from ckptconv.errors import FailedError, UsageError
from ckptconv.formats import model_files
from ckptconv.formats.run_names import POINTERS, TREES
from ckptconv.formats.source import ADAPTER, MODEL, STEMS, Source
from ckptconv.formats.torch import SUFFIXES as TORCH_SUFFIXES
from ckptconv.options.option import former_given
from ckptconv.options.registered import several
from ckptconv.options.table import OPTIONS, Options
from ckptconv.outputs.kinds import (
    CHECKPOINTS,
    DIRECTORY_KINDS,
    KINDS,
    NAMED,
    entry_of,
    flag,
    further,
    is_set,
    kind_by_suffix,
    kind_of,
    option_for,
)
from ckptconv.plan import NUMBERED
from ckptconv.process import needed
from ckptconv.storage import stores
from ckptconv.storage.files import look
from ckptconv.storage.handles import HIDDEN, resolved
from ckptconv.storage.location import Location
from ckptconv.storage.paths import dirname, is_remote, join, normalize, real_place, resolved_name
from ckptconv.text import Proposed, reason, some

MANIFEST = f"{HIDDEN}manifest.json"
# The feature that stages directories of a form of `TREES`, and decides what they replace: `staging` and `replacing`.
TREE_FEATURE = "trees"
# Names of the files of an output, as a pattern. A new output replaces those that an earlier one left.
_OUTPUT_NAMES = {
    stem: rf"{stem}({NUMBERED})?\.safetensors|{stem}\.safetensors\.index\.json|"
    rf"ckptconv\.structure\.json|{re.escape(MANIFEST)}"
    for stem in STEMS
}


def is_output_name(name: str) -> bool:
    """Return whether an output may have a file of this name."""
    return any(_is_output_of(stem, name) for stem in _OUTPUT_NAMES)


def _is_output_of(stem: str, name: str) -> bool:
    return re.fullmatch(_OUTPUT_NAMES[stem], name) is not None


class Directory(NamedTuple):
    """A kind of output directory: the file that makes it complete, which gets its name last, and a predicate of the
    names that its own files can have. `copies`: files of the source may be copied to it. `shards`: the endings of names
    of files that are not small."""

    last: str
    is_file: Callable[[str], bool]
    copies: bool = False
    shards: tuple[str, ...] = (model_files.SUFFIX,)


# The forms of directories whose files have a library's own names, by the prefix of these names.
FORMS = {stem: stem for stem in STEMS} | {MODEL: "directory", ADAPTER: "adapter"}
# Kinds of directories by the form of an output: see `Target.form`. For a feature's, the module with its `DIRECTORY`.
DIRECTORIES: Mapping[str, Directory | str] = {
    **{
        form: Directory(f"{stem}{model_files.INDEX_SUFFIX}", functools.partial(_is_output_of, stem), copies=True)
        for stem, form in FORMS.items()
    },
    **{form: kind.module for form, kind in DIRECTORY_KINDS.items()},
}


def directory_of(form: str) -> Directory | None:
    """Return the kind of directory of an output of this form; None if it is no directory, or a whole tree."""
    return kind_of_directory(form) if form in DIRECTORIES else None


def kind_of_directory(form: str) -> Directory:
    """Return the kind of directory of an output of this form, one of `DIRECTORIES`."""
    known = DIRECTORIES[form]
    directory: Directory = import_module(known).DIRECTORY if isinstance(known, str) else known
    return directory


# The ending of a file's name; a name with a number or a version, such as llama-3.1-8b and run.v2, may be a directory's.
ENDING = re.compile(r"(?<=[^/.])\.(?!v?\d)\w+$")
CHECKPOINT_SUFFIXES = (*TORCH_SUFFIXES, ".json", ".distcp", ".pkl")
# No directory of files that ranks load together ends so. Lightning's end in .ckpt.
_FILE_SUFFIXES = (model_files.SUFFIX, *(suffix for suffix in CHECKPOINT_SUFFIXES if suffix != ".ckpt"))


# Names of the streams and descriptors of this process.
_STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/self/fd/")
_NAMED = "Give the name of a file or a directory."
_STATES = "Give --states PATH."


class Target(NamedTuple):
    """The place of an output, and which of `KINDS` it is.

    `replaces` are files in the directory that an earlier output has copied there; the names of its own begin with
    `stem`. `left` are files of the input's directory that it does not have, {path: reason}. It is cut like `layout` if
    a feature gives one, which has the paths of the files that it was read from as `behind`. `options` are its own, if
    they are others than those of the conversion. `proposed` is its path if the user did not type it as OUTPUT.
    """

    path: str
    kind: str
    replaces: frozenset[str] = frozenset()
    left: Mapping[str, str] = {}
    layout: Any = None
    options: Options | None = None
    stem: str = MODEL
    proposed: Proposed | None = None

    @property
    def holds(self) -> str:
        """The word of manifests for its content."""
        return entry_of(self.kind).holds

    @property
    def form(self) -> str:
        """The form of the output on a disk: "file", one of `TREES`, or of `DIRECTORIES`."""
        form = entry_of(self.kind).form
        return FORMS[self.stem] if form == "directory" else form

    @property
    def is_file(self) -> bool:
        return self.form == "file"

    @property
    def is_tree(self) -> bool:
        """Whether the output is a directory that is replaced as a whole."""
        return self.form in TREES

    @property
    def last(self) -> str:
        """The file of a directory that makes it complete, and comes last; "" for other outputs."""
        directory = directory_of(self.form)
        return directory.last if directory else ""

    @property
    def takes_copies(self) -> bool:
        """Whether files of the source may be copied to the output."""
        directory = directory_of(self.form)
        return directory is not None and directory.copies

    def final(self, name: str) -> str:
        """Return the final path of one of its files."""
        return final_path(self.path, self.form, name)


def of_trees(name: str, path: str) -> Any:
    """Return the module `name` of the feature that publishes directories as a whole, such as `path`. Raise UsageError
    if it is missing."""
    return needed(TREE_FEATURE, name, f"{path}: this output")


def pointer_of(directory: str, form: str = "tree") -> str:
    """Return the path of the file next to a `directory` of a form of `TREES`, which names it."""
    above, name = dirname(directory), TREES[form]
    return name if above == "." and not directory.startswith("./") else join(above, name)


def final_path(path: str, form: str, name: str) -> str:
    """Return the final path of the file `name` of an output at `path`, which has the form `form` (`Target.form`)."""
    if TREES.get(form) == name:
        return pointer_of(path, form)
    return path if form == "file" else join(path, name)


def targets_of(named: Mapping[str, str], options: Options) -> list[Target]:
    """Return the targets of outputs, `named` by their content. Raise UsageError if one cannot be put there."""
    entry = entry_of(options.to) if options.to in DIRECTORY_KINDS else None
    if entry and entry.check:
        entry.check(options)
    if not entry or not entry.divided:
        return [_resolve(holds, path, options) for holds, path in named.items()]
    path = normalize(named["weights"])
    check_directory(Location(path, dict(options.storage_options)), options.to)
    parts = entry.divided(path, options)
    return [resolve_output(name, half)._replace(kind=options.to, options=half) for name, half in parts.items()]


def named_outputs(output: str | None, options: Options) -> tuple[dict[str, str], Options]:
    """Return the path of each output that has a name, by its content, and the options of all of them: `to` is left if
    the name does not say it. Raise UsageError for options that contradict the name, or one another."""
    to = options.to
    if to:
        _check_alone(output, options)
    if to in CHECKPOINTS and options.optimizer:
        if options.states:
            raise UsageError(f"With --to {to}, --optimizer and --states are the same option.", "Leave --optimizer out.")
        former_given("--optimizer", OPTIONS["states"])
        options = options.replaced(states=options.optimizer, optimizer="")
    if to and to not in CHECKPOINTS and output is not None:
        _check_said(output, to)
        if option := option_for(to):
            options = options.replaced(**{option: Proposed(output, "Give another OUTPUT, or --overwrite.")})
            output = None
        if output is None or kind_of(output) in NAMED[to]:
            options = options.replaced(to="")
    return {**({} if output is None else {"weights": output}), **further(options)}, options


def _check_alone(output: str | None, options: Options) -> None:
    """Raise UsageError for a kind of output that needs a name and has none, or that is requested with another."""
    others = further(options)
    if KINDS[NAMED[options.to][0]].holds == "weights":
        if output is None and others:
            raise UsageError(f"--to {options.to} specifies the kind of OUTPUT, but OUTPUT is missing.", "Give it.")
        return
    if output is None:
        called = entry_of(NAMED[options.to][0]).called or f"--to {options.to}"
        raise UsageError(f"{called[0].upper()}{called[1:]} requires a directory as OUTPUT.")
    for option in others.keys() - {"optimizer"}:
        raise UsageError(f"--to and {flag(option)} request two different outputs.", "Run one conversion for each.")


def _check_said(path: str, to: str) -> None:
    """Raise UsageError if the name of an output implies another kind than `to`."""
    said, ending = kind_by_suffix(path), os.path.splitext(path)[1]
    if said and said not in NAMED[to]:
        raise UsageError(
            f"{path} ends in {ending}, but --to {to} specifies another kind of output.",
            f"Leave --to out, or give a name that does not end in {ending}.",
        )


def _resolve(holds: str, path: str, options: Options) -> Target:
    """Return the target of an output that `holds` weights, optimizer states or a training. Raise UsageError if it
    cannot be put at `path`."""
    path = normalize(path)
    if holds != "weights" and not isinstance(path, Proposed):
        path = Proposed(path, f"Give another path to --{holds}, or --overwrite to replace it.")
    if holds in KINDS:
        return _resolve_tree(path, holds, options)
    if holds == "weights":
        return resolve_output(path, options)
    target = resolve_output(path, options.replaced(to=""))
    return target._replace(kind=kind_of_states(path, target.kind))


def kind_of_states(path: str, kind: str) -> str:
    """Return the kind of optimizer states whose weights would be of `kind`. Raise UsageError if there is none."""
    if kind in ("file", "directory"):
        return "states-file" if kind == "file" else "states"
    raise UsageError(
        f"{path} is the name of {entry_of(kind).called}, but optimizer states are written as safetensors.",
        "Give a directory, or a name that ends in .safetensors.",
    )


def resolve_output(path: str, options: Options) -> Target:
    """Return the target of the output of weights at `path`. Raises UsageError if no kind of output can be there."""
    if not path:
        raise UsageError("OUTPUT is empty.", "Give a directory, or a name that ends in .safetensors.")
    check_place(path, options.storage_options)
    place = Location(path, dict(options.storage_options))
    entry = place.entry
    if options.to in DIRECTORY_KINDS:
        check_directory(place, options.to)
        return Target(place.path, options.to, proposed=_proposed(place.path))
    if options.to and not kind_by_suffix(path):
        return _resolve_unsaid(place, options)
    kind, is_restored = kind_of(path), options.family == model_files.SAFETENSORS
    if kind == "torch" and not is_restored and options.family:
        kind = "directory"
    is_file = entry_of(kind).form == "file"
    if is_restored and kind != "torch":
        raise UsageError(f"{path} is not a name for a PyTorch file.", "Give one that ends in .pt, .pth, .bin or .ckpt.")
    if is_file and entry.kind == "directory" and not is_remote(path):
        raise UsageError(
            f"{path} is a directory, but a name that ends in {os.path.splitext(path)[1]} specifies a file.",
            "Choose another name.",
        )
    # A directory with such a suffix needs a final slash.
    if not is_file and (entry.kind == "file" or path.endswith(CHECKPOINT_SUFFIXES)):
        raise _an_input(path) if entry.kind == "file" and path.endswith(CHECKPOINT_SUFFIXES) else not_a_directory(path)
    if not is_file and entry.kind != "directory" and (ending := ENDING.search(path)):
        from ckptconv.options.words import instead_of

        instead = instead_of(ending[0]) or f"Did you mean {path[: ending.start()]}{model_files.SUFFIX}?"
        raise UsageError(
            f"{path} ends in {ending[0]}, which no output has: a file ends in {model_files.SUFFIX}, or for torch.load "
            f"in {some(TORCH_SUFFIXES, form=str)}.",
            f"{instead} For a directory of that name, give {path}/",
        )
    if is_file:
        _check_above(path)
    return Target(path, kind, proposed=_proposed(path))


def _check_above(path: str) -> None:
    """Raise UsageError if there is no directory for a file; stores have none that must exist."""
    above = dirname(path)
    kind = "directory" if is_remote(path) else look(above).kind
    if kind == "missing":
        advice = "The shell did not expand the ~. Leave out quotes." if path[0] == "~" else "Create it (mkdir -p)."
        raise UsageError(f"{path} cannot be written: the directory {above} does not exist.", advice)
    if kind != "directory":
        raise UsageError(f"{path} cannot be written: {above} is not a directory.", "Choose another OUTPUT.")


def _resolve_unsaid(place: Location, options: Options) -> Target:
    """Return the target of a file whose kind `to` gives, and its name does not. It replaces no file that is not known
    to be such an output."""
    path, kind = place.path, NAMED[options.to][0]
    if path.endswith(("/", *CHECKPOINT_SUFFIXES)) or place.kind == "directory":
        called = "a directory" if path.endswith("/") or place.kind == "directory" else "the name of another output"
        raise UsageError(
            f"{path} is {called}, but --to {options.to} writes one file.",
            f"Give a name that ends in {some(KINDS[kind].suffixes, form=str)}.",
        )
    _check_above(path)
    return Target(path, kind, proposed=Proposed(path, "Give another OUTPUT, or --overwrite to replace it."))


def _resolve_tree(path: str, kind: str, options: Options) -> Target:
    """Return the target of a directory that is replaced as a whole. Raise UsageError if none can be written there."""
    check_place(path, options.storage_options)
    if is_remote(path) and "/" not in path.partition("://")[2].rstrip("/"):
        raise UsageError(f"{path} cannot be the output: a file is written next to it.", f"Give a directory in {path}.")
    return Target(real_place(path), kind, proposed=_proposed(path))


def check_directory(place: Location, to: str) -> None:
    """Raise UsageError for the place of a directory that is a file, or named so, if `to` asks for a directory."""
    path = place.path
    if to in DIRECTORY_KINDS and (place.kind not in ("directory", "missing") or path.endswith(_FILE_SUFFIXES)):
        raise UsageError(
            f"{path} is a file name, but {entry_of(to).called} is a directory.",
            "Give the name of a directory.",
        )


def _proposed(path: str) -> Proposed | None:
    return path if isinstance(path, Proposed) else None


def check_file(path: str, option: str, storage_options: Mapping[str, Any]) -> None:
    """Raise UsageError if the file that `option` names cannot be written. Call it before an output gets its name."""
    check_place(path, storage_options, option)
    if is_remote(path):
        return
    if look(path).kind == "directory":
        raise UsageError(f"{option} {path} is a directory, but the output is a file.")
    if look(dirname(path)).kind != "directory":
        raise UsageError(
            f"{option} {path} cannot be written: the directory {dirname(path)} does not exist.",
            "Create it first.",
        )


def check_place(path: str, storage_options: Mapping[str, Any], option: str = "") -> None:
    """Raise an error if no file can be put at `path`, an output or a path in `option`, by a rename: a pipe or a device
    there would be gone. Raise UnsafeError if a stranger's link is on the way."""
    called = f"{option} {path}".lstrip()
    if is_remote(path):
        stores.reached(path).check_writable(path, storage_options)
    elif path == "-" or path.startswith(_STREAMS):
        raise UsageError(f"ckptconv does not write to stdout: {option or 'OUTPUT'} cannot be {path}.", _NAMED)
    elif look(resolved(path)).kind == "other":
        raise UsageError(f"{called} is a pipe or a device, but outputs are renamed to their final names.", _NAMED)
    else:
        try:
            os.lstat(path)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise FailedError(f"{called} cannot be written: {reason(error)}.", "Choose a shorter name.") from error


def files_behind(source: Source) -> list[str]:
    """Return the paths of the files from which `source` was read, and of those that point to it; some may not exist."""
    within = _within(source)
    named = [] if within == source.path else [source.path]
    beside = [join(place, name) for place in (within, dirname(within.rstrip("/"))) for name in POINTERS]
    copies = [file.path for file in source.training.copies] if source.training else []
    is_ours = source.family == model_files.SAFETENSORS
    listed: list[str] = []
    if (source.shards or is_ours) and not is_remote(within):
        with contextlib.suppress(OSError):
            listed = os.listdir(within)
    # Beside shards of torch, an index with our name belongs to an earlier output.
    indices = [
        join(within, name) for name in listed if name.endswith(".index.json") and (is_ours or not is_output_name(name))
    ]
    return [*named, *source.shards, *indices, *named_inputs(source), *copies, *source.pointers, *beside]


def named_inputs(source: Source) -> list[str]:
    """Return the paths of the files that identify `source`."""
    within = _within(source)
    return [join(within, name) for name in source.inputs_of_all]


def _within(source: Source) -> str:
    """Return the directory that a source is, or that contains it."""
    is_directory = not is_remote(source.path) and os.path.isdir(source.path)
    return source.path if is_directory else dirname(source.path)


def is_beside(path: str, sources: Iterable[Source]) -> bool:
    """Return whether the directory `path` is that of one of the `sources`."""
    read = [source.path for source in sources if is_remote(source.path) or os.path.lexists(source.path)]
    return resolved_name(path) in map(resolved_name, (*read, *map(dirname, read)))


def seen_from(target: Target, path: str) -> str:
    """Return the path of a checkpoint as the manifest of an output at `target` records it: unchanged if it is a URL,
    else relative to the output's directory; "" if only the output is a URL."""
    if is_remote(path):
        return path
    return "" if is_remote(target.path) else os.path.relpath(os.path.realpath(path), _directory_of(target))


def seen_path(output: str, path: str) -> str:
    """Return the path that `seen_from` gave for an output at the path `output`."""
    return path if is_remote(path) else os.path.normpath(join(_directory_of(Target(output, kind_of(output))), path))


def _directory_of(target: Target) -> str:
    return os.path.realpath(dirname(target.path) if target.is_file else target.path)


def check_spool(directory: str) -> None:
    """Raise UsageError if `directory` cannot hold spooled data, whether or not any will be spooled; UnsafeError if a
    stranger's link is on the way."""
    if directory and not os.path.isdir(resolved(directory)):
        raise UsageError(f"--spool-dir {directory} is not a directory.", "Create it first.")


def not_a_directory(path: str) -> UsageError:
    stem = os.path.splitext(path)[0]
    hint = f"Did you mean {stem}.safetensors? For a file for torch.load: ckptconv convert INPUT {stem}.pt"
    if path.endswith(model_files.INDEX):
        hint = "An index is written together with its shards: ckptconv convert INPUT DIR --max-shard-size SIZE"
    return UsageError(
        f"{path} looks like a file name, but this command writes a directory unless OUTPUT ends in .safetensors.", hint
    )


def _an_input(path: str) -> UsageError:
    """Return the error for a checkpoint given as OUTPUT.

    It proposes no name made from the checkpoint's: that would suggest that the checkpoint had been converted.
    """
    return UsageError(
        f"{path} is an existing checkpoint, but was given as OUTPUT.",
        f"{several('To convert several inputs: {}. ')}This command writes a directory, or a file whose name ends in "
        ".safetensors; ckptconv convert also writes .pt files.",
    )


def of_part(target: Target, source: Source, options: Options) -> Target:
    """Return the target of one of several sources: OUTPUT/mp_rank_NN of a tensor-parallel rank, and in a pipeline of
    diffusers OUTPUT/unet, for example."""
    if source.model_rank is None and source.component is None:
        return target
    if source.component is not None and target.kind != "directory":
        raise UsageError(
            f"{target.path} cannot store a diffusers pipeline, which requires a directory of safetensors.",
            "Give a directory, or convert a single model of the pipeline.",
        )
    if source.component is not None and is_set("part", options):
        raise UsageError(
            "--part divides one output, but a diffusers pipeline becomes one output per model.",
            "Convert the models one by one.",
        )
    if target.is_file or target.is_tree:
        kind = "one file" if target.is_file else "one checkpoint"
        raise UsageError(f"{target.path} is {kind}, but --per-rank writes one directory per rank.")
    if not source.folder:
        return target
    path = join(target.path, source.folder)
    # A file that exists there is checked like that of any output.
    return target._replace(path=resolve_output(path, options).path)


def nearest_directory(path: str) -> str:
    """Return the nearest existing directory at or above a path; "" if that is remote, or ""."""
    directory = "" if is_remote(path) else path and os.path.realpath(path)
    while directory and not os.path.isdir(directory):
        directory = os.path.dirname(directory)
    return directory
