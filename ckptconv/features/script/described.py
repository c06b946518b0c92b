"""Reads the weights of TorchScript archives of torch 1.0 to 1.2, whose `model.json` describes modules and tensors.

Source: `caffe2/proto/torch.proto` and `torch/csrc/jit/{export,import_legacy,pickler}.cpp` of these releases. The text
is a ModelDef in protobuf's JSON: 64-bit integers may be text, and fields may be missing. It has a table of tensors,
each a view of a member under `tensors/`, and a tree of modules whose parameters are indices into that table. Other
attributes are indices into `attributes.pkl`, a pickle that refers to the same table. Since torch 1.2 buffers are among
the attributes, and nothing distinguishes them from other tensors.
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.modules.packed import MAX_DEPTH, Paths
from ckptconv.features.script.weights import ScriptWeights, finished, unsupported
from ckptconv.formats.torch.container import SCRIPT_ATTRIBUTES, SCRIPT_DESCRIPTION, SCRIPT_RECORDS
from ckptconv.pickles.children import is_tensor
from ckptconv.pickles.machine import Loaded
from ckptconv.pickles.nodes import Global, Opaque
from ckptconv.pickles.vocabulary import MalformedError, RefusedError, Vocabulary
from ckptconv.storage import strict_json
from ckptconv.text import brief, count_of

# Versions of the description: the last one, and the first with attributes.pkl.
_NEWEST, _WITH_ATTRIBUTES = 5, 2
# From caffe2's data types to the prefixes of storage classes.
_KINDS = {
    "FLOAT": "Float",
    "DOUBLE": "Double",
    "FLOAT16": "Half",
    "INT64": "Long",
    "INT32": "Int",
    "INT16": "Short",
    "INT8": "Char",
    "UINT8": "Byte",
    "BYTE": "Byte",
    "BOOL": "Bool",
}
_QUANTIZED = {"Char": "QInt8", "Byte": "QUInt8", "Int": "QInt32"}
_ITEM_SIZES = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "QInt32": 4, "Half": 2, "Short": 2}
_INTEGER = re.compile("-?[0-9]{1,19}")
_TENSOR_FROM_ID = ("torch.jit._pickle", "build_tensor_from_id")
# Objects of torch 1.1, whose state is the index of a tensor, or a list.
_TENSOR_ID, _INT_LIST = ("__main__", "TensorID"), ("__main__", "IntList")


class Archive(NamedTuple):
    """The access to an archive that `weights` needs.

    `size` returns the bytes of a record by its key without `SCRIPT_RECORDS`, None if there is none. `words` resolves
    the persistent ids of records. `attributes` reads `SCRIPT_ATTRIBUTES` with a vocabulary.
    """

    path: str
    size: Callable[[str], int | None]
    words: Vocabulary
    attributes: Callable[[Vocabulary], Loaded]


def weights(description: bytes, archive: Archive) -> tuple[ScriptWeights, Loaded]:
    """Return the weights that `description` lists, and the attributes.

    Raises CorruptError if it contradicts itself or the archive, UnsupportedError if its version or contents are
    unknown, or if it lacks weights that only the program can create.
    """
    try:
        model = _object(_parsed(description))
        version = _integer(model, "protoVersion")
        if not 0 <= version <= _NEWEST:
            raise RefusedError(f"is of version {version}; versions 0 to {_NEWEST} are supported")
        table = [_tensor(_object(definition), archive) for definition in _list(model, "tensors")]
        loaded = Loaded((), 0, (), ())
        if version >= _WITH_ATTRIBUTES:
            loaded = archive.attributes(_with_table(archive.words, table))
        if not isinstance(loaded.value, (list, tuple)):
            raise MalformedError(f"has attributes in {SCRIPT_ATTRIBUTES} that are not in a list")
        modules = _Modules(table, loaded.value, archive.path)
        modules.collect(_object(model.get("mainModule")), "", 0)
    except RefusedError as reason:
        raise UnsupportedError(f"{archive.path} ({SCRIPT_DESCRIPTION}) {reason}.") from None
    except MalformedError as reason:
        raise CorruptError(f"{archive.path} ({SCRIPT_DESCRIPTION}) {reason}.") from None
    known = tuple(cls for cls in loaded.opaque if (cls.module, cls.name) not in (_TENSOR_ID, _INT_LIST))
    return finished(modules.found, modules.rest, archive.path), loaded._replace(opaque=known)


def _parsed(description: bytes) -> Any:
    try:
        return strict_json.parse(str(description, "utf-8"))
    except UnicodeDecodeError:
        raise MalformedError("is not UTF-8") from None
    except ValueError as reason:
        raise MalformedError(str(reason).removeprefix("it ")) from None


# ----------------------------------------------------------------------------------------------------------- tensors


def _tensor(definition: dict[str, Any], archive: Archive) -> Any:
    """Return the tensor that a TensorDef describes: a view of a record, with offset and strides in elements."""
    kind = _KINDS.get(_text(definition, "dataType"))
    quantized = _flag(definition, "isQuantized")
    if quantized:
        kind = _QUANTIZED.get(kind or "")
    if kind is None:
        raise RefusedError(f"has a tensor of the unknown type {brief(definition['dataType'])}")
    # torch rejects a tensor without a device.
    _text(definition, "device")
    named = _text(_object(definition.get("data")), "key")
    key = named.removeprefix(SCRIPT_RECORDS)
    size, item = archive.size(key), _ITEM_SIZES.get(kind, 1)
    if key == named or size is None:
        raise MalformedError(f"refers to {brief(named)}, which the archive does not contain")
    if size % item:
        raise MalformedError(f"has a tensor with {item} bytes per element in {brief(named)}, which has {size} bytes")
    assert archive.words.persistent is not None
    storage = archive.words.persistent(("storage", Global("torch", f"{kind}Storage"), key, "cpu", size // item))
    shape, strides = (tuple(_whole(number) for number in _list(definition, name)) for name in ("dims", "strides"))
    view = (storage, _integer(definition, "offset"), shape, strides)
    function = "_rebuild_tensor_v2"
    quantizer: tuple[float, ...] = ()
    if quantized:
        function, quantizer = "_rebuild_qtensor", (_number(definition, "scale"), _integer(definition, "zeroPoint"))
    hooks: OrderedDict[str, Any] = OrderedDict()
    rebuild = archive.words.constructors["torch._utils", function]
    return rebuild((*view, *quantizer, _flag(definition, "requiresGrad"), hooks))


def _with_table(words: Vocabulary, table: Sequence[Any]) -> Vocabulary:
    """Return the vocabulary for attributes.pkl, which refers to tensors by their index in `table`."""

    def numbered(number: Any) -> Any:
        if type(number) is not int or not 0 <= number < len(table):
            raise MalformedError(f"refers to tensor {brief(number)} of the {len(table)} in {SCRIPT_DESCRIPTION}")
        return table[number]

    def from_id(args: tuple[Any, ...]) -> Any:
        return numbered(args[0] if len(args) == 1 else None)

    def build_tensor(_made: Opaque, state: Any) -> Any:
        return numbered(state)

    def build_list(_made: Opaque, state: Any) -> Any:
        return state if type(state) is list else NotImplemented

    return words._replace(
        constructors={**words.constructors, _TENSOR_FROM_ID: from_id},
        builders={**words.builders, _TENSOR_ID: build_tensor, _INT_LIST: build_list},
        persistent=None,
    )


# ----------------------------------------------------------------------------------------------------------- modules


class _Modules:
    """Collects the parameters and buffers of modules by path in `found`, and their other attributes in `rest`."""

    def __init__(self, table: Sequence[Any], attributes: Sequence[Any], where: str) -> None:
        self.found: OrderedDict[str, Any] = OrderedDict()
        self.rest: dict[str, Any] = {}
        self._table = table
        self._attributes = attributes
        self._where = where
        self._paths = Paths(where)

    def collect(self, module: dict[str, Any], prefix: str, depth: int) -> None:
        """Add a ModuleDef's parameters, then its buffers, its other attributes, and its submodules."""
        if depth > MAX_DEPTH:
            raise unsupported(self._where, f"its modules are nested more than {MAX_DEPTH} levels deep")
        if "getStateAttributeId" in module:
            number = _integer(module, "getStateAttributeId")
            self.rest[prefix[:-1] or "state"] = _place(self._attributes, number, "attribute")
        parameters = [_object(entry) for entry in _list(module, "parameters")]
        names: set[str] = set()
        for buffers in (False, True):
            for entry in parameters:
                if _flag(entry, "isBuffer") is buffers:
                    name = _text(entry, "name")
                    self._add(
                        self._paths.join(prefix, name), _place(self._table, _integer(entry, "tensorId"), "tensor")
                    )
                    names.add(name)
        for entry in map(_object, _list(module, "attributes")):
            # torch 1.1 lists buffers again among the attributes. Id -1 means no value.
            name, number = _text(entry, "name"), _integer(entry, "id")
            if name not in names and number != -1:
                value = _place(self._attributes, number, "attribute")
                path = self._paths.join(prefix, name)
                if is_tensor(value):
                    self._add(path, value)
                else:
                    self.rest[path] = value
        for entry in map(_object, _list(module, "submodules")):
            self.collect(entry, self._paths.join(prefix, _text(entry, "name")) + ".", depth + 1)

    def _add(self, name: str, value: Any) -> None:
        if name in self.found:
            raise MalformedError(f"has {brief(name)} twice")
        self.found[name] = value


