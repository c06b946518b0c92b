"""What the files of a DeepSpeed checkpoint say, as typed records. Nothing in a pickle is believed unchecked.

Source: DeepSpeed's engine.py (_save_checkpoint, _save_zero_checkpoint) and the state_dict() of its ZeRO optimizers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.storage import basename
from ckptconv.tensors import File, LazyTensor, untagged
from ckptconv.tree import Global, Opaque

from .torch_file import fingerprint, read_torch
from .torch_zip import TorchFile
from .zero_layout import Shape


class Fields:
    """A dict from a pickle, whose values are what the caller expects or a CorruptError."""

    def __init__(self, values: Any, where: str, path: str = "") -> None:
        if not isinstance(values, dict):
            raise CorruptError(f"{where}: {path or 'the object'} is {_kind(values)}, where a dict was expected.")
        self.values, self.where, self.path = values, where, path

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The value of `key`; `default` where it is absent or None."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            expected = " or ".join(each.__name__ for each in kinds)
            raise CorruptError(f"{self.where}: {self._name(key)} is {_kind(value)}, where {expected} was expected.")
        return value

    def fields(self, key: str) -> Fields:
        if key not in self.values:
            raise CorruptError(f"{self.where}: {self._name(key)} is missing. It is not a file that DeepSpeed writes.")
        return Fields(self.values[key], self.where, self._name(key))

    def tensors(self, key: str) -> list[LazyTensor]:
        """A list of 1-D tensors."""
        values = self.get(key, (list, tuple), [])
        for value in values:
            if not isinstance(value, LazyTensor) or len(value.shape) != 1:
                raise CorruptError(
                    f"{self.where}: {self._name(key)} holds {_kind(value)}, where 1-D tensors were expected."
                )
        return [untagged(value) for value in values]

    def named_tensors(self, key: str) -> dict[str, LazyTensor]:
        """A dict from names to tensors; what is neither is left out."""
        values = self.get(key, dict, {})
        return {
            name: untagged(value)
            for name, value in values.items()
            if isinstance(name, str) and isinstance(value, LazyTensor)
        }

    def shapes(self, values: Any, key: str) -> dict[str, Shape]:
        if not isinstance(values, dict):
            raise CorruptError(
                f"{self.where}: {self._name(key)} holds {_kind(values)}, where names and shapes were expected."
            )
        for name, shape in values.items():
            sizes_ok = isinstance(shape, tuple) and all(type(size) is int and 0 <= size < 1 << 63 for size in shape)
            if not isinstance(name, str) or not sizes_ok:
                raise CorruptError(f"{self.where}: {self._name(key)} gives {name!r} the shape {shape!r:.80}.")
        return {name: tuple(shape) for name, shape in values.items()}

    def _name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key


def _kind(value: Any) -> str:
    if isinstance(value, Opaque):
        return f"an object of {value.name}"
    if isinstance(value, LazyTensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"of type {type(value).__name__}"


@dataclass
class ModelFile:
    """What a model file says; None where it is silent, as old releases were.

    `extras` are entries of the module that are not tensors. `values` is everything, with what a client added.
    """

    file: File
    module: dict[str, LazyTensor] | None
    extras: list[str]
    buffers: list[str] | None
    shapes: list[dict[str, Shape]] | None
    frozen: dict[str, Shape] | None
    fragments: dict[str, LazyTensor]
    shared: dict[str, str]
    config: dict[str, Any]
    version: str
    universal: dict[str, Any] | None
    values: dict[str, Any]


@dataclass
class OptimFile:
    """What an optimizer file says.

    `counts` is how many ranks share each group, one number for all under ZeRO-3. `masters` are this rank's fp32
    partitions by group. `alignments` are the elements of padding behind each parameter of each group, `paddings` those
    at the end of this rank's partitions, `fragments` by group where parameters lie in this rank's partition (name →
    start and elements). `states` are by group the optimizer states as the file has them, `hyper` the param_groups,
    `values` everything.
    """

    file: File
    stage: int | None
    counts: list[int]
    masters: list[LazyTensor]
    alignments: list[list[int]]
    paddings: list[int]
    fragments: list[dict[str, tuple[int, int]]]
    states: list[dict[str, Any]]
    hyper: list[dict[str, Any]]
    shapes: list[dict[str, Shape]] | None
    config: dict[str, Any]
    universal: dict[str, Any] | None
    values: dict[str, Any]

    def common(self) -> dict[str, Any]:
        """What it says of the optimizer as a whole: everything but partitions and where they lie."""
        parts = {
            "base_optimizer_state",
            "param_slice_mappings",
            "single_partition_of_fp32_groups",
            "fp32_flat_groups",
            "optimizer_state_dict",
        }
        common = {key: value for key, value in self.values.items() if key not in parts}
        if self.stage == 3:
            # DeepSpeed looks for the steps of ZeRO-3 there, and for nothing else.
            steps = {index: {"step": state["step"]} for index, state in enumerate(self.states) if "step" in state}
            common["optimizer_state_dict"] = {"state": steps, "param_groups": self.hyper}
        return {**common, "param_groups": self.hyper}


@dataclass
class Reading:
    """Files read so far, and what all of them add to the source."""

    options: dict[str, Any] | None
    opaque: dict[str, None] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    bytes_read: int = 0

    def read(self, file: File, name: str = "") -> TorchFile:
        """Open a file, which the checkpoint calls `name`; by default, by its own."""
        torch_file = read_torch(file, self.options)
        self.opaque.update(dict.fromkeys(map(str, torch_file.opaque)))
        self.inputs[name or basename(file.path)] = fingerprint(torch_file)
        self.bytes_read += torch_file.bytes_read
        return torch_file

    def model(self, file: File) -> ModelFile:
        fields = Fields(self.read(file).value, file.path)
        shapes = fields.get("param_shapes", (list, dict))
        frozen = fields.get("frozen_param_shapes", dict)
        module = fields.get("module", dict)
        return ModelFile(
            file=file,
            module=None if module is None else fields.named_tensors("module"),
            extras=[str(name) for name, value in (module or {}).items() if not isinstance(value, LazyTensor)],
            buffers=_strings(fields, "buffer_names"),
            shapes=_shape_list(fields, shapes),
            frozen=None if frozen is None else fields.shapes(frozen, "frozen_param_shapes"),
            fragments=fields.named_tensors("frozen_param_fragments"),
            shared=_aliases(fields),
            config=fields.get("ds_config", dict, {}),
            version=fields.get("ds_version", str, ""),
            universal=fields.get("universal_checkpoint_info", dict),
            values=fields.values,
        )

    def layer(self, file: File) -> dict[str, LazyTensor]:
        """A pipeline layer's tensors, by names relative to the layer."""
        return Fields({"layer": self.read(file).value}, file.path).named_tensors("layer")

    def optim(self, file: File) -> OptimFile:
        top = Fields(self.read(file).value, file.path)
        fields = top.fields("optimizer_state_dict")
        flat = "fp32_flat_groups" in fields.values
        masters = fields.tensors("fp32_flat_groups" if flat else "single_partition_of_fp32_groups")
        if not flat and "single_partition_of_fp32_groups" not in fields.values:
            raise UnsupportedError(
                f"{file.path} holds no fp32 partitions (neither fp32_flat_groups nor single_partition_of_fp32_groups).",
                "It was not written by one of DeepSpeed's ZeRO optimizers.",
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
            states=states,
            hyper=hyper,
            shapes=_shape_list(top, top.get("param_shapes", (list, dict))),
            config=top.get("ds_config", dict, {}),
            universal=fields.get("universal_checkpoint_info", dict),
            values=fields.values,
        )


