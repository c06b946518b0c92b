"""The files of a conversion that each part makes, without coordination between the processes that write them. Pure."""

from __future__ import annotations

import heapq
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckptconv.errors import UsageError
from ckptconv.options.kinds import OptionWarning
from ckptconv.options.table import Options
from ckptconv.outputs.planning import Output
from ckptconv.plan import FilePlan
from ckptconv.publish.parts import is_one_upload
from ckptconv.publish.statements import STATEMENTS
from ckptconv.storage.paths import is_remote

# The options that are about an output as a whole, and the advice to a user who gives them to a part.
_OF_WHOLE = {
    "verify": "Verify the finished output.",
    "manifest": "Use it with `ckptconv finish`.",
    **dict.fromkeys(STATEMENTS, "Use it with `ckptconv finish`."),
    "depfile": "Write the rule by hand.",
}


def part_of(value: tuple[int, int]) -> Part:
    """Return the part that the option asks for."""
    return Part(*value)


class Part(NamedTuple):
    """A part of a conversion: its number, from 0, and the number of `parts`. See `publish.parts.Part`."""

    number: int
    parts: int

    @property
    def name(self) -> str:
        """Its name in reports."""
        return f"{self.number}/{self.parts}"

    @property
    def is_first(self) -> bool:
        """Whether this part makes the comparisons that all parts share."""
        return self.number == 0

    def check(self, outputs: Sequence[Output], options: Options, verifies: bool, replaces: bool) -> None:
        """Raise UsageError if `outputs` cannot be made in parts, or not with these options. `verifies`: the outputs are
        to be verified. `replaces`: earlier outputs lie there: warn if they are on a store."""
        for option, hint in _OF_WHOLE.items():
            if verifies if option == "verify" else options.asked(option):
                raise UsageError(f"--{option} requires a whole output, but --part writes only a part.", hint)
        for output in outputs:
            if is_one_upload(output):
                raise UsageError(
                    f"{output.target.path}: on a store, --part requires an output of several files with an index, "
                    "but this output is a single file.",
                    "Convert it without --part, write it to a shared disk, or split it with a smaller "
                    "--max-shard-size.",
                )
        if replaces and any(is_remote(output.target.path) for output in outputs):
            warnings.warn(
                "On a store, parts replace an earlier output that has an index immediately, before `finish`: its "
                "index is removed, and its shards are replaced. To keep that output, use another OUTPUT.",
                OptionWarning,
                stacklevel=2,
            )

    def files_of(self, output: Output, index: int) -> list[FilePlan]:
        """Return the files of an output to make now; `index` is its place among the outputs."""
        files = output.plan.files
        # Assign each output separately, so that `finish` can tell which part a file belongs to.
        numbers = assign([file.size for file in files], self.parts, index)
        return [file for file, number in zip(files, numbers, strict=True) if number == self.number]

    def described(self, output: Output, index: int, inputs: Mapping[str, Any], permissions: Sequence[str]) -> bytes:
        """Return the description of a plan for `finish`, as JSON: its files, how to publish them, their inputs, and the
        files that they may replace."""
        target, files = output.target, output.plan.files
        return json.dumps(
            {
                "plan": output.plan.plan_id,
                "kind": target.form,
                "parts": self.parts,
                "shift": index,
                "heading": output.heading,
                "files": [[file.name, file.size, file.tensors] for file in files],
                "inputs": inputs,
                "permissions": list(permissions),
            }
        ).encode()


def assign(sizes: Sequence[int], count: int, shift: int = 0) -> list[int]:
    """Return the part, of `count`, of each file: largest first, each goes to the part with the fewest bytes so far.

    `shift` rotates the parts, so that outputs of one file each are not all made by the first part.
    """
    # No more parts than files get a file.
    filled = [(0, part) for part in range(min(count, len(sizes)))]
    part_of = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        size, part = filled[0]
        part_of[index] = (part + shift) % count
        heapq.heapreplace(filled, (size + sizes[index], part))
    return part_of
