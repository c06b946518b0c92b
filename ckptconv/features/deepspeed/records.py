"""Parse the files of a DeepSpeed checkpoint into typed records. Every value from a pickle is checked.

Source: DeepSpeed's engine.py (_save_checkpoint, _save_zero_checkpoint) and the state_dict() of its ZeRO optimizers.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.deepspeed.locate import described, identity
from ckptconv.features.deepspeed.partitions import Shape
from ckptconv.formats.torch.container import TorchFile
from ckptconv.formats.torch.file import read_torch
from ckptconv.formats.torch.input_log import InputLog
from ckptconv.formats.values import CODES, first_bytes
from ckptconv.pickles.nodes import Global, Opaque
from ckptconv.storage import LOCAL_SIGNATURE
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename
from ckptconv.storage.zip_directory import END, END_SIGNATURE
from ckptconv.tensors.lazy import LazyTensor, Stored, Tagged, untagged
from ckptconv.tensors.moves import File
from ckptconv.text import brief

_T = TypeVar("_T")

# More ranks than any training has.
MAX_RANKS = 1 << 24


class Fields:
    """A dict from a pickle. Its methods return values of the expected types, or raise CorruptError."""

    def __init__(self, values: Any, where: str, path: str = "") -> None:
        if not isinstance(values, dict):
            raise CorruptError(f"{where}: {path or 'the object'} is {_kind(values)}, but a dict was expected.")
        self.values, self.where, self.path = values, where, path

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return the value of `key`; `default` if it is absent or None."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            expected = " or ".join(one_kind.__name__ for one_kind in kinds)
            raise CorruptError(
                f"{self.where}: {self._name(key)} is {_kind(value)}, but the type {expected} was expected."
            )
        return value

    def fields(self, key: str) -> Fields:
        if key not in self.values:
            raise CorruptError(f"{self.where}: {self._name(key)} is missing. DeepSpeed writes no file without it.")
        return Fields(self.values[key], self.where, self._name(key))

    def tensors(self, key: str) -> list[LazyTensor]:
        """Return a list of 1-D tensors."""
        values = self.get(key, (list, tuple), [])
        for value in values:
            if not isinstance(value, LazyTensor) or len(value.shape) != 1:
                raise CorruptError(
                    f"{self.where}: an entry of {self._name(key)} is {_kind(value)}, but a 1-D tensor was expected."
                )
        return [untagged(value) for value in values]

    def named_tensors(self, key: str) -> dict[str, LazyTensor]:
        """Return {name: tensor}; other entries are left out."""
        values = self.get(key, dict, {})
        return {
            name: untagged(value)
            for name, value in values.items()
            if isinstance(name, str) and isinstance(value, LazyTensor)
        }

    def shapes(self, values: Any, key: str) -> dict[str, Shape]:
        if not isinstance(values, dict):
            raise CorruptError(
                f"{self.where}: an entry of {self._name(key)} is {_kind(values)}, but a dict of names and shapes was "
                "expected."
            )
        for name, shape in values.items():
            sizes_ok = isinstance(shape, tuple) and all(type(size) is int and 0 <= size < 1 << 63 for size in shape)
            if not isinstance(name, str) or not sizes_ok:
                raise CorruptError(
                    f"{self.where}: {self._name(key)} gives {brief(name)} the invalid shape {brief(shape)}."
                )
        return {name: tuple(shape) for name, shape in values.items()}

    def _name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key


def _kind(value: Any) -> str:
    if isinstance(value, Opaque):
        return f"an object of {value.name}"
    if isinstance(value, LazyTensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"of type {type(value).__name__}"


def misfit(file: File, what: str, value: Any, numel: int) -> CorruptError:
    """Return the error for `what` of `file`, which is `value` and should be a tensor of `numel` elements."""
    actual = "is missing" if value is None else f"is {_kind(value)}"
    expected = f"the shape [{numel}] was" if getattr(value, "numel", -1) == numel else f"{numel} elements were"
    return CorruptError(f"{file.path}: {what} {actual}, but {expected} expected.")


class FusedExperts(NamedTuple):
    """A layer of experts whose weights are fused into one tensor each (AutoEP): `prefix`.w1 and so on.

    `experts` lists, for each expert-parallel rank, the numbers of its experts in their order there.
    """

    prefix: str
    experts: list[list[int]]


class _Settings:
    """The settings of the run, which every file of it repeats."""

    config: dict[str, Any]
    version: str

    @property
    def zero(self) -> dict[str, Any]:
        """The settings of ZeRO."""
        settings: dict[str, Any] = _if(dict, self.config.get("zero_optimization"), {})
        return settings

    def release(self) -> tuple[int, ...]:
        """Return the release of DeepSpeed that wrote it; () if it does not say, as before 0.4.2."""
        match = re.match(r"(\d+)\.(\d+)\.(\d+)", self.version)
        return tuple(map(int, match.groups())) if match else ()


@dataclass
class ModelFile(_Settings):
    """The contents of a model file. A field is None if the file lacks it, as those of old releases do.

    `storages` maps entries of the module to their storages: equal ones shared memory. `extras` are the module's entries
    that are not tensors. `fused` are the layers of fused experts; `native`: ZeRO-3 partitioned these over fewer ranks
    than there are. `values` is everything, including a client's entries, which may have replaced DeepSpeed's.
    """

    file: File
    module: dict[str, LazyTensor] | None
    storages: dict[str, Hashable]
    extras: list[str]
    buffers: list[str] | None
    shapes: list[dict[str, Shape]] | None
    frozen: dict[str, Shape] | None
    fragments: dict[str, LazyTensor]
    shared: dict[str, str]
    config: dict[str, Any]
    version: str
    universal: dict[str, Any] | None
    fused: list[FusedExperts]
    native: bool
    values: dict[str, Any]

    def number(self, key: str) -> int | None:
        """Return the count under `key`, if there is one."""
        value = self.values.get(key)
        return value if type(value) is int and 0 < value < MAX_RANKS else None


@dataclass
class OptimFile(_Settings):
    """The contents of an optimizer file.

    `counts` is the number of ranks that share each group; under ZeRO-3 one number for all. `masters` are this rank's
    fp32 partitions by group. `alignments` are the elements of padding after each parameter of each group; `paddings`
    are those at the end of this rank's partitions. `fragments` maps, by group, each name to its start and elements in
    this rank's partition. `whole` are, by group, the states that are said to hold whole parameters; None if nothing is
    said. `states` are the optimizer states by group, as the file has them; `hyper` is its param_groups; `values` is
    everything. `native`: its groups are partitioned over different numbers of ranks, as ZeRO-3 does with fused experts.
    """

    file: File
    stage: int | None
    counts: list[int]
    masters: list[LazyTensor]
    alignments: list[list[int]]
    paddings: list[int]
    fragments: list[dict[str, tuple[int, int]]]
    whole: list[set[str]] | None
    states: list[dict[str, Any]]
    hyper: list[dict[str, Any]]
    shapes: list[dict[str, Shape]] | None
    config: dict[str, Any]
    version: str
    universal: dict[str, Any] | None
    native: bool
    values: dict[str, Any]

    @property
    def round_robin(self) -> bool:
        """Whether ZeRO reordered the parameters of a group, to spread their gradients over the ranks."""
        return bool(self.zero.get("round_robin_gradients"))

    @property
    def data_first(self) -> bool:
        """Whether the ranks that share experts are neighbours."""
        return self.config.get("use_data_before_expert_parallelism") is True

    def count(self, group: int) -> int:
        """Return the number of ranks that share a group; 0 if the file does not record it."""
        return self.counts[group] if group < len(self.counts) else 0

    def uses_muon(self, group: int) -> bool:
        """Return whether Muon trains a group. In elastic checkpoints, without param_groups, only the optimizer's name
        shows it."""
        if self.hyper:
            return any(
                hyper.get("use_muon") is True and group in params
                for hyper in self.hyper
                if isinstance(params := hyper.get("params"), list)
            )
        optimizer = self.config.get("optimizer")
        return isinstance(optimizer, dict) and str(optimizer.get("type")).lower() == "muon"

    def common(self) -> dict[str, Any]:
        """Return the parts of the file about the whole optimizer: everything except partitions and their places."""
        parts = {
            "base_optimizer_state",
            "param_slice_mappings",
            "single_partition_of_fp32_groups",
            "fp32_flat_groups",
            "optimizer_state_dict",
        }
        common = {key: value for key, value in self.values.items() if key not in parts}
        if self.stage == 3:
            # DeepSpeed looks here for the steps of ZeRO-3, and for nothing else.
            steps = {index: {"step": state["step"]} for index, state in enumerate(self.states) if "step" in state}
            common["optimizer_state_dict"] = {"state": steps, "param_groups": self.hyper}
        return {**common, "param_groups": self.hyper}


@dataclass
class Reading:
    """Reads files, and keeps a log of them."""

    place: Location
    log: InputLog = field(default_factory=InputLog)
    stems: dict[str, str] = field(default_factory=dict)

    def read(self, file: File, name: str = "") -> TorchFile:
        """Open a file. `name` identifies it among the inputs; the default is its own name."""
        torch_file = read_torch(self.place.at(file))
        self.stems[file.path] = torch_file.stem
        self.log.add(torch_file, name or basename(file.path))
        return torch_file

    def model(self, file: File) -> ModelFile:
        fields = Fields(self.read(file).value, file.path)
        shapes = fields.get("param_shapes", (list, dict))
        frozen = fields.get("frozen_param_shapes", dict)
        module = fields.get("module", dict)
        fused, native = _fused_experts(fields)
        return ModelFile(
            file=file,
            module=None if module is None else fields.named_tensors("module"),
            storages={
                name: tensor.facts.storage for name, tensor in (module or {}).items() if isinstance(tensor, Tagged)
            },
            extras=[str(name) for name, value in (module or {}).items() if not isinstance(value, LazyTensor)],
            buffers=_strings(fields, "buffer_names"),
            shapes=_shape_list(fields, shapes),
            frozen=None if frozen is None else fields.shapes(frozen, "frozen_param_shapes"),
            fragments=fields.named_tensors("frozen_param_fragments"),
            shared=_aliases(fields),
            config=_if(dict, fields.values.get("ds_config"), {}),
            version=_if(str, fields.values.get("ds_version"), ""),
            universal=fields.get("universal_checkpoint_info", dict),
            fused=fused,
            native=native,
            values=fields.values,
        )

    def glance(self, file: File) -> None:
        """Raise CorruptError for a file that is empty, or a zip archive without its end record."""
        with self.place.at(file).open_reader() as reader:
            if reader.read_at(0, min(len(LOCAL_SIGNATURE), file.size)) != LOCAL_SIGNATURE:
                whole = file.size > 0
            else:
                size = min(END.size, file.size)
                whole = END_SIGNATURE in reader.read_at(file.size - size, size)
        if not whole:
            raise CorruptError(
                f"{file.path} is {'truncated' if file.size else 'empty'}: the save or a copy was interrupted.",
                "Copy it again, or use another tag.",
            )

    def tensors(self, file: File) -> dict[str, LazyTensor]:
        """Return the tensors of a file that holds only tensors: a pipeline's layer, or an expert."""
        tensors = Fields({"tensors": self.read(file).value}, file.path).named_tensors("tensors")
        self.check_name(file)
        return tensors

    def check_name(self, file: File) -> None:
        """Raise CorruptError if a file's archive says that it was written as another rank's file."""
        stem = self.stems[file.path]
        now, then = identity(basename(file.path)), identity(f"{stem}.pt")
        if now and then and now != then:
            raise CorruptError(
                f"{file.path} was written as {stem}.pt: it contains the data of {described(*then)}, but has the "
                f"name of {described(*now)}.",
                "Replace it with the right file.",
            )

    def steps(self, state: dict[str, Any]) -> int | float | None:
        """Return the number of steps of an optimizer when it saved `state`, if recorded."""
        step = state.get("step")
        if isinstance(step, LazyTensor) and step.numel == 1 and step.dtype.name in CODES:
            stored = untagged(step)
            if isinstance(stored, Stored):
                (step,) = struct.unpack(CODES[step.dtype.name], self.head(stored, step.nbytes))
        return step if type(step) in (int, float) else None

    def head(self, tensor: LazyTensor, limit: int) -> bytes:
        """Return the first bytes of a tensor, at most `limit`."""
        data, read = first_bytes(tensor, limit, self.place.options)
        self.log.bytes_read += read
        return data

    def optim(self, file: File) -> OptimFile:
        top = Fields(self.read(file).value, file.path)
        fields = top.fields("optimizer_state_dict")
        flat = "fp32_flat_groups" in fields.values
        masters = fields.tensors("fp32_flat_groups" if flat else "single_partition_of_fp32_groups")
        if not flat and "single_partition_of_fp32_groups" not in fields.values:
            raise UnsupportedError(
                f"{file.path} contains no fp32 partitions (neither fp32_flat_groups nor "
                "single_partition_of_fp32_groups).",
                "It was not written by a ZeRO optimizer of DeepSpeed.",
            )
        states, hyper = _optimizer_states(fields, flat, len(masters))
        return OptimFile(
            file=file,
            stage=3 if flat else _stage(fields),
            counts=_partition_counts(fields),
            masters=masters,
            alignments=[
                _sizes(fields, "param_alignment_paddings", group) for group in _list(fields, "param_alignment_paddings")
            ],
            paddings=_sizes(fields, "group_paddings", _list(fields, "group_paddings")),
            fragments=[_fragments(group) for group in _list(fields, "param_slice_mappings")],
            whole=_whole_states(fields.values.get("whole_param_optimizer_states"), len(masters)),
            states=states,
            hyper=hyper,
            shapes=_shape_list(top, top.get("param_shapes", (list, dict))),
            config=_if(dict, top.values.get("ds_config"), {}),
            version=_if(str, top.values.get("ds_version"), ""),
            universal=fields.get("universal_checkpoint_info", dict),
            native=bool(fields.get("ds_zero_partition_groups", list)),
            values=fields.values,
        )


