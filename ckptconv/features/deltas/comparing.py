"""The options of a delta, which `diff` has."""

from __future__ import annotations

from ckptconv.options import OUTPUT
from ckptconv.options.kinds import PATH, choice, counted
from ckptconv.options.option import Option, options_in


class _Delta:
    """Options that say which delta is to be written of a difference."""

    delta = Option(
        PATH,
        "Write what changes A into B to the directory DIR, as `ckptconv patch`, slime and sglang read it.",
        metavar="DIR",
        group=OUTPUT,
        common=True,
    )
    delta_encoding = Option(
        choice("auto", "xor", "overwrite"),
        "Store the exclusive or of old and new bytes, or the new bytes and where they go; auto: what is smaller.",
        default="auto",
        group=OUTPUT,
    )
    delta_checksum = Option(
        choice("adler32", "xxh3-128", "blake3"),
        "Store these checksums of the new tensors; all but adler32 need a package.",
        default="adler32",
        group=OUTPUT,
    )
    delta_version = Option(
        counted(1, 999_999),
        "B is version N of the model, and A the one before.",
        metavar="N",
        default=1,
        group=OUTPUT,
    )


COMPARING = options_in(_Delta)
