"""The option of conversions about the small files of a model's directory."""

from __future__ import annotations

from ckptconv.options import OUTPUT
from ckptconv.options.kinds import SWITCH
from ckptconv.options.option import Given, option
from ckptconv.options.registered import FLAGS


class CompanionOptions(Given):
    """Whether companions are copied; None: those of some inputs (see `deciding`)."""

    copy_config: bool | None = option(
        SWITCH,
        "Copy config.json, the tokenizer and similar files to the directory OUTPUT, for from_pretrained. "
        "--no-extras is an alias of --no-copy-config.",
        flags=FLAGS["copy_config"],
        group=OUTPUT,
        common="convert",
        fallback="on if INPUT is a directory whose config.json also describes OUTPUT",
    )


GIVEN = CompanionOptions
