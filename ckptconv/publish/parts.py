"""What of a conversion each part makes, without coordination between the processes that write them. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ckptconv.errors import UsageError
from ckptconv.options.table import Options
from ckptconv.outputs.planning import Output
from ckptconv.plan import FilePlan
from ckptconv.publish.statements import STATEMENTS
from ckptconv.storage.paths import is_remote

# The options that are about an output as a whole, and what to do instead of giving them to a part.
_OF_WHOLE = {
    "verify": "Verify the finished output.",
    "manifest": "Give it to `ckptconv finish`.",
    **dict.fromkeys(STATEMENTS, "Give it to `ckptconv finish`."),
    "depfile": "Write the rule by hand.",
}


def check_part(outputs: Sequence[Output], options: Options, verifies: bool) -> None:
    """Raise UsageError if `outputs` cannot be made in parts, or not with these options. `verifies`: the outputs are to
    be verified."""
    for option, hint in _OF_WHOLE.items():
        if verifies if option == "verify" else getattr(options, option):
            raise UsageError(f"--{option} needs a whole output, but --part makes only a part of it.", hint)
    for output in outputs:
        if is_one_upload(output):
            raise UsageError(
                f"{output.target.path}: on a store, --part needs an output of several files with an index, but this "
                "output is one file.",
                "Convert it without --part, write it to a shared disk, or divide it with a smaller --max-shard-size.",
            )


def is_one_upload(output: Output) -> bool:
    """Whether a remote output is one file: it is complete once it has its name, while shards need an index."""
    index = output.target.last
    has_index = output.target.is_tree or any(file.name == index for file in output.plan.files)
    return is_remote(output.target.path) and not has_index


def files_of(outputs: Sequence[Output], part: tuple[int, int] | None) -> list[list[FilePlan]]:
    """Return the files of each output to make now: all, or those of one part."""
    if not part:
        return [list(output.plan.files) for output in outputs]
    number, count = part
    # Assign each output separately, so that `finish` can tell which part a file belongs to.
    chosen = []
    for index, output in enumerate(outputs):
        files = output.plan.files
        parts = assign([file.size for file in files], count, index)
        chosen.append([file for file, of in zip(files, parts, strict=True) if of == number])
    return chosen


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
