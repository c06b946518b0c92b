"""The weights of TorchScript archives (torch.jit.save): what `torch.jit.load(…).state_dict()` gives, from data alone.

Source: `torch/csrc/jit/serialization/{export_module,pickler,python_print}.cpp`. Such an archive is a zip archive like
any other, whose `data.pkl` holds the module as an object: its class is named `__torch__.…`, and its state is a dict of
its attributes in the order of their slots. What is a parameter and what a buffer only its class says, which is source
text under `code/`: a class that begins `class NAME(Module):` and then names both in two lists. The text is searched for
these lines, and nothing in it is run. The first releases name only the parameters, or neither: there every other
attribute that is a tensor is a buffer, as it was for them.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError, LimitError, UnsupportedError
from ckptconv.pickles.nodes import Composite, Global, Opaque
from ckptconv.pickles.vocabulary import Constructor
from ckptconv.tensors.lazy import LazyTensor, Tagged, same_bytes

_NAMES = re.compile(r'\[((?:"[^"\\]*", ?)*)\]')
_MODULE = re.compile(r"class ([^()]+)\(Module\):")
# Objects of these classes are made by C++ code, from a state of their own.
_NATIVE = "__torch__.torch.classes"
_ADVICE = "If you have the model that it was made from, save its state_dict() with torch.save, and convert that."
_SHOWN = 5
MAX_DEPTH = 200
# Characters in all paths together; those of a million tensors are a few ten millions.
_MAX_PATHS = 1 << 27


class Weights(NamedTuple):
    """Parameters and buffers by the path of attributes, and the paths of other attributes that hold tensors."""

    tensors: OrderedDict[str, Any]
    others: list[str]


class _Class(NamedTuple):
    """The names of parameters and buffers; without those of buffers, they are all other tensors."""

    parameters: frozenset[str]
    buffers: frozenset[str] | None


def weights(value: Any, read: Callable[[str], bytes | None], where: str) -> Weights:
    """The state dict of the module `value`, the content of data.pkl. `read` gives the members of the archive `where`.

    Raises UnsupportedError where it cannot be told what torch would give, or where that would lack weights.
    """
    modules = _Modules(read, where)
    if not modules.is_module(value):
        raise modules.unsupported("it does not hold a module whose class its code tells")
    found: OrderedDict[str, Any] = OrderedDict()
    rest: dict[str, Any] = {}
    modules.collect(value, "", found, rest, [])
    return finished(found, rest, where)


def finished(found: OrderedDict[str, Any], rest: dict[str, Any], where: str) -> Weights:
    """The weights `found` of the archive `where`, and which of its other attributes, `rest`, hold further tensors.

    Raises UnsupportedError if there are no weights, or some that only C++ code can get out.
    """
    if not found:
        raise unsupported(where, "its modules have neither parameters nor buffers; frozen modules have none")
    known = {same_bytes(tensor) for tensor in found.values() if isinstance(tensor, LazyTensor)}
    # What several attributes share is looked at once, and told of with the first: they may be very many. All is looked
    # at, as what is packed is refused.
    seen: set[int] = set()
    others = [
        name
        for name, held in rest.items()
        if sum(same_bytes(tensor) not in known for tensor in _tensors_in(name, held, where, seen))
    ]
    return Weights(OrderedDict((name, _detached(tensor)) for name, tensor in found.items()), others)


def told(others: list[str]) -> str:
    """What to say of tensors that are no weights."""
    some = ", ".join(others[:_SHOWN]) + (", …" if len(others) > _SHOWN else "")
    return (
        f"{len(others)} attributes hold tensors that are neither parameters nor buffers, and are not converted: {some}."
    )


def unsupported(where: str, reason: str) -> UnsupportedError:
    return UnsupportedError(f"{where} is a TorchScript archive, and {reason}.", _ADVICE)


def is_tensor(value: Any) -> bool:
    return isinstance(value, (LazyTensor, Composite))


class Paths:
    """Joins names to paths. Few names and modules, shared, could make more paths than there is room for."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._room = _MAX_PATHS

    def join(self, prefix: str, name: str) -> str:
        """Raises LimitError when all paths together have more than `_MAX_PATHS` characters."""
        self._room -= len(prefix) + len(name)
        if self._room < 0:
            raise LimitError(f"{self._where} is a TorchScript archive whose paths have over {_MAX_PATHS} characters.")
        return prefix + name


def _detached(tensor: Any) -> Any:
    if isinstance(tensor, Tagged):
        return Tagged(tensor.tensor, tensor.facts._replace(requires_grad=False))
    return tensor


class _Modules:
    """The modules of an archive, and what its code says of their classes."""

    def __init__(self, read: Callable[[str], bytes | None], where: str) -> None:
        self._read = read
        self._where = where
        self._paths = Paths(where)
        self._classes: dict[Global, _Class | None] = {}
        # Of each file of code, the modules that it describes.
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
        """What the code says of a class; None if it is no module."""
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
        """Put the parameters and buffers of a module and those in it into `found`, all other attributes into `rest`."""
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
    """The modules that a file of code describes, and of each the lists of its parameters and buffers, as text."""
    found: dict[str, dict[str, str]] = {}
    lists: dict[str, str] = {}
    for line in code.splitlines():
        begins = _MODULE.fullmatch(line)
        if begins:
            # Of two with one name the first counts.
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
    """The tensors in a value of any kind, but for those in what was `seen` already.

    Raises UnsupportedError if it has some that only C++ code can get out.
    """
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, LazyTensor):
            yield item
        elif id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, Opaque) and str(item.cls).startswith(_NATIVE):
                raise unsupported(where, f"its {name} is packed ({item.name}): the weights in it have no plain form")
            pending.extend(_parts(item))


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return (*value.keys(), *value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, Composite):
        return value.parts.values()
    if isinstance(value, Opaque):
        return (value.args, value.kwargs, *value.state, *value.appended, *value.items)
    return ()


def _first(args: tuple[Any, ...]) -> Any:
    return args[0] if args else NotImplemented


# Lists and dicts whose elements have a type that TorchScript must not forget.
CONSTRUCTORS: dict[tuple[str, str], Constructor] = {
    ("torch.jit._pickle", name): _first
    for name in ("build_boollist", "build_doublelist", "build_intlist", "build_tensorlist", "restore_type_tag")
}