def _if(kind: type[_T], value: Any, default: _T) -> _T:
    """Return `value` if it has the type, else `default`. It is for values that no element depends on and a client may
    have replaced: the configuration can be a path."""
    return value if isinstance(value, kind) else default


def _fused_experts(fields: Fields) -> tuple[list[FusedExperts], bool]:
    """Return the layers of fused experts, and whether other numbers of ranks share these than the other parameters."""
    fused = []
    layers = fields.get("ds_autoep_layers", list) or fields.get("autoep_layers", list, [])
    for layer in layers:
        inner = Fields(layer, fields.where, "ds_autoep_layers")
        prefix, total = inner.get("expert_key_prefix", str), inner.get("num_experts", int, 0)
        ranks, local = inner.get("ep_size", int, 0), inner.get("num_local_experts", int, 0)
        placement = inner.get("expert_placement", dict)
        experts: list[list[int]] = []
        if placement is not None:
            entries = Fields(placement, fields.where, "expert_placement").get("ranks", list, [])
            by_rank = [Fields(entry, fields.where, "expert_placement") for entry in entries]
            by_rank.sort(key=lambda entry: entry.get("rank", int, 0))
            experts = [entry.get("experts", list, []) for entry in by_rank]
        elif 0 < ranks <= total < 1 << 20 and ranks * local == total:
            experts = [list(range(rank * local, (rank + 1) * local)) for rank in range(ranks)]
        numbers = [number for held in experts for number in held if type(number) is int]
        if prefix is None or not numbers or len(numbers) != total or sorted(numbers) != list(range(len(numbers))):
            raise CorruptError(
                f"{fields.where}: ds_autoep_layers records {brief(total)} experts of {brief(prefix)} on "
                f"{brief(ranks)} ranks, with {brief(local)} per rank, but lists the experts {brief(numbers)}."
            )
        fused.append(FusedExperts(prefix, experts))
    return fused, any(layer.get("checkpoint_format") == "zero3_partitioned" for layer in layers)


