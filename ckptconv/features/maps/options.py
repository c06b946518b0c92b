"""The options of conversions about maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckptconv.options import NAMING
from ckptconv.options.kinds import PATH, SIZES
from ckptconv.options.option import Given, option


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
        "The size of an axis of the map, such as n=32, if shapes and config.json do not give it; repeatable.",
        metavar="AXIS=N",
        group=NAMING,
    )


def _names() -> Iterator[str]:
    from ckptconv.features.maps.file import catalogue

    return catalogue()


GIVEN = MapOptions
# Options whose values a shell completes.
COMPLETED = {"map": _names}
