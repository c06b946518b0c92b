"""`ckptconv merge`: adapters become part of their base."""

from __future__ import annotations

import functools
from typing import Annotated, Any

import typer

from ckptconv.cli.options import CONVERTING_SEVERAL, divided, named, taking
from ckptconv.features.merge.options import MERGING, SCALING

OTHER_WORDS = {
    "merge": ("merge-lora", "merge-adapter", "merge-and-unload", "lora", "fuse", "mergekit"),
}
# Messages on options of other programs.
OTHER_OPTIONS = {
    "--alpha --lora-alpha --scale --scaling --weight --weights": f"{SCALING} --adapter NAME selects an adapter.",
    "--base --base-model --base-model-path --base-model-name-or-path --adapter --adapter-path --adapter-name-or-path "
    "--adapter-model --peft-model --peft-model-id --lora --lora-path --lora-model --lora-weights --merge-lora "
    "--merge-and-unload --merge-weights": "Merge adapters with: ckptconv merge BASE ADAPTER OUTPUT.",
    "merge --r --rank --lora-r --lora-rank --use-rslora --use-dora --fan-in-fan-out --target-modules --lora-dropout": (
        "merge reads it from the adapter's adapter_config.json."
    ),
}
# The commands that print the report of a conversion.
OF_CONVERSIONS = ("merge",)


@taking(
    MERGING["adapter"],
    *named("into"),
    MERGING["to"],
    *named("chunks model_key for_hub tag exclude_frozen_parameters master unstack raw opaque drop_opaque"),
    *CONVERTING_SEVERAL,
)
def merge(
    base: Annotated[
        str, typer.Argument(metavar="BASE", show_default=False, help="The base model of the adapters, in any format.")
    ],
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="ADAPTER... OUTPUT",
            show_default=False,
            help=(
                "Adapters that PEFT wrote, in the order of merging; then the output: a directory, or a name that ends "
                "in .safetensors."
            ),
        ),
    ],
    **options: Any,
) -> None:
    """Merge LoRA adapters into their base: one model, to serve without PEFT.

    An ADAPTER is an output of PEFT's save_pretrained, or a training checkpoint of any format with adapter_config.json
    next to it. Products are summed in float64 and rounded once; tensors without an adapter are copied unchanged.
    Tensors that do not fit the base are refused by name.

    \b
    Examples:
      ckptconv merge base/ adapter/ merged/ --copy-config
      ckptconv merge base/ first/ second/ merged.safetensors
    """
    from ckptconv.cli.making import make
    from ckptconv.features.merge.merging import merge as merged

    adapters, target = divided(words, options, "merge needs a BASE, at least one ADAPTER, and an OUTPUT.")
    make("merge", functools.partial(merged, base), adapters, target, options)
