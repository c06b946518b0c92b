"""Checks descriptions of parts, records of files and manifests before anything uses them. Pure.

They are read from directories to which others may have written, or which came with a download. Anything that we would
not write raises ValueError, whose text says what is wrong with "it".
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptconv.formats.source import DIFFUSERS, MODEL
from ckptconv.plan import NUMBERED
from ckptconv.storage import strict_json
from ckptconv.storage.digests import ALGORITHMS
from ckptconv.storage.strict_json import count_of, list_of, object_of, text_of

if TYPE_CHECKING:
    from ckptconv.outputs.targets import Directory

# At most so many bytes are read. A record has a line for every tensor of a file.
MOST_DESCRIPTION, MOST_RECORD = 32 << 20, 256 << 20
MOST_PARTS = 10**9 - 1

# A plan id, and the CRC-32 of a tensor as written in a manifest.
PLAN = re.compile(r"[0-9a-f]{16}")
_CRC = re.compile(r"[0-9a-f]{8}")
# A digest of one of `ALGORITHMS`: each has 32 bytes.
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SHARD = re.compile(rf"(?:{MODEL}|{DIFFUSERS}){NUMBERED}\.safetensors")
# Names in staging directories that are not output files.
_OF_STAGING = re.compile(
    r"\.(lock|plan\.json|published\.json|ckptconv-manifest\.json)|\.record-[0-9a-f]{16}(\.[0-9a-f]+)?"
)


@dataclass(frozen=True)
class Description:
    """What `finish` must know of a plan.

    `kind` is that of the output, as `Target.form` has it. The files were assigned to `parts` parts with `shift`,
    as in `publish.parts.assign`. `heading` is that of the manifest. `files` are (name, size in bytes, number of
    tensors). `inputs` are what it is made of: [path, size in bytes, stamp] by name.
    """

    plan_id: str
    kind: str
    parts: int
    shift: int
    heading: dict[str, Any]
    files: list[tuple[str, int, int]]
    inputs: dict[str, list[Any]]


def parse_json(data: bytes) -> Any:
    """Parse JSON whose objects have no key twice. Raises ValueError for anything else.

    File names that are not UTF-8 contain halves of surrogate pairs.
    """
    try:
        return strict_json.parse(data.decode(), surrogates=True)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None


def description(data: bytes, plan_id: str, kinds: Collection[str], directories: Mapping[str, Directory]) -> Description:
    """Parse the description of a plan, read from a staging directory of `plan_id`, of an output of one of `kinds`.

    `directories` are the kinds that are directories, with the names that their files may have.
    """
    told = object_of(parse_json(data), "it", {"plan", "kind", "parts", "shift", "heading", "files"}, {"inputs"})
    kind = text_of(told["kind"], "its kind")
    if told["plan"] != plan_id or kind not in kinds:
        raise ValueError(f"it is not of the plan {plan_id}, or of another kind of output than {' or '.join(kinds)}")
    if not PLAN.fullmatch(plan_id):
        raise ValueError("its plan is none")
    parts, shift = count_of(told["parts"], "its number of parts", MOST_PARTS), count_of(told["shift"], "its shift")
    if not parts:
        raise ValueError("it has no parts")
    check_heading(told["heading"])
    if told["heading"]["plan"] != plan_id:
        raise ValueError("its heading is of another plan")
    rows = told["files"]
    if type(rows) is not list or not rows:
        raise ValueError("it names no files")
    files = []
    for row in rows:
        if type(row) is not list or len(row) != 3:
            raise ValueError("one of its files is not described by name, size and tensors")
        name = text_of(row[0], "the name of a file")
        files.append((name, count_of(row[1], f"the size of {name!r}"), count_of(row[2], f"the tensors of {name!r}")))
    names = [name for name, _, _ in files]
    check_names(names)
    if kind == "file" and len(names) != 1:
        raise ValueError(f"it has {len(names)} files, and the output is one")
    if kind != "tree":
        for name in names:
            if "/" in name or (kind in directories and not directories[kind].may_have(name)):
                raise ValueError(f"{name!r} is not the name of a file of such an output")
    if kind == "directory":
        _check_shards(names, directories[kind].last, gaps=told["heading"]["options"].get("partial") is True)
    elif kind in directories and directories[kind].last not in names:
        raise ValueError(f"its files lack {directories[kind].last!r}")
    inputs = object_of(told.get("inputs", {}), "its inputs")
    for name, found in inputs.items():
        if type(found) is not list or len(found) != 3:
            raise ValueError(f"the input {name!r} is not described by path, size and stamp")
        path, size, stamp = found
        if "\0" in text_of(path, f"the path of {name!r}"):
            raise ValueError(f"the path of {name!r} is none")
        count_of(size, f"the size of {name!r}")
        text_of(stamp, f"the stamp of {name!r}")
    return Description(plan_id, kind, parts, shift, told["heading"], files, inputs)


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError unless each name occurs once, and leads to a file below the directory of the output."""
    for name, count in Counter(list(names)).items():
        if count > 1:
            raise ValueError(f"{name!r} is there {count} times")
        if {"", ".", ".."}.intersection(name.split("/")) or "\0" in name or _OF_STAGING.fullmatch(name):
            raise ValueError(f"{name[:200]!r} is not the name of a file of an output")


