"""Plans the files of a delta, and those of a checkpoint to which deltas are applied. Pure.

The layout is that of `formats.delta`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from ckptconv.errors import CorruptError, UsageError
from ckptconv.formats.delta import INDEX, OVERWRITE, XOR, ZSTD, Delta
from ckptconv.outputs import safetensors
from ckptconv.outputs.planning import Output
from ckptconv.outputs.targets import seen_from
from ckptconv.plan import Data, FilePlan, Literal, Plan, identify
from ckptconv.storage.overwriting import UNIT
from ckptconv.tensors.computing import Overlay, Xor
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Joined, LazyTensor, Stored, View
from ckptconv.tensors.moves import File, Packed
from ckptconv.text import some

# The only file with tensors: the authors of the layout count from 0.
_FILE = "model-00000-of-00001.safetensors"
_U8, _U16 = DTYPES["uint8"], DTYPES["uint16"]
_METHODS = {XOR: "zstandard", OVERWRITE: "overwriting"}
# By encoding: the kernel for so many changes, and the bytes of a change for each byte of the tensor.
_MADE_BY: dict[str, tuple[Callable[[int], Xor | Overlay], int]] = {
    XOR: (lambda changes: Xor(changes + 1), 1),
    OVERWRITE: (Overlay, UNIT),
}
# Changes between encodings in a chain: each is an expression inside another.
_MOST_NESTED = 32


def delta_files(
    payloads: Mapping[str, LazyTensor], checksums: Mapping[str, str], encoding: str, checksum: str, version: int
) -> tuple[FilePlan, ...]:
    """Plan the files of a delta from version `version` - 1: `payloads` by name, and `checksums` of the new tensors."""
    told = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": ZSTD,
        "checksum_format": checksum,
    }
    index = {"metadata": told, "weight_map": dict.fromkeys(payloads, _FILE)}
    data = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
    listed = FilePlan(INDEX, len(data), (Literal(0, data),))
    return (safetensors.file_plan(_FILE, payloads, checksums), listed) if payloads else (listed,)


def check_chain(deltas: Sequence[Delta]) -> None:
    """Raise UsageError unless each delta changes what the one before makes, and the encodings do not alternate."""
    for before, after in itertools.pairwise(deltas):
        if after.base_version != before.version:
            raise UsageError(
                f"{after.path} changes version {after.base_version:06d}, and {before.path}, which comes before it, "
                f"makes version {before.version:06d}.",
                "Give the deltas in the order in which they were made, and none left out.",
            )
    turns = sum(before.encoding != after.encoding for before, after in itertools.pairwise(deltas))
    if turns > _MOST_NESTED:
        raise UsageError(
            f"The encoding of these deltas changes {turns} times, and {_MOST_NESTED} is the most.",
            "Apply the first of them, and the others to what that gives.",
        )


def check_base(deltas: Sequence[Delta], tensors: Mapping[str, LazyTensor], aliases: Mapping[str, str]) -> None:
    """Raise CorruptError if `deltas` are for another base than `tensors`, with `aliases`, {removed: kept}."""
    for delta in deltas:
        unknown = [name for name in delta.payloads if name not in tensors and name not in aliases]
        if unknown:
            raise _other_base(delta, f"has no {some(unknown, 3)}, which the delta changes")
        for name in delta.payloads:
            kept, size = aliases.get(name), delta.sizes.get(name)
            has = tensors[name if kept is None else kept].nbytes
            if delta.encoding == XOR and size not in (None, has):
                raise _other_base(delta, f"has {has} bytes in {name!r}, of which the delta changes {size}")
            if kept is not None and delta.checksums.get(kept) != delta.checksums[name]:
                raise _other_base(delta, f"ties {name!r} to {kept!r}, which the delta makes different")


def with_changes(tensor: LazyTensor, deltas: Sequence[Delta], name: str) -> LazyTensor:
    """Return `tensor` with what `deltas`, in order, change under `name`."""
    for delta in deltas:
        if name in delta.payloads:
            tensor = _changed(tensor, delta, name)
    return tensor


def patched_id(files: Iterable[FilePlan], deltas: Sequence[Delta], base_id: str) -> str:
    """Return the plan id of an output with `deltas` applied. Without them it is `base_id`, and has the same headers."""
    applied = {f"{number}/{name}": each for number, delta in enumerate(deltas) for name, each in delta.inputs.items()}
    return identify(files, applied, ("patch", base_id))


def patched(output: Output, deltas: Sequence[Delta]) -> Output:
    """Return the plan of `output` with `deltas` applied in order. Raise CorruptError if they are for another base."""
    parts = (part for file in output.plan.files for part in file.parts if isinstance(part, Data))
    check_base(deltas, {part.name: part.tensor for part in parts}, output.aliases)
    files = tuple(
        file._replace(
            parts=tuple(
                part._replace(tensor=with_changes(part.tensor, deltas, part.name)) if isinstance(part, Data) else part
                for part in file.parts
            ),
        )
        for file in output.plan.files
    )
    plan_id = patched_id(files, deltas, output.plan.plan_id)
    applied_from = [seen_from(output.target, delta.path) for delta in deltas]
    heading = {**output.heading, "plan": plan_id, "deltas": applied_from}
    applied = tuple(delta.path for delta in deltas)
    return output._replace(plan=Plan(files, plan_id), heading=heading, deltas=applied)


def _changed(tensor: LazyTensor, delta: Delta, name: str) -> LazyTensor:
    """Return `tensor` with what `delta` changes in it."""
    size, payload = tensor.nbytes, delta.payloads[name]
    made, width = _MADE_BY[delta.encoding]
    packed = Packed(payload.file, payload.offset, payload.nbytes, None, _METHODS[delta.encoding])
    # Its path is for messages.
    unpacked = File(f"{payload.file.path}: the change of {name!r}", width * size, "", packed)
    change = Stored(unpacked, 0, _U8 if width == 1 else _U16, (size,), (1,))
    inner = tensor.tensor if isinstance(tensor, View) else None
    # A chain of one encoding is one expression, however long it is.
    is_next = isinstance(inner, Joined) and type(inner.kernel) is type(made(1))
    parts = inner.parts if isinstance(inner, Joined) and is_next else (View(tensor, _U8, (size,)),)
    whole = Joined((*parts, change), made(len(parts)), _U8)
    return View(whole, tensor.dtype, tensor.shape)


def _other_base(delta: Delta, why: str) -> CorruptError:
    return CorruptError(
        f"{delta.path} is for another base: this one {why}.",
        "Give the checkpoint that it was made from, or the deltas in between.",
    )
