"""Reads the weights of TorchScript archives (torch.jit.save): what `torch.jit.load(…).state_dict()` gives, from data.

Source: `torch/csrc/jit/serialization/{export_module,pickler,python_print}.cpp`. Such an archive is an ordinary zip
archive. Its `data.pkl` holds the module as an object: the class is named `__torch__.…`, and the state is a dict of the
attributes in slot order. Only the class says which attributes are parameters and which are buffers. It is source text
under `code/`: a class that begins `class NAME(Module):`, followed by a list of each. This module searches the text for
these lines, and runs nothing in it. The first releases list only the parameters, or neither; in their archives every
other tensor attribute is a buffer.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError, LimitError, UnsupportedError
from ckptconv.pickles.children import walk
from ckptconv.pickles.nodes import Composite, Global, Opaque
from ckptconv.pickles.vocabulary import Constructor
from ckptconv.tensors.lazy import LazyTensor, Tagged, same_bytes
from ckptconv.text import some

_NAMES = re.compile(r'\[((?:"[^"\\]*", ?)*)\]')
_MODULE = re.compile(r"class ([^()]+)\(Module\):")
# C++ code creates objects of these classes, from a state of its own format.
_NATIVE = "__torch__.torch.classes"
_ADVICE = "If you have the model that it was made from, save its state_dict() with torch.save, and convert that."
MAX_DEPTH = 200
# Characters in all paths together. A million tensors have a few ten million.
_MAX_PATHS = 1 << 27


class Weights(NamedTuple):
    """Parameters and buffers by attribute path, and the paths of other attributes that hold tensors."""

    tensors: OrderedDict[str, Any]
    others: list[str]


class _Class(NamedTuple):
    """Names of a class's parameters and buffers. `buffers` None: every other tensor attribute is a buffer."""

    parameters: frozenset[str]
    buffers: frozenset[str] | None


def weights(value: Any, read: Callable[[str], bytes | None], where: str) -> Weights:
    """Return the state dict of the module `value`, the content of data.pkl.

    `read` returns a member of the archive `where` by its name, None if there is none. Raises UnsupportedError if the
    result of torch cannot be determined, or would lack weights.
    """
    modules = _Modules(read, where)
    if not modules.is_module(value):
        raise modules.unsupported("it does not hold a module whose class its code tells")
    found: OrderedDict[str, Any] = OrderedDict()
    rest: dict[str, Any] = {}
    modules.collect(value, "", found, rest, [])
    return finished(found, rest, where)


def finished(found: OrderedDict[str, Any], rest: dict[str, Any], where: str) -> Weights:
    """Return the weights `found` in archive `where`, and the names of other attributes, from `rest`, that hold tensors.

    Raises UnsupportedError if there are no weights, or weights that only C++ code can extract.
    """
    if not found:
        raise unsupported(where, "its modules have neither parameters nor buffers; frozen modules have none")
    known = {same_bytes(tensor) for tensor in found.values() if isinstance(tensor, LazyTensor)}
    # Very many attributes may share a value: search it once, and report its tensors under the first attribute.
    # `sum` searches a value to its end, to refuse packed weights anywhere in it.
    seen: set[int] = set()
    others = [
        name
        for name, held in rest.items()
        if sum(same_bytes(tensor) not in known for tensor in _tensors_in(name, held, where, seen))
    ]
    return Weights(OrderedDict((name, _detached(tensor)) for name, tensor in found.items()), others)


def told(others: list[str]) -> str:
    """Return the warning about tensors that are neither parameters nor buffers."""
    return (
        f"{len(others)} attributes hold tensors that are neither parameters nor buffers, and are not converted: "
        f"{some(others, form=str)}."
    )


def unsupported(where: str, reason: str) -> UnsupportedError:
    return UnsupportedError(f"{where} is a TorchScript archive, and {reason}.", _ADVICE)


def is_tensor(value: Any) -> bool:
    return isinstance(value, (LazyTensor, Composite))