def _list(fields: Fields, key: str) -> list[Any]:
    values: list[Any] = fields.get(key, list, [])
    return values


def _sizes(fields: Fields, key: str, values: Any) -> list[int]:
    if not isinstance(values, list) or not all(type(size) is int and size >= 0 for size in values):
        raise CorruptError(f"{fields.where}: {key} is {brief(values, 80)}, but a list of sizes was expected.")
    return values


def _partition_counts(fields: Fields) -> list[int]:
    counts = fields.get("partition_count", (int, list), 0)
    counts = _sizes(fields, "partition_count", counts if isinstance(counts, list) else [counts])
    if max(counts, default=0) > MAX_RANKS:
        raise CorruptError(f"{fields.where}: partition_count is {brief(max(counts))}, more than {MAX_RANKS}.")
    return counts


def _fragments(group: Any) -> dict[str, tuple[int, int]]:
    """Return {name: (start, elements)} from deepspeed.utils.tensor_fragment.fragment_address; {} if it is not that."""
    fragments = {}
    for name, address in group.items() if isinstance(group, dict) else ():
        state = address.state[0] if isinstance(address, Opaque) and address.state else None
        if not isinstance(state, dict) or type(state.get("start")) is not int or type(state.get("numel")) is not int:
            return {}
        fragments[name] = (state["start"], state["numel"])
    return fragments


