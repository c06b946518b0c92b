"""The options of a delta, which belong to `diff`."""

from __future__ import annotations

from ckptconv.options import OUTPUT
from ckptconv.options.kinds import PATH, choice, counted
from ckptconv.options.option import Option, options_in


class _Delta:
    """Options that describe the delta to write of a difference."""

    delta = Option(
        PATH,
        "Write the changes from A to B as a delta to the directory DIR, which `ckptconv patch`, slime and sglang read.",
        metavar="DIR",
        group=OUTPUT,
        common=True,
    )
    delta_encoding = Option(
        choice("auto", "xor", "overwrite"),
        "Store the XOR of old and new bytes (xor), or the new bytes with their positions (overwrite); auto selects the "
        "smaller.",
        default="auto",
        group=OUTPUT,
    )
    delta_checksum = Option(
        choice("adler32", "xxh3-128", "blake3"),
        "The checksum to store for each new tensor; all except adler32 require a package.",
        default="adler32",
        group=OUTPUT,
    )
    delta_version = Option(
        counted(1, 999_999),
        "The version number of B; A is version N - 1.",
        metavar="N",
        default=1,
        group=OUTPUT,
    )


COMPARING = options_in(_Delta)
