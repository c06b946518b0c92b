"""Steps of Megatron-core as an output: their entry in the table of kinds."""

from __future__ import annotations

import re

from ckptconv.features.dcp.kind import KIND as DCP
from ckptconv.options.table import Options
from ckptconv.storage.paths import basename, join

# The names of steps that Megatron-LM looks for in the directory of `--load`: weights alone, and a numbered step.
RELEASE, NUMBERED = "release", re.compile(r"iter_(\d{7})")


def divided(path: str, options: Options) -> dict[str, Options]:
    """Return the directory of the step, with its options: that of `path` if it is called like one, else the release in
    the run `path`."""
    name = basename(path.rstrip("/"))
    is_step = name == RELEASE or NUMBERED.fullmatch(name)
    return {path if is_step else join(path, RELEASE): options}


KIND = DCP._replace(
    holds="megatron",
    form="step",
    refused={
        **DCP.refused,
        **dict.fromkeys(
            ("model_key", "optimizer_key", "flat_optimizer"),
            ("{} cannot be used here: Megatron-core prescribes the keys of tensors.", ""),
        ),
        "states": ("{} cannot be used here: optimizer states are not written for Megatron-core yet.", "Leave it out."),
        "like": ("{} applies to a checkpoint of torch.distributed.checkpoint, not to --to megatron.", "Leave it out."),
    },
    idle={
        **DCP.idle,
        "copy_config": "copies nothing: Megatron-LM reads no configuration of transformers",
        "tied": "has no effect on a step of Megatron-core, which stores tied embeddings once",
    },
    to="megatron",
    compared="ckptconv.features.megatron_output.comparing",
    plan="ckptconv.features.megatron_output.output",
    called="a step of Megatron-core",
    divided=divided,
    like="",
)
