"""A registry of formats' knowledge about the steps of runs: a line for each, with the name of a module, which is
imported when its turn comes."""

from __future__ import annotations

# Files that describe a step, by name, and the modules that tell by one whether all bytes are there. There,
# `extent_of(place)` returns the bytes of the weights, and of the optimizer's states, in or below a directory; it raises
# CorruptError if some are missing. `CALLED` is the name of the format.
EXTENTS: dict[str, str] = {
    ".metadata": "ckptconv.features.dcp.extent",
}
# Modules with `MARKERS`: the names of files that a family's writers leave in a step when it is complete, or that say
# what it consists of.
MARKING: tuple[str, ...] = (
    "ckptconv.features.dcp.names",
    "ckptconv.features.torch_checkpointing.locate",
    "ckptconv.features.runs.trainer",
    "ckptconv.features.megatron_core.alone",
    "ckptconv.features.nanotron.step",
    "ckptconv.features.orbax.locate",
    "ckptconv.features.ranks.locate",
)
# Modules that tell of what else is in the directory of a run: `warnings(path)` yields a sentence each.
TELLING: tuple[str, ...] = (
    "ckptconv.features.removal.area",
)  # fmt: skip
