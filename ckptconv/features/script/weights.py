"""Reads TorchScript archives (torch.jit.save) from data: `torch.jit.load(…).state_dict()`, and all other tensors.

Source: `torch/csrc/jit/serialization/{export_module,pickler,python_print}.cpp`. Such an archive is an ordinary zip
archive. Its `data.pkl` holds the module as an object: the class is named `__torch__.…`, and the state is a dict of the
attributes in slot order. Only the class says which attributes are parameters and which are buffers. It is source text
under `code/`: a class that begins `class NAME(Module):`, followed by a list of each. This module searches the text for
these lines, and runs nothing in it. The first releases list only the parameters, or neither; in their archives every
other tensor attribute is a buffer. Frozen and optimized programs hold their weights as constants, in
`constants.pkl`.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.modules.packed import (
    MAX_DEPTH,
    Paths,
    Unpacked,
    convolution,
    detached,
    holding_others,
    scales_of,
)
from ckptconv.pickles.children import is_tensor
from ckptconv.pickles.nodes import Global, Opaque, Size, TorchConstant
from ckptconv.pickles.vocabulary import Constructor, MalformedError, Vocabulary
from ckptconv.text import brief, count_of, some

_NAMES = re.compile(r'\[((?:"[^"\\]*", ?)*)\]')
_MODULE = re.compile(r"class ([^()]+)\(Module\):")
# The package of an archive's own classes.
_PACKAGE = "__torch__"
# The function that makes a sparse tensor, with the numbers of layouts in C++.
_SPARSE = "torch._utils", "_rebuild_sparse_tensor"
_LAYOUTS = {1: "sparse_coo", 2: "sparse_csr"}
# The name of their constants in programs.
_CONSTANTS = "CONSTANTS"
_ADVICE = "If you have the original model, save its state_dict() with torch.save, and convert the resulting file."


class ScriptWeights(NamedTuple):
    """Tensors by attribute path, parameters and buffers first, and the paths of tensors that are neither."""

    tensors: OrderedDict[str, Any]
    others: list[str]


class _Class(NamedTuple):
    """Names of a class's parameters and buffers. `buffers` None: every other tensor attribute is a buffer."""

    parameters: frozenset[str]
    buffers: frozenset[str] | None


# For a class without lists of parameters and buffers.
_UNTOLD = _Class(frozenset(), None)


def weights(value: Any, constants: Any, read: Callable[[str], bytes | None], where: str) -> ScriptWeights:
    """Return the state dict of the module `value`, the content of data.pkl, and all other tensors.

    `constants` are the content of constants.pkl, which the program calls CONSTANTS.c0 and so on. `read` returns a
    member of the archive `where` by its name, None if there is none. Raises UnsupportedError if there is no tensor, or
    a parameter that is not a tensor.
    """
    modules = _Modules(read, where)
    if not modules.is_object(value):
        raise modules.unsupported("it does not contain a module")
    saved: OrderedDict[str, Any] = OrderedDict()
    others: dict[str, Any] = {}
    modules.collect(value, "", saved, others, [])
    if type(constants) is tuple:
        others.update((f"{_CONSTANTS}.c{number}", constant) for number, constant in enumerate(constants))
    return finished(saved, others, where)


def finished(saved: OrderedDict[str, Any], attributes: dict[str, Any], where: str) -> ScriptWeights:
    """Return the weights `saved` in archive `where`, and those of `attributes` that hold other tensors, as plain data.

    Raises UnsupportedError if there are no tensors.
    """
    unpacked = Unpacked(where)
    plain = {name: unpacked.plain(value, name) for name, value in attributes.items()}
    others = holding_others(plain, saved)
    tensors = OrderedDict((name, detached(tensor)) for name, tensor in saved.items())
    for name in others:
        if name in tensors:
            raise CorruptError(f"{where} has two attributes named {brief(name, 200)}.")
        tensors[name] = plain[name]
    if not tensors:
        raise unsupported(where, "it contains no tensors")
    return ScriptWeights(tensors, others)


def told(others: list[str]) -> str:
    """Return the note about tensors that are neither parameters nor buffers."""
    shown = count_of(len(others), "attribute")
    return f"The model has {shown} with tensors other than parameters and buffers: {some(others, form=str)}."


def unsupported(where: str, reason: str) -> UnsupportedError:
    return UnsupportedError(f"{where} is a TorchScript archive that cannot be converted: {reason}.", _ADVICE)


