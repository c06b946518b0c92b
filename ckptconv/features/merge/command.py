"""`ckptconv merge`: adapters become part of their base."""

from __future__ import annotations

import functools
from typing import Annotated, Any

import typer

from ckptconv.cli.options import CONVERTING, divided, named, taking
from ckptconv.features.merge.options import MERGING

OTHER_WORDS = {"merge": ("merge-weights", "merge-lora", "merge-adapter", "merge-and-unload", "lora")}
# What is said of options of other programs.
OTHER_OPTIONS = {
    "--base --base-model --adapter --lora --merge-weights": "Adapters are merged by: ckptconv merge BASE ADAPTER "
    "OUTPUT.",
}
# The commands that print the report of a conversion.
OF_CONVERSIONS = ("merge",)


@taking(
    MERGING["adapter"],
    *named("into"),
    MERGING["to"],
    *named("chunks model_key for_hub tag exclude_frozen_parameters master unstack raw opaque drop_opaque"),
    *CONVERTING,
)
def merge(
    base: Annotated[
        str, typer.Argument(metavar="BASE", show_default=False, help="The model that was adapted, of any format.")
    ],
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="ADAPTER... OUTPUT",
            show_default=False,
            help="What PEFT wrote, in order; then a directory, or a name that ends in .safetensors.",
        ),
    ],
    **options: Any,
) -> None:
    """Merge LoRA adapters into their base: one model, to serve without PEFT.

    An ADAPTER is what PEFT's save_pretrained wrote, or a training checkpoint of any format, with adapter_config.json
    beside it. Products are added up in float64 and rounded once; tensors that no adapter touches are moved as they
    are. What does not fit the base is refused by name.

    \b
    Examples:
      ckptconv merge base/ adapter/ merged/
      ckptconv merge base/ first/ second/ merged.safetensors
    """
    from ckptconv.cli.convert import make
    from ckptconv.features.merge.merging import merge as merged

    adapters, target = divided(words, options, "merge needs a BASE, at least one ADAPTER, and an OUTPUT.")
    make("merge", functools.partial(merged, base), adapters, target, options)
