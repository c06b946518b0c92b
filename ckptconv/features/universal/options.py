"""The options of conversions about universal checkpoints."""

from __future__ import annotations

from typing import Any

from ckptconv.errors import UsageError
from ckptconv.options import OUTPUT
from ckptconv.options.kinds import FLAG, PATH, counted
from ckptconv.options.option import Given, deciding, option
from ckptconv.text import parse_count


def _stage(value: Any, called: str) -> int:
    try:
        return parse_count(value, called, 1, 3)
    except UsageError as error:
        none = str(value).strip() == "0"
        raise UsageError(error.message, "Stage 0 does not load universal checkpoints." if none else "") from None


class UniversalOptions(Given):
    """The path of a universal checkpoint, and the training run that will load it."""

    universal: str = option(
        PATH, "Write a DeepSpeed universal checkpoint to DIR, to resume training from.", metavar="DIR", group=OUTPUT
    )
    zero_stage: int | None = deciding(
        counted(1, 3)._replace(parse=_stage),
        "The ZeRO stage of the training run that will load the universal checkpoint.",
        metavar="1|2|3",
        group=OUTPUT,
        fallback="any; for a ZeRO checkpoint, its own stage",
    )
    fresh_optimizer: bool = deciding(
        FLAG,
        "Start the universal checkpoint with zero moments at step 0, without the states of INPUT.",
        group=OUTPUT,
    )


GIVEN = UniversalOptions
# Other words for it, as a command.
OTHER_WORDS = {"convert --to universal": ("universal",)}
# Options of DeepSpeed's ds_to_universal.py.
OTHER_OPTIONS = {
    "--input-folder --output-folder": "Give both without options: ckptconv convert INPUT OUTPUT --to universal.",
    "--num-extract-workers --num-merge-workers": "Use --jobs N.",
    "--no-strict": "The checks of INPUT cannot be turned off.",
}
