"""Derive from any source what DeepSpeed resumes a training from. Pure.

Source: DeepSpeed's engine.py (_load_checkpoint), base_optimizer.py (load_hp_checkpoint_state_from_checkpoint_dir) and
zero/stage3.py (_load_universal_checkpoint). ZeRO-1 and 2 take hyperparameters from `param_groups`, group by group, and
load no parameters of further groups: so there are as many groups as there can be, empty ones if nothing is known of
them. ZeRO-3 gives all groups those of the first group of `optimizer_state_dict`, and the step there.
"""

from __future__ import annotations

import re
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptconv.errors import UnsupportedError, UsageError
from ckptconv.features.universal.options import UniversalOptions
from ckptconv.features.universal.taking import FRESH
from ckptconv.formats.optimizers import weights_key
from ckptconv.formats.run_names import EXPERT
from ckptconv.formats.source import Source, Training
from ckptconv.options.table import TENSORS, Options
from ckptconv.outputs import computed, selection
from ckptconv.outputs.computed import Restated
from ckptconv.outputs.pipeline import selected
from ckptconv.outputs.renaming import steps_of
from ckptconv.outputs.selection import Rename
from ckptconv.pickles.nodes import Size
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Equal, Inline, LazyTensor, View, Zeros, untagged
from ckptconv.text import brief, count_of, some

# The release whose files these are like: DeepSpeed asks for one that is not too old.
_VERSION = "0.19.8"
# The model files' names: that of ZeRO-1 and 2, and that of ZeRO-3.
_MODEL, _MODEL_3 = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"
_MASTER = "float32"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "step"
# In the entries that all parameters share: where ZeRO-3 looks for the settings of groups.
_INNER, _GROUPS = "optimizer_state_dict", "param_groups"
_FOR_3 = "For ZeRO-3, use --zero-stage 3"
# Entries of param_groups that are no hyperparameters: which parameters, and how torch is to compute.
_NO_HYPERPARAMETERS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
# The options that select tensors, or rename them; the others of TENSORS change nothing.
_SELECTING = frozenset({"key", "include", "exclude", "strip_prefix", "rename", "map", "size"})
_OF_PARTS = frozenset({"layers", "experts", "component", "vocab", "graft", "config"})


@dataclass(frozen=True)
class Resumable:
    """The contents of a universal checkpoint: fp32 masters of the parameters, and other tensors, by name; the
    optimizer's states by parameter; and the rest. `idle` are given options that change nothing, {option: reason}.
    `equal` are tensors of which one was kept, and `record` is the record of the selection in the manifest."""

    training: Training
    weights: Mapping[str, LazyTensor]
    states: Mapping[str, Mapping[str, Any]]
    idle: Mapping[str, str]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    equal: tuple[Equal, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)


def resumable(source: Source, options: Options, rename: Rename = selection.renamed) -> Resumable:
    """Return the contents of a universal checkpoint of `source`.

    That of a ZeRO checkpoint holds all as it is, unless `options` ask for another stage or a fresh optimizer. Raise
    UnsupportedError for states or weights that ZeRO cannot have, UsageError if there is no parameter.
    """
    asked = UniversalOptions.of(options)
    if source.training is None or asked.zero_stage or asked.fresh_optimizer:
        return _derived(source, options, rename)
    states = (source.states() or {}).get("state", {})
    renaming = [option for option, _ in steps_of(options.strip_prefix, options.rename)]
    given = [*_given(options, {"strip_prefix", "rename"}), *renaming]
    reason = "has no effect on a universal checkpoint, which stores all values unchanged"
    stage = source.training.stage
    training, warnings = _for_all_groups(source.training) if stage == 3 else (source.training, ())
    stages = ("ZeRO-3", "For ZeRO-1 and 2, use --zero-stage 1") if stage == 3 else ("ZeRO-1 and 2", _FOR_3)
    notes = (f"The universal checkpoint is for {stages[0]}, like INPUT. {stages[1]}.",) if stage else ()
    warnings = (*warnings, *_of_experts(training))
    return Resumable(training, source.weights, states, dict.fromkeys(given, reason), notes, warnings)


def _of_experts(training: Training) -> tuple[str, ...]:
    """Return a warning where DeepSpeed does not find its experts on all ranks."""
    if not any(re.fullmatch(EXPERT, name) for name in training.parameters):
        return ()
    warning = (
        "Load this universal checkpoint with ep_size=1: its experts are numbered across all ranks, but DeepSpeed "
        "expects numbers within each rank. With another ep_size, ranks load the wrong experts."
    )
    return (warning,)


