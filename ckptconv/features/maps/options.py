"""The options of conversions about maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.options import NAMING
from ckptconv.options.kinds import PATH, TEXTS, ValueKind
from ckptconv.options.option import Given, option
from ckptconv.text import brief, parse_count

_MOST = (1 << 63) - 1


def _sizes(value: Any, called: str) -> dict[str, int]:
    """Return {axis: size} from a mapping, or from words such as n=32."""
    pairs = value.items() if isinstance(value, Mapping) else (text.split("=", 1) for text in TEXTS.parse(value, called))
    sizes_of: dict[str, int] = {}
    for axis, *sizes in pairs:
        shown = f"{called} {brief('='.join(map(str, (axis, *sizes))))}"
        if not axis or not isinstance(axis, str) or len(sizes) != 1:
            raise UsageError(f"{shown} is not the size of an axis.", "Write it as n=32.")
        size = parse_count(sizes[0], shown, 0, _MOST)
        if sizes_of.setdefault(axis, size) != size:
            raise UsageError(f"{called} gives two sizes for {axis}: {sizes_of[axis]} and {size}.")
    return sizes_of


SIZES = ValueKind(_sizes, list[str], dict, unset={}, accepts=f"Mapping[str, int] | {TEXTS.accepts}")


class MapOptions(Given):
    """The map that gives other names and layouts."""

    map: str = option(
        PATH,
        "Give tensors the names and layouts of another program, with a built-in map (`ckptconv maps`) or a file of "
        "rules.",
        metavar="NAME|FILE",
        group=NAMING,
        common="convert",
    )
    size: Mapping[str, int] = option(
        SIZES,
        "The size of an axis of the map, such as n=32, if shapes and config.json do not determine it; repeatable.",
        metavar="AXIS=N",
        group=NAMING,
    )


def _names() -> Iterator[str]:
    from ckptconv.features.maps.file import catalogue

    return catalogue()


GIVEN = MapOptions
# Options whose values a shell completes.
COMPLETED = {"map": _names}
# Options of torchtitan's scripts of conversion.
OTHER_OPTIONS = {
    "--hf-format --hf --to-hf": (
        "safetensors is the default. For the names of Hugging Face, use --map NAME, with the name of a map "
        "that `ckptconv maps` lists."
    ),
    "--model-name --model-flavor": "Use --map NAME, with the name of a map that `ckptconv maps` lists.",
    "--export-dtype --merge-dtype --save-dtype --save-precision": "Use --dtype, such as --dtype bf16.",
}
