"""A step that accelerate loads with FSDP2 as an output: its entry in the table of kinds."""

from __future__ import annotations

from ckptconv.features.dcp_output.kind import KIND as DCP
from ckptconv.features.dcp_output.kind import NO_WEIGHTS
from ckptconv.options.table import Options
from ckptconv.outputs.kinds import ACCELERATE
from ckptconv.storage.paths import join


def divided(path: str, options: Options) -> dict[str, Options]:
    """Return the directories of a step that accelerate loads with FSDP2, and the options with which each is written.

    Source: accelerate/utils/fsdp_utils.py (load_fsdp_model, load_fsdp_optimizer) of accelerate 1.0 to 1.15.
    """
    weights, states = (join(path, name) for name in ACCELERATE)
    directories = {weights: options.replaced(to="dcp", model_key="model", states="")}
    if options.states:
        directories[states] = options.replaced(to="dcp", model_key=NO_WEIGHTS, optimizer_key="optimizer")
    return directories


KIND = DCP._replace(
    refused={
        **DCP.refused,
        "like": (
            "{} applies to one checkpoint of torch.distributed.checkpoint, but this output has two.",
            "Give --chunks N.",
        ),
        **dict.fromkeys(
            ("model_key", "optimizer_key", "flat_optimizer"),
            ("{} cannot be used here: accelerate prescribes the keys of the states.", ""),
        ),
    },
    to="accelerate",
    plan="ckptconv.features.dcp_output.accelerate",
    divided=divided,
    like="",
)
