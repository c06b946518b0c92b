"""The manifest of an output, and the records of its finished files. Pure.

A manifest is deterministic: the same input and options give the same bytes, on any machine. It contains no absolute
path and no time. Schema: {"ckptconv": version, "plan": id, "kind": "weights" | "optimizer" | "universal" | "dcp",
"source": {"format", "family", "model_rank"?, "inputs": {relative name: {"size", "identity"}}}, "options": {name: value,
where it is not the default}, "aliases": {removed: kept}, "like"?: the reference, relative to the output's directory or
a URL, "" where neither tells, "deltas"?: [the deltas that were applied, likewise], "map"?: the record of the map,
"dequantized"?: {format: number of weights}, "quantized"?: likewise, "average"?: {"terms": [the checkpoints that were
added up, likewise, null for the source], "weights": [number], "over": number, "minus"?: true}, "adapters"?: [the
adapters that were merged, likewise], "adapter"?: which of several in each, "digest"?: "sha256" | "blake3", "files":
{name: {"size", "digests"?: {"file": in hex, "tensors": {name: in hex}}, "tensors": {name: CRC-32 in hex, or null where
none was computed}}}}. Files have digests if "digest" tells by which algorithm.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptconv.plan import Copied, Data, FilePlan, Literal, Trailer
from ckptconv.publish.staging.base import FinishedFile

if TYPE_CHECKING:
    from ckptconv.storage.digests import Digests

# At most so many bytes are read.
MOST_DESCRIPTION = 32 << 20


def document(head: Mapping[str, Any], files: Mapping[str, FinishedFile]) -> bytes:
    """Return the manifest of an output: the entries of `head`, then `files` by name."""
    out = io.BytesIO()
    out.write(b"{\n")
    for key, value in head.items():
        out.write(f" {json.dumps(key)}: {json.dumps(value, sort_keys=True)},\n".encode())
    out.write(b' "files": {')
    for number, (name, finished) in enumerate(files.items()):
        start = "," if number else ""
        out.write(f'{start}\n  {json.dumps(name)}: {{"size": {finished.size}, '.encode())
        if finished.digests:
            out.write(f'"digests": {{"file": "{finished.digests.file}", "tensors": {{'.encode())
            for index, tensor in enumerate(finished.crcs):
                digest = finished.digests.tensors[tensor]
                out.write(f'{"," if index else ""}\n   {json.dumps(tensor)}: "{digest}"'.encode())
            out.write(b"}}, ")
        out.write(b'"tensors": {')
        for index, (tensor, crc) in enumerate(finished.crcs.items()):
            value = "null" if crc is None else f'"{crc:08x}"'
            out.write(f"{',' if index else ''}\n   {json.dumps(tensor)}: {value}".encode())
        out.write(b"\n  }}" if finished.crcs else b"}}")
    out.write(b"\n }\n}\n")
    return out.getvalue()


def together(documents: Sequence[bytes]) -> bytes:
    """Return one manifest for all outputs of a conversion: the only document, or {"outputs": [each document]}."""
    return documents[0] if len(documents) == 1 else b'{"outputs": [\n' + b",\n".join(documents) + b"]}\n"


# ------------------------------------------------------------------------------------------------- records of files


def spans(file: FilePlan, crcs: Mapping[str, int] | None) -> Iterator[tuple[int, int, int | None, str | None]]:
    """Yield the parts of `file`: offset, size in bytes, CRC-32 if known, and the name of the tensor, if it is one."""
    for part in file.parts:
        if isinstance(part, Data):
            yield part.offset, part.nbytes, None if crcs is None else crcs.get(part.name, 0), part.name
        elif isinstance(part, Literal):
            yield part.offset, part.nbytes, zlib.crc32(part.data), None
        elif isinstance(part, Trailer):
            yield part.offset, part.nbytes, None if crcs is None else zlib.crc32(part.make(crcs)), None
        elif isinstance(part, Copied):
            yield part.offset, part.nbytes, None, None


def record(file: FilePlan, crcs: Mapping[str, int] | None, digests: Digests | None, facts: Mapping[str, Any]) -> bytes:
    """Return the record that `file` is finished. `facts` identify the file later."""
    out = io.BytesIO()
    extra = {"digests": vars(digests)} if digests else {}
    out.write(json.dumps({"name": file.name, "size": file.size, **extra, **facts})[:-1].encode())
    out.write(b', "spans": [')
    for number, (at, size, crc, name) in enumerate(spans(file, crcs)):
        out.write(f"{',' if number else ''}[{at},{size},{json.dumps(crc)},{json.dumps(name)}]".encode())
    out.write(b"]}")
    return out.getvalue()
