"""`ckptconv safetensors2pt`: safetensors to a file of torch.save."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckptconv.cli.making import convert_one
from ckptconv.cli.options import CONVERTING, named, required, taking

# Commands whose report is that of a conversion.
OF_CONVERSIONS = ("safetensors2pt",)
# Options of conversions to safetensors that the way back ignores.
_NOT_BACK = "max_shard_size tied like partial fill checksum copy_config"


@taking(
    *named("into alone opaque drop_opaque"),
    *(name for name in CONVERTING if name not in named(_NOT_BACK)),
)
def safetensors2pt(
    source: Annotated[
        str, typer.Argument(metavar="INPUT", show_default=False, help="A .safetensors file, an index or a directory.")
    ],
    output: Annotated[
        str | None,
        typer.Argument(metavar="OUTPUT", show_default=False, help="A name that ends in .pt, .pth, .bin or .ckpt."),
    ] = None,
    **options: Any,
) -> None:
    """Convert safetensors to a .pt file for torch.load.

    With the structure record of the first conversion, torch.load returns the original state: containers, order,
    parameters, shared tensors. INPUT is a file, an index or a directory; OUTPUT ends in .pt, .pth, .bin or .ckpt.
    Loading a .pt file runs the code that its objects name: objects of classes that are not known to be plain data are
    written only with --opaque keep, and only if scan calls them safe.

    \b
    Examples:
      ckptconv safetensors2pt model.safetensors model.pt
      ckptconv safetensors2pt --opaque drop model.safetensors model.pt
    """
    convert_one("safetensors2pt", "safetensors", source, required(output, options), options)
