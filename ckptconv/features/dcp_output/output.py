"""Plan a checkpoint of torch.distributed.checkpoint as an output."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from ckptconv.errors import CkptconvError, UsageError
from ckptconv.features.dcp_output.contents import DEFAULT_OPTIMIZER_KEY, SHARDS, DcpContents, contents, file_plans
from ckptconv.features.dcp_output.imitating import fitted, has_flat_states, unlike
from ckptconv.features.dcp_output.layout import Layout, read_layout
from ckptconv.features.dcp_output.options import GIVEN
from ckptconv.features.optimizer_states.states import is_numbered
from ckptconv.features.torch_files.refusing import shown
from ckptconv.formats.optimizers import optimizers_in
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs.kinds import entry_of, flag, is_set
from ckptconv.outputs.naming import tree_of
from ckptconv.outputs.notices import Notices
from ckptconv.outputs.planning import Output, output_of
from ckptconv.outputs.renaming import KEPT
from ckptconv.outputs.targets import Target
from ckptconv.plan import FilePlan
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_remote, normalize
from ckptconv.text import some


def plan(source: Source, target: Target, options: Options) -> Output:
    """Plan a checkpoint of torch.distributed.checkpoint: the weights, and with `states` the optimizer's states."""
    if options.to == SHARDS and is_set("part", options) and is_remote(target.path):
        raise UsageError(
            f"{target.path}: --part needs an index that is written last to a store, but safetensors shards of "
            "torch.distributed.checkpoint have no index.",
            "Convert without --part, or write to a shared disk.",
        )
    source = with_states(source, options)
    content = contents(source, options)
    planned = output_with(source, target, options, content, file_plans(content, options, target.layout))
    notes = [*planned.notices.notes]
    if source.training is not None and not options.states:
        notes.append(
            f"The output has no optimizer states. --states PATH, such as --states {source.path}, adds them; "
            "--model-key and --optimizer-key set the keys of weights and states."
        )
    if _has_numbers(source, options, content):
        notes.append(
            f"The optimizer states are numbered, as in {source.path}, but FSDP2 needs names: --states "
            f"{source.path} writes states by name, under --model-key and --optimizer-key."
        )
    if not target.layout:
        notes.extend(_moved(source, target.kind, options))
    return planned._replace(notices=planned.notices._replace(notes=tuple(notes)))


def _moved(source: Source, kind: str, options: Options) -> Iterator[str]:
    """Yield notes on the keys of weights and states in the checkpoints of torch that they come from, where an output of
    this kind has others by default."""
    given, is_mapped = GIVEN.of(options), bool(options.fitting().get("map"))
    own, layout = given, None
    if source.family == "dcp" and (options.states or not is_mapped):
        layout = read_layout(Location(source.path, dict(options.storage_options)))
        own = GIVEN.of(fitted(options, layout, source))
    keys = {"model_key": own.model_key} if own.model_key != given.model_key else {}
    if options.states and not given.optimizer_key and own.optimizer_key not in ("", DEFAULT_OPTIMIZER_KEY):
        keys["optimizer_key"] = own.optimizer_key
    if keys:
        words = " ".join(f"{flag(name)} {key}" for name, key in keys.items())
        yield (
            f"{source.path} has weights or states under other keys than the output: {some(keys.values(), form=str)}. "
            f"To keep these keys, use {words}."
        )
    may_be_flat = options.to != SHARDS and "flat_optimizer" not in entry_of(kind).refused
    if options.states and may_be_flat and not given.flat_optimizer and _is_flat(options, layout):
        yield (
            f"{options.states} stores the optimizer settings by parameter, as torchtitan loads them; the output stores "
            "them by group. --flat-optimizer keeps them by parameter."
        )


def _is_flat(options: Options, layout: Layout | None) -> bool:
    """Return whether the states come from a checkpoint of torch with flat states, which has this layout if the weights
    come from it too."""
    with contextlib.suppress(CkptconvError):
        own = layout or read_layout(Location(normalize(options.states), dict(options.storage_options)))
        return has_flat_states(own)
    return False


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
        warnings.append(f"left out, because their classes are known only by name: {shown(content.left_out)}")
    if content.kept:
        warnings.append(f"dcp.load will run the code of the classes of these values: {shown(content.kept)}")
    if options.to == SHARDS and content.values:
        warnings.append(f"left out, because safetensors shards store only tensors: {some(content.values)}")
    if target.layout:
        warnings.extend(unlike(content.tensors, target.layout, options.fitting()["like"]))
    notices = Notices(
        idle=content.chosen.idle(options, source.weights),
        kept=frozenset(),
        warnings=tuple(warnings),
        notes=tuple(note for note in content.chosen.notes if note != KEPT),
        record=content.chosen.record,
        equal=content.equal,
    )
    planned = output_of(target.holds, [source], target, options, tuple(files), {}, notices)
    return planned._replace(described=len(content.tensors))
