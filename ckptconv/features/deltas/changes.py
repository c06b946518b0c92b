"""Plans the files of a delta, and applies deltas to the tensors of a checkpoint.

The layout is that of `formats.delta`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ckptconv.errors import CorruptError, UsageError
from ckptconv.features.deltas.kernels import Overlay, Xor
from ckptconv.features.deltas.overwriting import UNIT
from ckptconv.features.deltas.reading import INDEX, OVERWRITE, XOR, ZSTD, Delta, read_delta
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs import safetensors
from ckptconv.outputs.computed import Again, Computing, From
from ckptconv.outputs.selected import Selected
from ckptconv.plan import FilePlan, Literal, identify
from ckptconv.storage.location import Location
from ckptconv.tensors.computing import Joined
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import LazyTensor, Stored, View
from ckptconv.tensors.moves import File, Packed
from ckptconv.text import some

# The only file with tensors. The authors of the layout count from 0.
_FILE = "model-00000-of-00001.safetensors"
_U8, _U16 = DTYPES["uint8"], DTYPES["uint16"]
_METHODS = {XOR: "zstandard", OVERWRITE: "overwriting"}
# By encoding: the kernel for so many changes, and the bytes of a change for each byte of the tensor.
_MADE_BY: dict[str, tuple[Callable[[int], Xor | Overlay], int]] = {
    XOR: (lambda changes: Xor(changes + 1), 1),
    OVERWRITE: (Overlay, UNIT),
}
# The most changes of encoding in a chain: each is an expression inside another.
_MOST_NESTED = 32
_APPLY_AGAIN = (
    "Apply the deltas again, into another OUTPUT, with `ckptconv patch`, and compare the two outputs with `ckptconv "
    "diff`."
)


def delta_files(
    payloads: Mapping[str, LazyTensor],
    checksums: Mapping[str, str],
    encoding: str,
    checksum: str,
    versions: tuple[int, int],
) -> tuple[FilePlan, ...]:
    """Plan the files of a delta between two versions: `payloads` by name, and `checksums` of the new tensors."""
    base_version, version = versions
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{base_version:06d}",
        "delta_encoding": encoding,
        "compression_format": ZSTD,
        "checksum_format": checksum,
    }
    index = {"metadata": metadata, "weight_map": dict.fromkeys(payloads, _FILE)}
    data = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
    listed = FilePlan(INDEX, len(data), (Literal(0, data),))
    return (safetensors.file_plan(_FILE, payloads, checksums), listed) if payloads else (listed,)


def read_chain(places: Iterable[Location]) -> list[Delta]:
    """Return the deltas in these directories. Raise the errors of `read_delta` and `check_chain`."""
    deltas = [read_delta(place) for place in places]
    check_chain(deltas)
    return deltas


def check_chain(deltas: Sequence[Delta]) -> None:
    """Raise UsageError unless each delta changes the result of the one before it, and encodings do not alternate."""
    for before, after in itertools.pairwise(deltas):
        if after.base_version != before.version:
            raise UsageError(
                f"{after.path} changes version {after.base_version:06d}, but the delta before it, {before.path}, "
                f"produces version {before.version:06d}.",
                "Give all deltas in the order in which they were written. If they are in this order, write the later "
                "deltas again, each with the next number: ckptconv diff --delta DIR --delta-version N.",
            )
    turns = sum(before.encoding != after.encoding for before, after in itertools.pairwise(deltas))
    if turns > _MOST_NESTED:
        raise UsageError(
            f"The encoding of these deltas changes {turns} times; at most {_MOST_NESTED} changes are supported.",
            "Apply some of the deltas first, then the others to that output.",
        )


def check_base(deltas: Sequence[Delta], tensors: Mapping[str, LazyTensor], aliases: Mapping[str, str]) -> None:
    """Raise CorruptError if `deltas` are for another base than `tensors`, with `aliases`, {removed: kept}."""
    for delta in deltas:
        unknown = [name for name in delta.payloads if name not in tensors and name not in aliases]
        if unknown and (key := _key_of(unknown, tensors)):
            raise UsageError(
                f"{delta.path} changes {some(unknown, 3)}, but this base has these names below {key!r}.",
                f"Use --key {key}, as in the command that wrote the delta.",
            )
        if unknown:
            raise _other_base(delta, f"lacks {some(unknown, 3)}, which the delta changes")
        for name in delta.payloads:
            kept, size = aliases.get(name), delta.sizes.get(name)
            has = tensors[name if kept is None else kept].nbytes
            if delta.encoding == XOR and size not in (None, has):
                raise _other_base(delta, f"has {has} bytes in {name!r}, but the delta is for {size} bytes")
            if kept is not None and delta.checksums.get(kept) != delta.checksums[name]:
                raise _other_base(delta, f"ties {name!r} to {kept!r}, but the delta changes them to different values")


def _key_of(unknown: Sequence[str], tensors: Collection[str]) -> str:
    """Return the key below which `tensors` have all names that are `unknown`; "" if there is none."""
    keys = (name.removesuffix(f".{unknown[0]}") for name in tensors if name.endswith(f".{unknown[0]}"))
    return next((key for key in keys if all(f"{key}.{name}" in tensors for name in unknown)), "")


def with_changes(tensor: LazyTensor, deltas: Sequence[Delta], name: str) -> LazyTensor:
    """Return `tensor` with the changes of `deltas`, in order, under `name`."""
    for delta in deltas:
        if name in delta.payloads:
            tensor = _changed(tensor, delta, name)
    return tensor


def patched_id(files: Iterable[FilePlan], deltas: Sequence[Delta], base_id: str) -> str:
    """Return the plan id of an output with `deltas` applied. Without them it is `base_id`, with the same headers."""
    applied = {
        f"{number}/{name}": identity for number, delta in enumerate(deltas) for name, identity in delta.inputs.items()
    }
    return identify(files, applied, ("patch", base_id))


def _patched(chosen: Selected, source: Source, options: Options, reference: Selected | None) -> Selected:
    """Return `chosen` with deltas applied, in order, to its stored tensors. Raise CorruptError for another base."""
    deltas: Sequence[Delta] = source.computed["patch"]
    aliases = chosen.recorded_aliases() if options.tied == "alias" else {}
    check_base(deltas, chosen.stored(aliases), aliases)
    return chosen._replace(patched=lambda name, tensor: with_changes(tensor, deltas, aliases.get(name, name)))


def _identified(files: Iterable[FilePlan], source: Source, plan_id: str) -> str:
    return patched_id(files, source.computed["patch"], plan_id)


def _again(
    source: Source, heading: Mapping[str, Any], paths: Sequence[str | None], options: Options, output: str
) -> Source:
    try:
        deltas = [read_delta(Location(path, dict(options.storage_options))) for path in paths if path]
    except UsageError as error:
        message = f"{output} was written by `ckptconv patch`, but not all of its deltas can be read. {error.message}"
        raise UsageError(message, _APPLY_AGAIN) from error
    check_chain(deltas)
    return source.computing(patch=deltas)


def _check(heading: Mapping[str, Any]) -> None:
    if not heading["deltas"] or heading["kind"] != "weights":
        raise ValueError("its deltas change nothing")


def _changed(tensor: LazyTensor, delta: Delta, name: str) -> LazyTensor:
    """Return `tensor` with the changes of `delta`."""
    size, payload = tensor.nbytes, delta.payloads[name]
    kernel, width = _MADE_BY[delta.encoding]
    packed = Packed(payload.file, payload.offset, payload.nbytes, None, _METHODS[delta.encoding])
    # The path is only for messages.
    unpacked = File(f"{payload.file.path}: the change of {name!r}", width * size, "", packed)
    change = Stored(unpacked, 0, _U8 if width == 1 else _U16, (size,), (1,))
    inner = tensor.tensor if isinstance(tensor, View) else None
    # A chain of one encoding is one expression, however long it is.
    is_next = isinstance(inner, Joined) and type(inner.kernel) is type(kernel(1))
    parts = inner.parts if isinstance(inner, Joined) and is_next else (View(tensor, _U8, (size,)),)
    whole = Joined((*parts, change), kernel(len(parts)), _U8)
    return View(whole, tensor.dtype, tensor.shape)


def _other_base(delta: Delta, why: str) -> CorruptError:
    return CorruptError(
        f"{delta.path} was written for another base: this base {why}.",
        "Give the checkpoint from which the delta was written, or also give the deltas in between.",
    )


COMPUTING = Computing(
    heading={"deltas?": [str]},
    check=_check,
    selected=_patched,
    identified=_identified,
    record=lambda source: {"deltas": [From(delta.path) for delta in source.computed["patch"]]},
    reported=lambda source: {"deltas": [delta.path for delta in source.computed["patch"]]},
    again=Again(lambda heading: heading["deltas"], ("`ckptconv patch` applied deltas", _APPLY_AGAIN), "deltas", _again),
)
