"""Checkpoints of Megatron-FSDP as an output: their entry in the table of kinds."""

from __future__ import annotations

from ckptconv.features.megatron_output.kind import KIND as MEGATRON

KIND = MEGATRON._replace(
    refused={
        **MEGATRON.refused,
        "like": ("{} cannot be used here: Megatron-FSDP checkpoints have a single form.", "Leave it out."),
    },
    to="megatron-fsdp",
    plan="ckptconv.features.megatron_fsdp.output",
    called="a checkpoint of Megatron-FSDP",
    like="",
)