class _Modules:
    """The modules of an archive, and the parameters and buffers that its code gives their classes."""

    def __init__(self, read: Callable[[str], bytes | None], where: str) -> None:
        self._read = read
        self._where = where
        self._paths = Paths(where)
        self._classes: dict[Global, _Class | None] = {}
        # By file of code: the classes of modules that it defines.
        self._files: dict[str, dict[str, dict[str, str]]] = {}

    def unsupported(self, reason: str) -> UnsupportedError:
        return unsupported(self._where, reason)

    @staticmethod
    def is_object(value: Any) -> bool:
        """Return whether `value` is an object of a class of the archive's own code."""
        return type(value) is Opaque and type(value.cls) is Global and value.cls.module.partition(".")[0] == _PACKAGE

    def is_module(self, value: Any) -> bool:
        return self.is_object(value) and self._class(value.cls) is not None

    def _class(self, cls: Global) -> _Class | None:
        if cls not in self._classes:
            self._classes[cls] = self._described(cls)
        return self._classes[cls]

    def _described(self, cls: Global) -> _Class | None:
        """Return the lists of a class in the code; None if it is not a module."""
        if cls.module.partition(".")[0] != _PACKAGE:
            return None
        if cls.module not in self._files:
            code = self._read(f"code/{cls.module.replace('.', '/')}.py")
            self._files[cls.module] = modules_in((code or b"").decode("utf-8", "replace"))
        texts = self._files[cls.module].get(cls.name)
        if texts is None:
            return None
        lists: dict[str, frozenset[str]] = {}
        for key, names in texts.items():
            match = _NAMES.fullmatch(names)
            if match is None:
                raise self.unsupported(f"the {key} of its class {cls} cannot be read")
            lists[key] = frozenset(re.findall('"([^"]*)"', match[1]))
        parameters = lists.get("__parameters__")
        return _UNTOLD if parameters is None else _Class(parameters, lists.get("__buffers__"))

    def collect(
        self, module: Opaque, prefix: str, tensors: dict[str, Any], attributes: dict[str, Any], above: list[Opaque]
    ) -> None:
        """Add the parameters and buffers of `module` and its submodules to `tensors`, others to `attributes`."""
        if any(outer is module for outer in above):
            raise CorruptError(f"{self._where} has a module, {prefix[:200].rstrip('.')}, that contains itself.")
        if len(above) > MAX_DEPTH:
            raise self.unsupported(f"its modules are nested more than {MAX_DEPTH} levels deep")
        state = module.state[0] if len(module.state) == 1 else None
        saved = convolution(module.cls, state)
        if saved is not None:
            for name, value in saved.items():
                self._add(self._paths.join(prefix, name), value, tensors)
            return
        if type(state) is not dict or not all(type(name) is str for name in state):
            # A custom state: its tensors have no names.
            attributes[prefix[:-1] or "state"] = module
            return
        parameters, buffers = self._class(module.cls) or _UNTOLD
        if buffers is None:
            buffers = frozenset(name for name, value in state.items() if is_tensor(value)) - parameters
        for kind in (parameters, buffers):
            for name in state:
                if name in kind:
                    self._add(self._paths.join(prefix, name), state[name], tensors)
        scales = dict(scales_of(module.cls, state))
        for name, value in scales.items():
            self._add(self._paths.join(prefix, name), value, tensors)
        weights = parameters | buffers | scales.keys()
        for name, value in state.items():
            if self.is_module(value):
                self.collect(value, self._paths.join(prefix, name) + ".", tensors, attributes, [*above, module])
            elif name not in weights:
                attributes[self._paths.join(prefix, name)] = value

    def _add(self, name: str, value: Any, tensors: dict[str, Any]) -> None:
        if value is None:
            return
        if not is_tensor(value) or name in tensors:
            raise self.unsupported(f"its parameter {name} {'occurs twice' if is_tensor(value) else 'is not a tensor'}")
        tensors[name] = value


def modules_in(code: str) -> dict[str, dict[str, str]]:
    """Return, by the name of each module class in `code`, the text of its lists of parameters and buffers."""
    modules: dict[str, dict[str, str]] = {}
    lists: dict[str, str] = {}
    for line in code.splitlines():
        begins = _MODULE.fullmatch(line)
        if begins:
            # If a name occurs twice, the first counts.
            lists = {}
            modules.setdefault(begins[1], lists)
        elif line.strip() and not line.startswith("  "):
            lists = {}
        else:
            key, equals, names = line[2:].partition(" = ")
            if equals and key in ("__parameters__", "__buffers__"):
                lists.setdefault(key, names.strip())
    return modules


def _first(args: tuple[Any, ...]) -> Any:
    return args[0] if args else NotImplemented


# Lists and dicts with the types of their elements, for TorchScript.
_TYPED: dict[tuple[str, str], Constructor] = {
    ("torch.jit._pickle", name): _first
    for name in ("build_boollist", "build_doublelist", "build_intlist", "build_tensorlist", "restore_type_tag")
}


def vocabulary(words: Vocabulary) -> Vocabulary:
    """Return the vocabulary of an archive's pickles: `words` for torch.save's, and TorchScript's own."""
    rebuild = words.constructors[_SPARSE]

    def sparse(args: tuple[Any, ...]) -> Any:
        """Take (layout's number, size, requires_grad, indices, values, hooks), in CSR with both kinds of indices."""
        layout = _LAYOUTS.get(args[0]) if len(args) > 3 and type(args[0]) is int else None
        if layout is None or type(args[1]) is not tuple:
            raise MalformedError("has a sparse tensor without a known layout or size")
        return rebuild((TorchConstant("layout", layout), (*args[3:-1], Size(args[1]))))

    return words._replace(constructors={**words.constructors, **_TYPED, _SPARSE: sparse}, enums=_PACKAGE)