def _check_shards(names: list[str], index: str, gaps: bool) -> None:
    """Raise ValueError unless the shards among `names` are those of one output, with its `index`. `gaps`: it may lack
    some, those of a reference of which it has no tensor."""
    shards = [match for name in names if (match := _SHARD.fullmatch(name))]
    if not shards:
        return
    count = int(shards[0][2])
    numbered = all(0 < int(match[1]) <= count == int(match[2]) for match in shards)
    if not numbered or (len(shards) < count and not gaps) or index not in names:
        raise ValueError("its shards are not those of one output")


def check_heading(told: Any) -> None:
    """Raise ValueError unless `told` is the part of a manifest before its files."""
    object_of(
        told,
        "its heading",
        {"ckptconv", "plan", "kind", "source", "options", "aliases"},
        {"like", "map", "digest", "deltas", "dequantized", "quantized", "average", "adapters"},
    )
    for name in ("ckptconv", "plan", "kind"):
        text_of(told[name], name)
    text_of(told.get("like", ""), "its reference")
    if told.get("digest", ALGORITHMS[0]) not in ALGORITHMS:
        raise ValueError(f"its digests are none of {' or '.join(ALGORITHMS)}")
    source = told["source"]
    object_of(source, "its source", {"format", "family", "inputs"}, {"model_rank"})
    text_of(source["format"], "the format of its source")
    text_of(source["family"], "the family of its source")
    count_of(source.get("model_rank", 0), "the rank of its source")
    for name, found in object_of(source["inputs"], "the inputs of its source").items():
        object_of(found, f"what it says of {name!r}", {"size", "identity"})
        if found["size"] is not None:
            count_of(found["size"], f"the size of {name!r}")
        if not PLAN.fullmatch(text_of(found["identity"], f"the identity of {name!r}")):
            raise ValueError(f"the identity of {name!r} is none")
    object_of(told["options"], "the record of its options")
    _texts(told["aliases"], "its aliases")
    object_of(told.get("map", {}), "its map")
    for key in ("dequantized", "quantized"):
        for name, count in object_of(told.get(key, {}), "its formats of quantized weights").items():
            count_of(count, f"the number of weights that {'were' if key == 'dequantized' else 'are'} {name}")
    if "average" in told:
        _check_average(told["average"])
    for path in list_of(told.get("adapters", []), "its adapters"):
        text_of(path, "the path of an adapter")
    if "deltas" in told:
        if not list_of(told["deltas"], "its deltas") or told["kind"] != "weights":
            raise ValueError("its deltas change nothing")
        for path in told["deltas"]:
            text_of(path, "the path of a delta")


