"""Options for the checkpoints of one program, given for those of another."""

from __future__ import annotations

from ckptconv.errors import UsageError
from ckptconv.formats.model_files import TORCH
from ckptconv.formats.registered import DEEPSPEED, MEGATRON
from ckptconv.formats.source import Source, Wanted
from ckptconv.options.registered import missing
from ckptconv.storage.location import Location

# Options that select a part or tensors: without their effect, others than the wanted ones would be converted.
_SELECTING = ("--tag", "--exclude-frozen-parameters", "--master", "--unstack")
_OTHERWISE = "Leave the option out, or first convert separately the checkpoint that it applies to."


def warned(source: Source, place: Location, called: str, wanted: Wanted) -> Source:
    """Return `source`, whose path is `place`, with a warning for each option of `wanted` that has no effect on it;
    `called` describes its format. Raise UsageError for an option in `_SELECTING`."""
    is_deepspeed, is_megatron = source.family == DEEPSPEED, source.format == MEGATRON
    idle = {
        option: f"{option} has no effect: {place} is {called}, but the option applies only to {whose} checkpoints."
        for option, is_given, whose, is_theirs in (
            ("--tag", wanted.tag, "DeepSpeed's", is_deepspeed),
            ("--exclude-frozen-parameters", wanted.exclude_frozen, "DeepSpeed's", is_deepspeed),
            ("--master", wanted.master, "Megatron-core's", is_megatron),
            ("--unstack", wanted.unstack, "Megatron-core's", is_megatron),
            ("--raw", wanted.raw, "torch.save's", source.family == TORCH),
        )
        if is_given and not is_theirs
    }
    for option in filter(idle.get, _SELECTING):
        hint = _OTHERWISE
        if option == "--tag":
            step = place.join(wanted.tag)
            where = f": {step}" if step.kind == "directory" else ", or leave --tag out."
            hint = f"Give the directory of the step{where}"
        elif option == "--unstack" and not missing("map"):
            hint = "Leave it out, or use --map: a map may name each layer, and ckptconv maps lists the maps."
        raise UsageError(idle[option], hint)
    return source._replace(warnings=[*source.warnings, *idle.values()])
