"""Plan a checkpoint of torch.distributed.checkpoint as an output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptconv.errors import UsageError
from ckptconv.features.dcp_output.contents import DEFAULT_OPTIMIZER_KEY, SHARDS, DcpContents, contents, file_plans
from ckptconv.features.dcp_output.imitating import fitted, unlike
from ckptconv.features.dcp_output.layout import read_layout
from ckptconv.features.dcp_output.options import GIVEN
from ckptconv.features.optimizer_states.states import is_numbered
from ckptconv.features.torch_files.refusing import shown
from ckptconv.formats.optimizers import optimizers_in
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs.kinds import flag, is_set
from ckptconv.outputs.naming import tree_of
from ckptconv.outputs.notices import Notices
from ckptconv.outputs.planning import Output, output_of
from ckptconv.outputs.renaming import KEPT
from ckptconv.outputs.targets import Target
from ckptconv.plan import FilePlan
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_remote
from ckptconv.text import some


def plan(source: Source, target: Target, options: Options) -> Output:
    """Plan a checkpoint of torch.distributed.checkpoint: the weights, and with `states` the optimizer's states."""
    if options.to == SHARDS and is_set("part", options) and is_remote(target.path):
        raise UsageError(
            f"{target.path}: on a store, parts need an index that is written last, but safetensors shards of "
            "torch.distributed.checkpoint have none.",
            "Convert it without --part, or write it to a shared disk.",
        )
    source = with_states(source, options)
    content = contents(source, options)
    planned = output_with(source, target, options, content, file_plans(content, options, target.layout))
    notes = [*planned.notices.notes]
    if source.training is not None and not options.states:
        notes.append(
            f"There are no optimizer states in it: --states PATH adds them, such as --states {source.path}. "
            "--model-key and --optimizer-key give the keys of weights and states."
        )
    if _has_numbers(source, options, content):
        notes.append(
            f"The optimizer's states are numbered, as in {source.path}; FSDP2 needs names: --states {source.path} "
            "gives them, under the keys of --model-key and --optimizer-key."
        )
    if source.family == "dcp" and not target.layout and (options.states or not options.fitting().get("map")):
        notes.extend(_moved(source, options))
    return planned._replace(notices=planned.notices._replace(notes=tuple(notes)))


def _moved(source: Source, options: Options) -> list[str]:
    """Return a note on the keys of weights and states in `source`, where the output has others by default."""
    layout = read_layout(Location(source.path, dict(options.storage_options)))
    given, own = GIVEN.of(options), GIVEN.of(fitted(options, layout, source))
    keys = {"model_key": own.model_key} if own.model_key != given.model_key else {}
    if options.states and not given.optimizer_key and own.optimizer_key not in ("", DEFAULT_OPTIMIZER_KEY):
        keys["optimizer_key"] = own.optimizer_key
    if not keys:
        return []
    words = " ".join(f"{flag(name)} {key}" for name, key in keys.items())
    note = (
        f"{source.path} has weights or states under other keys than the output: {some(keys.values(), form=str)}. "
        f"{words} keeps them."
    )
    return [note]


def _has_numbers(source: Source, options: Options, content: DcpContents) -> bool:
    """Return whether `content` has states of an optimizer by the numbers of its parameters."""
    tree = tree_of(source, options)
    return any(
        is_numbered(optimizer, ()) and any(old.startswith(f"{name}.") for old in content.chosen.names)
        for name, optimizer in optimizers_in(tree)
        if isinstance(tree, Mapping)
    )


def with_states(source: Source, options: Options) -> Source:
    """Return `source` with the inputs of the optimizer's states among its own, if these states are written next to the
    weights."""
    return source._replace(inputs=source.inputs_of_all) if options.states else source


def output_with(
    source: Source, target: Target, options: Options, content: DcpContents, files: Sequence[FilePlan]
) -> Output:
    """Return the output of the planned `files`, which hold `content`."""
    warnings = [*content.chosen.warnings, *content.warnings]
    if content.left_out:
        warnings.append(f"left out, because only the names of their classes are known: {shown(content.left_out)}")
    if content.kept:
        warnings.append(f"dcp.load will run the code named by: {shown(content.kept)}")
    if options.to == SHARDS and content.values:
        warnings.append(f"left out, because safetensors shards hold only tensors: {some(content.values)}")
    if target.layout:
        warnings.extend(unlike(content.tensors, target.layout, options.fitting()["like"]))
    notices = Notices(
        idle=content.chosen.idle(options),
        kept=frozenset(),
        warnings=tuple(warnings),
        notes=tuple(note for note in content.chosen.notes if note != KEPT),
        equal=content.equal,
    )
    planned = output_of(target.holds, [source], target, options, tuple(files), {}, notices)
    return planned._replace(described=len(content.tensors))
