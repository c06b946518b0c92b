"""Check descriptions of parts before `finish` uses them. Pure.

They are read from directories to which others may have written. Anything that we would not write raises ValueError,
whose text is a sentence about "it".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptconv.formats.registered import is_companion_name
from ckptconv.formats.run_names import TREES
from ckptconv.formats.source import STEMS
from ckptconv.outputs.schema import PLAN, check_heading, check_names, parse_json, shape_of
from ckptconv.plan import NUMBERED
from ckptconv.storage.strict_json import check

if TYPE_CHECKING:
    from ckptconv.outputs.targets import Directory

_MOST_PARTS = 10**9 - 1
_SHARD = rf"(?:{'|'.join(STEMS)}){NUMBERED}\.safetensors"
_DESCRIPTION = {
    "plan": PLAN,
    "kind": str,
    "parts": int,
    "shift": int,
    "files": [(str, int, int)],  # name, size and number of tensors
    "inputs?": {str: (str, int, str)},  # path, size and stamp
    "permissions?": [str],
}


class PlanDescription(NamedTuple):
    """The description of a plan for `finish`.

    `kind` is that of the output, as `Target.form` has it. The files were assigned to `parts` parts with `shift`,
    as in `assign`. `heading` is that of the manifest. `files` are (name, size in bytes, number of
    tensors). `inputs` are its input files: [path, size in bytes, stamp] by name. `permissions` name the files that it
    may replace, as `publish.claims.Claim` has them.
    """

    plan_id: str
    kind: str
    parts: int
    shift: int
    heading: dict[str, Any]
    files: list[tuple[str, int, int]]
    inputs: dict[str, list[Any]]
    permissions: list[str]


def description(
    data: bytes, plan_id: str, kinds: Collection[str], directory_of: Callable[[str], Directory | None]
) -> PlanDescription:
    """Parse the description of a plan, read from a staging directory of `plan_id`, of an output of one of `kinds`.

    `directory_of` returns which kind of directory an output of a kind is, None if it is another.
    """
    parsed = parse_json(data)
    heading = parsed.get("heading") if isinstance(parsed, dict) else None
    members = check(parsed, {**_DESCRIPTION, "heading": shape_of(heading)}, "it")
    kind, parts = members["kind"], members["parts"]
    if members["plan"] != plan_id or kind not in kinds:
        raise ValueError(f"it does not belong to the plan {plan_id}, or its kind of output is not {' or '.join(kinds)}")
    if not 0 < parts <= _MOST_PARTS:
        raise ValueError(f"its number of parts is {parts}; expected 1 to {_MOST_PARTS:,}")
    check_heading(members["heading"])
    if members["heading"]["plan"] != plan_id:
        raise ValueError("its heading belongs to another plan")
    files = [(name, size, tensors) for name, size, tensors in members["files"]]
    if not files:
        raise ValueError("it lists no files")
    names = [name for name, _, _ in files]
    check_names(names)
    directory = directory_of(kind)
    if kind == "file" and len(names) != 1:
        raise ValueError(f"it lists {len(names)} files, but the output is a single file")
    if kind not in TREES:
        for name in names:
            if "/" in name or (directory and not _may_have(directory, name)):
                raise ValueError(f"{name!r} is not a valid file name for this kind of output")
    if directory and kind == "directory":
        _check_shards(names, directory.last, gaps=members["heading"]["options"].get("partial") is True)
    elif directory and directory.last not in names:
        raise ValueError(f"its files do not include {directory.last!r}")
    inputs = members.get("inputs", {})
    if any("\0" in path for path, _, _ in inputs.values()):
        raise ValueError("it contains an invalid input path")
    permissions = members.get("permissions", [])
    return PlanDescription(plan_id, kind, parts, members["shift"], members["heading"], files, inputs, permissions)


def _may_have(directory: Directory, name: str) -> bool:
    """Return whether a directory may have a file of that name, its own or a copied one."""
    return directory.is_file(name) or (directory.copies and is_companion_name(name))


def _check_shards(names: list[str], index: str, gaps: bool) -> None:
    """Raise ValueError unless the shards among `names` are those of one output, with its `index`. `gaps`: it may lack
    some, those of a reference of which it has no tensor."""
    shards = [match for name in names if (match := re.fullmatch(_SHARD, name))]
    if not shards:
        return
    count = int(shards[0][2])
    numbered = all(0 < int(match[1]) <= count == int(match[2]) for match in shards)
    if not numbered or (len(shards) < count and not gaps) or index not in names:
        raise ValueError("its shards do not belong to one output")
