"""Files that are one of many, each with a part of a model, and the paths to give in their place.

If possible, the content of a file decides: placeholders for parameters, numbers of ranks, the shape of a matrix.
Otherwise its name decides, with the names next to it. The kinds of such files are in the modules of their formats,
which `registered.LONE` names. This module has the kinds that no format reads.

Source: vLLM's sharded_state_loader.py; TensorRT-LLM's convert_checkpoint.py; DeepSeek-V3's inference/convert.py;
torch_xla's xla_fully_sharded_data_parallel.py; fairseq's checkpoint_utils.py.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import NamedTuple

from ckptconv.errors import CkptconvError, CorruptError, UnsupportedError
from ckptconv.formats.lone_file import LoneFile
from ckptconv.formats.model_files import SAFETENSORS, SUFFIX
from ckptconv.formats.registered import Lone
from ckptconv.formats.source import Source
from ckptconv.formats.torch import SUFFIXES as TORCH_SUFFIXES
from ckptconv.plan import NUMBERED
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename
from ckptconv.storage.reading import Entry
from ckptconv.structure.record import ALONE_KEY

_HOW = "To convert only this file, use --alone."
# Names with numbers, as patterns that are compiled when a name with a number comes.
# A file of a set with an index. In diffusers, the variant, such as fp16, stands before or after the numbers.
OF_INDEX = rf".*{NUMBERED}(?:\.[\w-]+)?(?:{'|'.join(map(re.escape, (*TORCH_SUFFIXES, SUFFIX)))})"
# Files with numbers of ranks: of vLLM and SGLang, TensorRT-LLM, fairseq, DeepSeek.
_NUMBERED = (
    r"model-rank-(\d{1,6})-part-(\d{1,6})\.safetensors",
    r"(?:.*[-_.])?rank[-_]?(\d{1,6})\.safetensors",
    r".*-model_part-(\d{1,6})(?:-shard(\d{1,6}))?\.pt",
    r"model\d{1,6}-mp(?P<of>\d{1,6})\.safetensors",
)


class OfSetError(UnsupportedError):
    """A file is one of a sharded set."""


class LoneKind(NamedTuple):
    """A kind of file. `called` describes it, as the end of a sentence; `instead` says which path to give instead, with
    {} for the directory `up` levels above; `is_one` recognizes it; `error` is the class of its error. If not `refused`,
    it may be a whole model. `lies`: a file is where its program puts it. `is_written`: this program writes it."""

    called: str
    instead: str
    is_one: Callable[[LoneFile], bool]
    up: int = 1
    refused: bool = True
    error: type[CkptconvError] = UnsupportedError
    lies: Callable[[Location], bool] = lambda place: True
    is_written: bool = False


def marked(place: Location, source: Source, file: LoneFile | None, groups: Iterable[Lone], alone: bool) -> Source:
    """Return `source`, which was read from `place`. If it is one `file` of many, of a kind in `groups`, the source gets
    an error for callers that take it for a model, or, if it is taken `alone`, a note."""
    kind = _kind_of(file, groups) if file else None
    if file is None or kind is None:
        idle = f"--alone has no effect: {place} is not one file of a set."
        return source._replace(warnings=[*source.warnings, idle]) if alone else source
    described = f"{file.place} {kind.called}"
    if alone:
        remarks = {**source.remarks, ALONE_KEY: "true"}
        return source._replace(notes=[*source.notes, f"{described} Only this file was converted."], remarks=remarks)
    if ALONE_KEY in source.remarks:
        return source._replace(notes=[*source.notes, f"{file.place} was converted from one file of a set (--alone)."])
    above = functools.reduce(lambda below, _: below.parent, range(kind.up), file.place)
    # Only outputs of this program have a structure record. The files from which such an output was made lie elsewhere.
    is_elsewhere = source.family == SAFETENSORS and source.structured and not kind.is_written
    is_known = kind.lies(file.place) and not is_elsewhere
    instead = kind.instead.format(shlex.quote(above.path or ".") if is_known else "DIRECTORY")
    if not kind.refused:
        return source._replace(warnings=[*source.warnings, f"{described} {instead}"])
    error: CkptconvError = kind.error(described, f"{instead.removesuffix('.')}. {_HOW}")
    if place.kind == "directory" and not is_elsewhere and kind.error is not CorruptError:
        error = CorruptError(f"{described} {place} lacks the other files.", f"Copy or download them too. {_HOW}")
    return source._replace(weights_error=error, warnings=[*source.warnings, str(error)])


def _kind_of(file: LoneFile, groups: Iterable[Lone]) -> LoneKind | None:
    """Return the first kind of the file; None if it has none."""
    kinds = (kind for group in groups for kind in import_module(group.module).LONE)
    return next((kind for kind in kinds if kind.is_one(file)), None)


def kept_apart(source: Source, output: str) -> Source:
    """Return `source` for an `output` that may be made from one file of a sharded set if its name is that of one."""
    if not isinstance(source.weights_error, OfSetError) or not matching(OF_INDEX, basename(output)):
        return source
    return source._replace(weights_error=None, warnings=[text.removesuffix(f" {_HOW}") for text in source.warnings])


def listed(place: Location) -> Mapping[str, Entry]:
    """Return the entries of a directory; none in a store that lists no names."""
    try:
        return place.names
    except CkptconvError:
        return {}


def matching(pattern: str, name: str) -> re.Match[str] | None:
    return re.fullmatch(pattern, name) if any(map(str.isdigit, name)) else None


def is_numbered(place: Location, *patterns: str) -> bool:
    """Return whether the name of `place` shows that it is one of many: it says so; its number is not the first; or a
    name next to it differs only in numbers."""
    match = next((name_match for pattern in patterns if (name_match := matching(pattern, place.name))), None)
    if match is None:
        return False
    if "of" in match.re.groupindex:
        return int(match["of"]) > 1
    others = (name for name in listed(place.parent) if name != place.name)
    return any(int(number or 0) for number in match.groups()) or any(map(match.re.fullmatch, others))


def _of_xla(file: LoneFile) -> bool:
    metadata = file.get("shard_metadata")
    return isinstance(metadata, Mapping) and "shard_info" in metadata and metadata.get("world_size") != 1


# The kinds that no format reads.
LONE = (
    LoneKind(
        "is one file of a sharded set: its tensors are complete, but other files contain the rest of the model.",
        "Give the directory of the set, {}, or its index.",
        lambda file: is_numbered(file.place, OF_INDEX),
        error=OfSetError,
        lies=lambda place: any(name != place.name and matching(OF_INDEX, name) for name in listed(place.parent)),
        is_written=True,
    ),
    LoneKind(
        "belongs to one of several ranks of torch_xla's FSDP.",
        "Use torch_xla's consolidate_sharded_ckpts.",
        _of_xla,
    ),
    LoneKind(
        "belongs to one of several ranks.",
        "The files do not record how to join them; use the program that wrote the files.",
        lambda file: is_numbered(file.place, *_NUMBERED),
    ),
)