def _for_all_groups(training: Training) -> tuple[Training, tuple[str, ...]]:
    """Leave out of what ZeRO-3 gives to all groups, which is what the first one has, the settings in which they differ;
    return warnings, too. The run's own settings then stay."""
    inner = training.common.get(_INNER)
    if not isinstance(inner, Mapping) or not isinstance(groups := inner.get(_GROUPS), list):
        return training, ()
    if not all(isinstance(group, Mapping) for group in groups):
        return training, ()
    keys = dict.fromkeys(key for group in groups for key in group if key not in _NO_HYPERPARAMETERS)
    differing = [key for key in keys if any(key not in one or one[key] != groups[0][key] for one in groups)]
    if not differing:
        return training, ()
    kept = [{key: value for key, value in group.items() if key not in differing} for group in groups]
    common = {**training.common, _INNER: {**inner, _GROUPS: kept}}
    warning = (
        f"The {len(groups)} groups of parameters differ in {some(differing, form=str)}. ZeRO-3 loads the same "
        "settings into all groups, so the universal checkpoint leaves these out, and the training run keeps its values."
    )
    if "lr" in differing:
        warning += (
            " If a schedule sets lr, the first step uses the schedule's initial lr, unless the run calls "
            "engine.lr_scheduler.step(engine.lr_scheduler.last_batch_iteration) after load_checkpoint."
        )
    return training._replace(common=common), (warning,)


def _given(options: Options, without: set[str] | frozenset[str]) -> list[str]:
    """Return the flags of the options about tensors, except `without`, that were given."""
    others = [other for other in TENSORS if other.name not in without]
    return [option.flags[0] for option in others if getattr(options, option.name) != option.default]


def _restated(source: Source, optimizer: Mapping[str, Any], options: Options, rename: Rename) -> Restated | None:
    """Return the states and groups as `source` is computed, such as by a map, which takes renamed parameters; None:
    unchanged."""
    if not any(way.states for way in computed.ways_of(source)):
        return None
    states, groups = optimizer["state"], optimizer["param_groups"]
    names = rename(
        dict.fromkeys([*states, *(name for group in groups for name in group["params"])]),
        options.strip_prefix,
        options.rename,
    )
    return computed.restated(
        source,
        {names[name]: state for name, state in states.items()},
        [{**group, "params": [names[name] for name in group["params"]]} for group in groups],
        {names[alias]: names[owner] for alias, owner in source.owners.items() if {alias, owner} <= names.keys()},
    )