def _list(fields: Fields, key: str) -> list[Any]:
    values: list[Any] = fields.get(key, list, [])
    return values


def _sizes(fields: Fields, key: str, values: Any) -> list[int]:
    if not isinstance(values, list) or not all(type(size) is int and size >= 0 for size in values):
        raise CorruptError(f"{fields.where}: {key} holds {values!r:.80}, where sizes were expected.")
    return values


def _partition_counts(fields: Fields) -> list[int]:
    counts = fields.get("partition_count", (int, list), 0)
    return _sizes(fields, "partition_count", counts if isinstance(counts, list) else [counts])


def _fragments(group: Any) -> dict[str, tuple[int, int]]:
    """name → (start, elements), from deepspeed.utils.tensor_fragment.fragment_address; {} if it is not that."""
    found = {}
    for name, address in group.items() if isinstance(group, dict) else ():
        state = address.state[0] if isinstance(address, Opaque) and address.state else None
        if not isinstance(state, dict) or type(state.get("start")) is not int or type(state.get("numel")) is not int:
            return {}
        found[name] = (state["start"], state["numel"])
    return found


def _optimizer_states(fields: Fields, flat: bool, groups: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The optimizer states by group, and the param_groups: torch's state dict, or an elastic checkpoint's list."""
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


def _stage(fields: Fields) -> int | None:
    """The ZeRO stage: an enum member, a plain int before 0.7.0, and not said at all by BF16_Optimizer."""
    value = fields.values.get("zero_stage")
    if isinstance(value, Opaque) and isinstance(value.cls, Global) and value.cls.name == "ZeroStageEnum" and value.args:
        value = value.args[0]
    if value is None or (type(value) is int and 0 <= value <= 3):
        return value
    raise CorruptError(f"{fields.where}: zero_stage is {_kind(value)}, where a number from 0 to 3 was expected.")


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
        raise CorruptError(f"{fields.where}: {key} holds something other than names.")
    return None if values is None else list(values)


def _aliases(fields: Fields) -> dict[str, str]:
    values = fields.get("shared_params", (dict, list), {})
    pairs = values.items() if isinstance(values, dict) else values
    try:
        aliases = dict(pairs)
    except (TypeError, ValueError):
        aliases = {None: None}
    if not all(isinstance(name, str) for pair in aliases.items() for name in pair):
        raise CorruptError(f"{fields.where}: shared_params holds something other than pairs of names.")
    return aliases