def _optimizer_states(fields: Fields, flat: bool, groups: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the optimizer states by group, and the param_groups, of torch's state dict or an elastic checkpoint."""
    key = "optimizer_state_dict" if flat else "base_optimizer_state"
    inner = fields.get(key, (dict, list), {})
    if isinstance(inner, list):
        step = fields.values.get("base_optimizer_state_step")
        extra = {} if step is None else {"step": step}
        return [{**extra, **state} for state in inner if isinstance(state, dict)], []
    states, hyper = inner.get("state", {}), inner.get("param_groups", [])
    if not isinstance(states, dict) or not all(isinstance(state, dict) for state in states.values()):
        raise CorruptError(f"{fields.where}: {key}.state is not a dict of dicts.")
    if not isinstance(hyper, list) or not all(isinstance(group, dict) for group in hyper):
        raise CorruptError(f"{fields.where}: {key}.param_groups is not a list of dicts.")
    return [states.get(index, {}) for index in range(groups)], hyper


def _whole_states(said: Any, groups: int) -> list[set[str]] | None:
    """Return by group the states that are said to hold whole parameters. The file says it by group, or once for all."""
    if isinstance(said, dict):
        said = [said.get(group, ()) for group in range(groups)]
    if not isinstance(said, (list, tuple, set)):
        return None
    if all(isinstance(name, str) for name in said):
        return [{*said}] * groups
    if len(said) != groups or not all(isinstance(names, (list, tuple, set)) for names in said):
        return None
    return [{str(name) for name in names} for names in said]


def _stage(fields: Fields) -> int | None:
    """Return the ZeRO stage: an enum member, a plain int before 0.7.0; None for BF16_Optimizer, which does not say."""
    value = fields.values.get("zero_stage")
    if isinstance(value, Opaque) and isinstance(value.cls, Global) and value.cls.name == "ZeroStageEnum" and value.args:
        value = value.args[0]
    if value is None or (type(value) is int and 0 <= value <= 3):
        return value
    shown = brief(value) if type(value) is int else _kind(value)
    raise CorruptError(f"{fields.where}: zero_stage is {shown}, but a number from 0 to 3 was expected.")


def _shape_list(fields: Fields, shapes: Any) -> list[dict[str, Shape]] | None:
    if shapes is None:
        return None
    if isinstance(shapes, dict) and not all(isinstance(shape, dict) for shape in shapes.values()):
        shapes = [shapes]
    elif isinstance(shapes, dict):
        shapes = list(shapes.values())
    return [fields.shapes(group, "param_shapes") for group in shapes]


def _strings(fields: Fields, key: str) -> list[str] | None:
    values = fields.get(key, (list, tuple, set))
    if values is not None and not all(isinstance(value, str) for value in values):
        raise CorruptError(f"{fields.where}: {key} contains values other than names.")
    return None if values is None else list(values)


def _aliases(fields: Fields) -> dict[str, str]:
    values = fields.get("shared_params", (dict, list), {})
    pairs = values.items() if isinstance(values, dict) else values
    try:
        aliases = dict(pairs)
    except (TypeError, ValueError):
        aliases = {None: None}
    if not all(isinstance(name, str) for pair in aliases.items() for name in pair):
        raise CorruptError(f"{fields.where}: shared_params contains values other than pairs of names.")
    return aliases