def _derived(source: Source, options: Options, rename: Rename) -> Resumable:
    key = options.key or weights_key(source.weights)
    chosen = selected(source, options.replaced(key=key, dtype=_MASTER, structure=False), rename)
    if chosen.settled:
        raise UsageError(
            f"{source.path}: a universal checkpoint cannot contain tensors that must stay unchanged, such as "
            f"{some(sorted(chosen.settled), 3)} of --graft.",
            "Convert the weights with --graft to a directory, then that directory with --to dcp and --states, then "
            "that checkpoint with --to universal.",
        )
    if chosen.uncastable:
        raise UnsupportedError(
            f"{source.path} contains parts of quantized or otherwise composed tensors, which have no fp32 masters: "
            f"{some(sorted(chosen.uncastable))}.",
            "Convert the original weights, or leave these parts out with --exclude.",
        )
    aliases = selection.untie(chosen.tensors, chosen.owners)
    masters = {name: chosen.cast(name) for name in chosen.tensors if name not in aliases}
    masters = {name: tensor for name, tensor in masters.items() if tensor.dtype.name == _MASTER}
    asked = UniversalOptions.of(options)
    optimizer = None if asked.fresh_optimizer else source.states()
    named = {old: aliases.get(new, new) for old, new in chosen.names.items()}
    groups: list[dict[str, Any]] = [{"params": list(masters)}]
    warnings: list[str] = []
    equal = chosen.equal
    if optimizer is not None:
        if change := _restated(source, optimizer, options, rename):
            optimizer, equal = {"state": change.states, "param_groups": change.groups}, (*equal, *change.equal)
            named = {name: aliases.get(name, name) for name in chosen.tensors}
        groups = _groups(optimizer["param_groups"], named, masters)
        states = {named[old]: state for old, state in optimizer["state"].items() if old in named}
    elif source.training is not None:
        groups = [{"params": [named[name] for name in source.training.parameters if named.get(name) in masters]}]
    parameters = [name for group in groups for name in group["params"]]
    if not parameters and masters and optimizer is not None:
        raise UnsupportedError(
            f"{source.path}: no group of its optimizer contains a parameter of the output, so its states cannot be "
            "assigned to DeepSpeed's groups.",
            FRESH,
        )
    if not parameters:
        raise UsageError(f"{source.path} contains no parameters for a universal checkpoint.")
    masters = {name: masters[name] for name in parameters}
    step = (source.of_states.step or 0) if optimizer is not None else 0
    if optimizer is None:
        states = {name: _fresh(tensor) for name, tensor in masters.items()}
    else:
        states, warnings = _complete(states, masters, groups, step, source.path)
    rest = {name: untagged(tensor) for name, tensor in chosen.tensors.items() if name not in {*masters, *aliases}}
    model = _model(masters, groups, rest, aliases, step)
    stage = asked.zero_stage
    training = Training(
        stage=3 if stage == 3 else 1,
        parameters=parameters,
        common=_common(groups, len(parameters), step),
        models={name: model for name in (_MODEL, _MODEL_3) if stage is None or (stage == 3) is (name == _MODEL_3)},
    )
    unfit = _unfit_for_3(states, source.path) if stage in (None, 3) else ""
    if unfit and stage == 3:
        raise UnsupportedError(unfit, f"Use --zero-stage 1 for ZeRO-1 and 2. {FRESH}")
    if unfit:
        training = training._replace(models={_MODEL: model})
        warnings.append(f"{unfit} This universal checkpoint is only for ZeRO-1 and 2.")
    warnings.extend(_of_muon(states) if stage != 3 else ())
    if stage in (None, 3) and not unfit:
        training, of_groups = _for_all_groups(training)
        warnings.extend(of_groups)
    warnings.extend(_of_experts(training))
    reason = "has no effect on a universal checkpoint, which stores each fp32 master weight once"
    idle = {**dict.fromkeys(_given(options, _SELECTING | _OF_PARTS), reason), **chosen.idle(options)}
    notes = _notes(source, key if not options.key else "", optimizer is None, step, len(rest))
    return Resumable(training, masters, states, idle, notes, (*chosen.warnings, *warnings), equal, chosen.record)


def _notes(source: Source, key: str, fresh: bool, step: int, rest: int) -> tuple[str, ...]:
    notes = [f"Converted the weights under {key!r}; use --key for other weights."] if key else []
    if fresh:
        why = "" if source.of_states.error is None and source.optimizer is None else ", because of --fresh-optimizer"
        notes.append(
            f"The universal checkpoint starts with zero moments at step 0{why}. The training run that loads it sets "
            "the optimizer's hyperparameters."
        )
    elif source.of_states.step is None:
        notes.append(
            "The universal checkpoint contains the optimizer states, which record no steps: its step count starts at 0."
        )
    else:
        notes.append(f"The universal checkpoint continues at step {step}, with the moments of the optimizer.")
    if rest:
        notes.append(
            f"Not parameters: {count_of(rest, 'tensor')}. The model file stores them, but DeepSpeed does not load them "
            "from a universal checkpoint."
        )
    return tuple(notes)


def _groups(
    groups: Sequence[Mapping[str, Any]], named: Mapping[str, str], masters: Mapping[str, LazyTensor]
) -> list[dict[str, Any]]:
    """Return the groups with the parameters of `masters` that they have, each parameter once, and hyperparameters."""
    named_groups, seen = [], set()
    for group in groups:
        own = dict.fromkeys(named[name] for name in group["params"] if named.get(name) in masters)
        names = [name for name in own if name not in seen]
        seen.update(names)
        if names:
            hyper = {key: value for key, value in group.items() if key not in _NO_HYPERPARAMETERS}
            named_groups.append({**hyper, "params": names})
    return named_groups


def _fresh(master: LazyTensor) -> dict[str, Any]:
    """Return the states of Adam before the first step."""
    return {**{key: Zeros(DTYPES[_MASTER], master.shape) for key in _MOMENTS}, _STEP: _counter(0)}


def _unfit_for_3(states: Mapping[str, Mapping[str, Any]], where: str) -> str:
    """Return why ZeRO-3 cannot go on with states; "" if it can. It loads both moments of Adam, and nothing else."""
    for name, own in states.items():
        others = [key for key in own if key not in (*_MOMENTS, _STEP)]
        lacking = [key for key in _MOMENTS if key not in own]
        if others or lacking:
            has = f"has {some(others)}" if others else f"lacks {some(lacking)}"
            return f"{where}: {brief(name)} {has}, but ZeRO-3 loads exactly {some(_MOMENTS)} of each parameter."
    return ""