def _check_average(told: Any) -> None:
    """Raise ValueError unless `told` says which checkpoints were averaged, and with which weights."""
    object_of(told, "its average", {"terms", "weights", "over"})
    terms = list_of(told["terms"], "the checkpoints that it is an average of")
    numbers = [*list_of(told["weights"], "the weights of its average"), told["over"]]
    if terms.count(None) != 1 or len(numbers) != len(terms) + 1 or not told["over"]:
        raise ValueError("its average is none")
    for path in terms:
        text_of("" if path is None else path, "the path of a checkpoint")
    if not all(type(number) is float and math.isfinite(number) for number in numbers):
        raise ValueError("the weights of its average are no numbers")


def check_manifest(told: Any) -> None:
    """Raise ValueError unless `told` is a manifest."""
    if type(told) is not dict or type(told.get("files")) is not dict:
        raise ValueError("it names no files")
    check_heading({name: value for name, value in told.items() if name != "files"})
    if not PLAN.fullmatch(told["plan"]):
        raise ValueError("its plan is none")
    check_names(told["files"])
    for name, found in told["files"].items():
        digested = {"digests"} if "digest" in told else set()
        object_of(found, f"what it says of {name!r}", {"size", "tensors", *digested})
        count_of(found["size"], f"the size of {name!r}")
        for tensor, crc in object_of(found["tensors"], f"what it says of the tensors of {name!r}").items():
            if crc is not None and not _CRC.fullmatch(text_of(crc, f"the checksum of {tensor!r}")):
                raise ValueError(f"the checksum of {tensor!r} is none")
        if digested:
            _check_digests(found["digests"], f"the digests of {name!r}", found["tensors"], set())


def _check_digests(told: Any, what: str, tensors: Collection[str], more: set[str]) -> None:
    """Raise ValueError unless `told` has the digest of a file and those of its `tensors`, and the keys `more`."""
    object_of(told, what, {"file", "tensors", *more})
    if type(told["tensors"]) is not dict or told["tensors"].keys() != set(tensors):
        raise ValueError(f"{what} are not those of its tensors")
    for digest in (told["file"], *told["tensors"].values()):
        if type(digest) is not str or not _DIGEST.fullmatch(digest):
            raise ValueError(f"{what} are none")


def file_record(data: bytes) -> dict[str, Any]:
    """Parse the record of a file in a local staging directory."""
    return _record(data, {"inode": int, "mtime": int, "synced": bool})


def object_record(data: bytes) -> dict[str, Any]:
    """The record of a file that a part has put on a store: `version` is what tells its object from others."""
    return _record(data, {"version": str})


def _record(data: bytes, facts: Mapping[str, type]) -> dict[str, Any]:
    found = object_of(parse_json(data), "it", {"name", "size", "plan", "spans", *facts}, {"digests"})
    text_of(found["name"], "its name")
    text_of(found["plan"], "its plan")
    size = count_of(found["size"], "its size")
    for name, kind in facts.items():
        if type(found[name]) is not kind:
            raise ValueError(f"its {name} is none")
    names = set()
    tensors = 0
    for span in list_of(found["spans"], "its record of spans"):
        if type(span) is not list or len(span) != 4:
            raise ValueError("one of its spans is not of four values")
        at, length, crc, name = span
        if count_of(at, "the start of a span") + count_of(length, "the length of a span") > size:
            raise ValueError("one of its spans ends behind the file")
        if crc is not None:
            count_of(crc, "a checksum", (1 << 32) - 1)
        if name is not None:
            names.add(text_of(name, "the name of a tensor"))
            tensors += 1
    if len(names) != tensors:
        raise ValueError("the name of a tensor is there twice")
    if "digests" in found:
        _check_digests(found["digests"], "its digests", names, {"algorithm"})
        if found["digests"]["algorithm"] not in ALGORITHMS:
            raise ValueError("its digests are of no known algorithm")
    return found


def _texts(value: Any, what: str) -> None:
    if type(value) is not dict or not all(type(text) is str for text in value.values()):
        raise ValueError(f"{what} are not texts")