def _place(values: Sequence[Any], number: int, called: str) -> Any:
    if not 0 <= number < len(values):
        raise MalformedError(f"refers to {called} {number}, but has {count_of(len(values), called)}")
    return values[number]


# ------------------------------------------------------------------------------------------------------------ fields


def _object(value: Any) -> dict[str, Any]:
    """Check a message. Raises MalformedError for another type, and for protobuf's alternative field names (`a_b`)."""
    if type(value) is not dict:
        raise MalformedError(f"has {brief(value)}, but an object was expected")
    odd = next((name for name in value if "_" in name), None)
    if odd is not None:
        raise MalformedError(f"has {brief(odd)}, which torch would write differently")
    return value


def _list(message: dict[str, Any], name: str) -> list[Any]:
    value = message.get(name, [])
    if type(value) is not list:
        raise MalformedError(f"has {brief(value)} for its {name}, but a list was expected")
    return value


def _text(message: dict[str, Any], name: str) -> str:
    value = message.get(name)
    if type(value) is not str or not value:
        raise MalformedError(f"has {brief(value)} for {name}, but text was expected")
    return value


def _flag(message: dict[str, Any], name: str) -> bool:
    value = message.get(name, False)
    if type(value) is not bool:
        raise MalformedError(f"has {brief(value)} for {name}, but true or false was expected")
    return value


def _number(message: dict[str, Any], name: str) -> float:
    value = message.get(name, 0)
    if type(value) not in (int, float) or abs(value) > sys.float_info.max:
        raise MalformedError(f"has {brief(value)} for {name}, but a number was expected")
    return float(value)


def _integer(message: dict[str, Any], name: str) -> int:
    return _whole(message.get(name, 0))


def _whole(value: Any) -> int:
    """Return a 64-bit integer, given as a number or as text. Raises MalformedError for other values."""
    if type(value) is str and _INTEGER.fullmatch(value):
        value = int(value)
    if type(value) is not int or not -1 << 63 <= value < 1 << 63:
        raise MalformedError(f"has {brief(value)}, but a 64-bit integer was expected")
    return value