def _of_muon(states: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Return a warning where parameters have states of several optimizers."""
    kinds = {frozenset(key for key in own if key != _STEP) for own in states.values()}
    if len(kinds) < 2:
        return ()
    kind_texts = " and ".join(sorted(some(sorted(kind), form=str) for kind in kinds))
    warning = (
        f"The groups of parameters have states of several optimizers: {kind_texts}. With these, DeepSpeed's ZeRO-1 "
        "and 2 fail in the first step with Muon on several ranks. torch.distributed.checkpoint (--to dcp) supports "
        "such states."
    )
    return (warning,)


def _counter(step: int) -> LazyTensor:
    """Return a step as torch's optimizers have it."""
    return Inline(struct.pack("<f", step), DTYPES[_MASTER], ())


def _complete(
    states: Mapping[str, Mapping[str, Any]],
    masters: Mapping[str, LazyTensor],
    groups: Sequence[Mapping[str, Any]],
    step: int,
    where: str,
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the states of all `masters`: those in fp32 that there are; for a parameter that had no gradient yet, zeros
    for those that others of its group have; and warnings."""
    kept: dict[str, dict[str, Any]] = {}
    left: dict[str, None] = {}
    for name, master in masters.items():
        own = kept[name] = {}
        for key, value in states.get(name, {}).items():
            if key == _STEP:
                own[key] = View(untagged(value), value.dtype, value.shape) if isinstance(value, LazyTensor) else value
            elif isinstance(value, LazyTensor) and value.shape == master.shape:
                own[key] = selection.converted(f"{name}.{key}", untagged(value), _MASTER, widen_only=True)
            elif (
                value is None or isinstance(value, (int, float)) or (isinstance(value, LazyTensor) and value.numel == 1)
            ):
                left[str(key)] = None
            else:
                shape = (
                    f"has the shape {list(value.shape)}" if isinstance(value, LazyTensor) else ("is not a plain tensor")
                )
                raise UnsupportedError(
                    f"{where}: the state {brief(key)} of {brief(name)} {shape}, but the parameter has "
                    f"{list(master.shape)}: ZeRO supports only states with the shape of their parameter.",
                    FRESH,
                )
    without = []
    for group in groups:
        keys = dict.fromkeys(key for name in group["params"] for key in kept[name])
        keys = keys or dict.fromkeys(key for own in kept.values() for key in own)
        for name in group["params"]:
            if not keys.keys() <= kept[name].keys():
                without.append(name)
                zeros = {key: Zeros(DTYPES[_MASTER], masters[name].shape) for key in keys if key != _STEP}
                steps = {_STEP: _counter(step)} if _STEP in keys else {}
                kept[name] = {**steps, **zeros, **kept[name]}
    warnings = [f"Zero moments were written for parameters without states: {some(without)}."] if without else []
    if left:
        warnings.append(f"Left out the optimizer states {some(left)}: DeepSpeed does not support these.")
    return kept, warnings


def _common(groups: Sequence[Mapping[str, Any]], most: int, step: int) -> dict[str, Any]:
    """Return what `optimizer_state.pt` holds. An optimizer over these parameters has at most `most` groups."""
    hyper = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return {
        "ds_version": _VERSION,
        _GROUPS: [*hyper, *({} for _ in range(most - len(hyper)))],
        _INNER: {
            "state": {index: {_STEP: _counter(step)} for index in range(len(hyper))},
            _GROUPS: [{**group, "params": [index]} for index, group in enumerate(hyper)],
        },
    }


def _model(
    masters: Mapping[str, LazyTensor],
    groups: Sequence[Mapping[str, Any]],
    rest: Mapping[str, LazyTensor],
    aliases: Mapping[str, str],
    step: int,
) -> dict[str, Any]:
    """Return what a model file holds. Weights are not in it: DeepSpeed loads them from the directory `zero`."""
    return {
        "module": OrderedDict(rest),
        "buffer_names": list(rest),
        "optimizer": None,
        "param_shapes": [
            OrderedDict((name, Size(masters[name].shape)) for name in group["params"]) for group in groups
        ],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {alias: owner for alias, owner in aliases.items() if owner in masters or owner in rest},
        # DeepSpeed's schedulers take the first entry, torch's the others.
        "lr_scheduler": {
            "last_batch_iteration": step - 1,
            "last_epoch": step,
            "_step_count": step + 1,
            "lr_lambdas": [],
            "_schedulers": [],
        },
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": set(),
        "skipped_steps": 0,
        "global_steps": step,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _VERSION,
    }