class Paths:
    """Joins names to paths. A few shared names and modules could make more paths than memory can hold."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._room = _MAX_PATHS

    def join(self, prefix: str, name: str) -> str:
        """Return `prefix` + `name`. Raises LimitError if all paths together exceed `_MAX_PATHS` characters."""
        self._room -= len(prefix) + len(name)
        if self._room < 0:
            raise LimitError(f"{self._where} is a TorchScript archive whose paths have over {_MAX_PATHS} characters.")
        return prefix + name


def _detached(tensor: Any) -> Any:
    if isinstance(tensor, Tagged):
        return Tagged(tensor.tensor, tensor.facts._replace(requires_grad=False))
    return tensor


class _Modules:
    """The modules of an archive, and the parameters and buffers that its code gives their classes."""

    def __init__(self, read: Callable[[str], bytes | None], where: str) -> None:
        self._read = read
        self._where = where
        self._paths = Paths(where)
        self._classes: dict[Global, _Class | None] = {}
        # By file of code, the classes of modules that it defines.
        self._files: dict[str, dict[str, dict[str, str]]] = {}

    def unsupported(self, reason: str) -> UnsupportedError:
        return unsupported(self._where, reason)

    def is_module(self, value: Any) -> bool:
        return isinstance(value, Opaque) and isinstance(value.cls, Global) and self._class(value.cls) is not None

    def _class(self, cls: Global) -> _Class | None:
        if cls not in self._classes:
            self._classes[cls] = self._described(cls)
        return self._classes[cls]

    def _described(self, cls: Global) -> _Class | None:
        """Return what the code says of a class; None if it is no module."""
        if cls.module.partition(".")[0] != "__torch__":
            return None
        if cls.module not in self._files:
            code = self._read(f"code/{cls.module.replace('.', '/')}.py")
            self._files[cls.module] = _modules_in((code or b"").decode("utf-8", "replace"))
        told = self._files[cls.module].get(cls.name)
        if told is None:
            return None
        lists: dict[str, frozenset[str]] = {}
        for key, names in told.items():
            match = _NAMES.fullmatch(names)
            if match is None:
                raise self.unsupported(f"the {key} of its class {cls} cannot be read")
            lists[key] = frozenset(re.findall('"([^"]*)"', match[1]))
        if "__buffers__" in lists and "__parameters__" not in lists:
            raise self.unsupported(f"its class {cls} does not say which attributes are parameters")
        return _Class(lists.get("__parameters__", frozenset()), lists.get("__buffers__"))

    def collect(
        self, module: Opaque, prefix: str, found: dict[str, Any], rest: dict[str, Any], above: list[Opaque]
    ) -> None:
        """Add the parameters and buffers of `module` and its submodules to `found`, all other attributes to `rest`."""
        if any(each is module for each in above):
            raise CorruptError(f"{self._where} has a module, {prefix[:200].rstrip('.')}, that contains itself.")
        if len(above) > MAX_DEPTH:
            raise self.unsupported(f"its modules are nested more than {MAX_DEPTH} levels deep")
        described, state = self._class(module.cls), module.state[0] if len(module.state) == 1 else None
        assert described is not None
        if type(state) is not dict or not all(type(name) is str for name in state):
            raise self.unsupported(f"its module {prefix.rstrip('.') or module.cls} has a state of its own making")
        parameters, buffers = described
        if buffers is None:
            buffers = frozenset(name for name, value in state.items() if is_tensor(value)) - parameters
        for kind in (parameters, buffers):
            for name in state:
                if name in kind:
                    self._add(self._paths.join(prefix, name), state[name], found)
        weights = parameters | buffers
        for name, value in state.items():
            if self.is_module(value):
                self.collect(value, self._paths.join(prefix, name) + ".", found, rest, [*above, module])
            elif name not in weights:
                rest[self._paths.join(prefix, name)] = value

    def _add(self, name: str, value: Any, found: dict[str, Any]) -> None:
        if value is None:
            return
        if not is_tensor(value) or name in found:
            raise self.unsupported(f"its parameter {name} is no tensor, or is there twice")
        found[name] = value


def _modules_in(code: str) -> dict[str, dict[str, str]]:
    """Return, by the name of each module class in `code`, the text of its lists of parameters and buffers."""
    found: dict[str, dict[str, str]] = {}
    lists: dict[str, str] = {}
    for line in code.splitlines():
        begins = _MODULE.fullmatch(line)
        if begins:
            # If a name occurs twice, the first counts.
            lists = {}
            found.setdefault(begins[1], lists)
        elif line.strip() and not line.startswith("  "):
            lists = {}
        else:
            key, equals, names = line[2:].partition(" = ")
            if equals and key in ("__parameters__", "__buffers__"):
                lists.setdefault(key, names.strip())
    return found


def _tensors_in(name: str, value: Any, where: str, seen: set[int]) -> Iterator[LazyTensor]:
    """Yield the tensors in a value of any type. Skip containers whose ids are in `seen`, and add others to it.

    Raises UnsupportedError for an object whose weights only C++ code can extract.
    """
    for item in walk(value, seen):
        if isinstance(item, LazyTensor):
            seen.discard(id(item))  # report it under each attribute that is this tensor
            yield item
        elif isinstance(item, Opaque) and str(item.cls).startswith(_NATIVE):
            raise unsupported(where, f"its {name} is packed ({item.name}): the weights in it have no plain form")


def _first(args: tuple[Any, ...]) -> Any:
    return args[0] if args else NotImplemented


# Lists and dicts that carry the types of their elements for TorchScript.
CONSTRUCTORS: dict[tuple[str, str], Constructor] = {
    ("torch.jit._pickle", name): _first
    for name in ("build_boollist", "build_doublelist", "build_intlist", "build_tensorlist", "restore_type_tag")
}
