"""Whole modules, as `torch.save(model)` pickles them, read as the state dicts that `model.state_dict()` gives.

Source: `torch/nn/modules/module.py`. No class is needed: Python pickles a module as an object with its `__dict__`,
which has the parameters in `_parameters`, the buffers in `_buffers` and the submodules in `_modules`, by name and in
order. A class may change its state dict by code of its own, which does not run. This module and `packed` know the
changes of torch's own classes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import Any

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.modules.packed import (
    MAX_DEPTH,
    Paths,
    convolution,
    detached,
    holding_others,
    packed_in,
    scales_of,
)
from ckptconv.formats.torch.container import Taken
from ckptconv.pickles.children import MAPPINGS, is_tensor, walk
from ckptconv.pickles.nodes import Global, Opaque, class_of
from ckptconv.tensors.lazy import Tagged
from ckptconv.text import brief, count_of, some

# A module's parameters, buffers and submodules.
_FIELDS = ("_parameters", "_buffers", "_modules")
_NOT_SAVED = "_non_persistent_buffers_set"
# torch.fx pickles a module as a call of these functions with its __dict__.
_OF_GRAPHS = frozenset(
    Global("torch.fx.graph_module", name) for name in ("reduce_graph_module", "reduce_deploy_graph_module")
)
# torch.compile's module is pickled as a call of its class with the module that it compiled.
_COMPILED, _COMPILED_NAME = Global("torch._dynamo.eval_frame", "OptimizedModule"), "_orig_mod"
# Wrappers of one module. Their hooks remove these prefixes from the names.
_UNNAMED = {
    **{
        Global("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", name): "_checkpoint_wrapped_module"
        for name in ("ActivationWrapper", "CheckpointWrapper", "OffloadWrapper")
    },
    Global("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): "_fsdp_wrapped_module",
}
# Hooks that change neither names nor tensors.
_HARMLESS = ("torch.nn.utils.spectral_norm.SpectralNormStateDictHook",)
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
_RAW = "Use --raw to convert the objects with all their attributes."


def taken(tree: Any, opaque: tuple[Global, ...], where: str) -> Taken:
    """Return `tree`, of the file `where`, with each module replaced by its state dict. Containers are changed in place.

    `opaque` are the classes kept as inert data. Raises CorruptError or UnsupportedError for a module that has no state
    dict, LimitError for one with too many names.
    """
    modules = _Modules(where)
    replaced = modules.replaced(tree)
    modules.replace_in(replaced)
    if not modules.classes:
        return Taken(tree, (), (), opaque)
    left = {class_of(node) for node in walk(replaced)}
    left.update(node.facts.kind for node in walk(replaced) if isinstance(node, Tagged))
    known = tuple(cls for cls in opaque if str(cls) in left)
    return Taken(replaced, tuple(modules.notes()), tuple(modules.warnings()), known, modules.values)


def _state_of(value: Any) -> dict[str, Any] | None:
    """Return the `__dict__` of a module; None for other values."""
    if type(value) is not Opaque:
        return None
    state: Any = value.state[0] if len(value.state) == 1 else None
    if value.cls in _OF_GRAPHS and type(value.args) is tuple and value.args and not value.state:
        state = value.args[0]
    if value.cls == _COMPILED and type(value.args) is tuple and value.args and not value.state:
        state = {**{name: {} for name in _FIELDS}, "_modules": {_COMPILED_NAME: value.args[0]}}
    if type(state) is tuple and len(state) == 2:
        state = state[0]  # the second item has the values of slots
    return state if type(state) is dict and all(name in state for name in _FIELDS) else None


class _Modules:
    """The modules of one file. Replaces them by their state dicts, and remembers what these lack."""

    def __init__(self, where: str) -> None:
        self.classes: dict[str, int] = {}
        self._where = where
        self._paths = Paths(where)
        self.values: dict[str, Any] = {}
        # By id: a tuple (kept so that no id is reused), and its replacement.
        self._tuples: dict[int, tuple[Any, Any]] = {}
        self._left: dict[str, None] = {}
        self._hooked: dict[str, None] = {}

    def replaced(self, value: Any, depth: int = 0) -> Any:
        """Return the replacement of `value`: a module's state dict, a tuple with modules replaced, or `value`."""
        if type(value) is tuple and depth < MAX_DEPTH:
            if id(value) not in self._tuples:
                items = tuple(self.replaced(item, depth + 1) for item in value)
                changed = any(new is not old for new, old in zip(items, value, strict=True))
                self._tuples[id(value)] = value, items if changed else value
            return self._tuples[id(value)][1]
        if not _is_module(value):
            return value
        self.classes[value.name] = self.classes.get(value.name, 0) + 1
        saved: OrderedDict[str, Any] = OrderedDict()
        attributes: dict[str, Any] = {}
        self._collect(value, "", saved, attributes, [])
        self._left.update(dict.fromkeys(holding_others(attributes, saved)))
        for name, attribute in (_state_of(value) or {}).items():
            if type(name) is str and not name.startswith("_") and name != "training" and _is_plain(attribute):
                self.values.setdefault(f"{value.name.rpartition('.')[2]}.{name}", attribute)
        return saved

    def replace_in(self, tree: Any) -> None:
        """Replace the modules in all containers and objects of `tree` that can be changed."""
        seen: set[int] = set()
        for node in walk(tree, seen):
            kind = type(node)
            if kind in MAPPINGS:
                changed = {key: self.replaced(value) for key, value in node.items() if type(value) in (Opaque, tuple)}
                node.update(changed)
            elif kind in (list, deque):
                for at, value in enumerate(node):
                    if type(value) in (Opaque, tuple):
                        node[at] = self.replaced(value)
            elif _is_module(node):
                seen.update(map(id, (node.args, *node.state)))  # a module in a set, or one that is a key, stays
            elif kind is Opaque:
                node.args = self.replaced(node.args)
                node.state = [self.replaced(item) for item in node.state]
                node.appended = [self.replaced(item) for item in node.appended]
                node.items = [self.replaced(item) for item in node.items]

    def _collect(
        self, module: Opaque, prefix: str, saved: dict[str, Any], attributes: dict[str, Any], above: list[Opaque]
    ) -> None:
        """Add the state dict of `module` and its submodules to `saved`, and their other attributes to `attributes`."""
        shown = brief(prefix[:-1] or module.name, 200)
        if any(outer is module for outer in above):
            raise self._broken(f"has a module, {shown}, that contains itself")
        if len(above) > MAX_DEPTH:
            raise self._refused(f"has modules that are nested more than {MAX_DEPTH} levels deep")
        state = _state_of(module)
        if state is None:
            for name, value in (_convolution(module) or {}).items():
                self._add(saved, prefix, name, value)
            return
        for field in _FIELDS:
            if not isinstance(state[field], dict):
                raise self._broken(f"has a module, {shown}, whose {field} is not a dictionary")
        for name, value in state["_parameters"].items():
            self._add_tensor(saved, prefix, name, value)
        passing = state.get(_NOT_SAVED)
        passing = passing if isinstance(passing, (set, frozenset, list, tuple)) else ()
        for name, value in state["_buffers"].items():
            if name in passing:
                attributes[self._join(prefix, name)] = value
            else:
                self._add_tensor(saved, prefix, name, value)
        for name, value in (*scales_of(module.cls, state), *packed_in(module.cls, state)):
            self._add(saved, prefix, name, value)
        for name, value in state.items():
            if name not in (*_FIELDS, _NOT_SAVED):
                attributes[self._join(prefix, name)] = value
        unnamed = _UNNAMED.get(module.cls) if type(module.cls) is Global else None
        if unnamed is None and any(_changes(state.get(hooks)) for hooks in _HOOKS):
            self._hooked[shown] = None
        for name, child in state["_modules"].items():
            if child is None:
                continue
            inner = self._join(prefix, name) + "."
            called = brief(inner[:-1], 200)
            if type(child) is not Opaque:
                raise self._broken(f"has {called} among its modules, but it is not a module")
            if not _is_module(child):
                of = brief(child.name, 200)
                raise self._refused(f"has a module, {called}, of the class {of}, which stores a custom state")
            self._collect(child, prefix if name == unnamed else inner, saved, attributes, [*above, module])

    def _add_tensor(self, saved: dict[str, Any], prefix: str, name: Any, value: Any) -> None:
        if value is None:
            return
        # Parameters of unknown classes stay what they are: objects.
        if not is_tensor(value) and type(value) is not Opaque:
            called = brief(self._join(prefix, name), 200)
            raise self._broken(f"has a parameter, {called}, that is not a tensor")
        self._add(saved, prefix, name, detached(value))

    def _add(self, saved: dict[str, Any], prefix: str, name: Any, value: Any) -> None:
        path = self._join(prefix, name)
        if path in saved:
            raise self._broken(f"has two parameters named {brief(path, 200)}")
        saved[path] = value

    def _join(self, prefix: str, name: Any) -> str:
        if type(name) is not str:
            raise self._broken(f"has a module with an attribute named {brief(name)}, but names must be text")
        return self._paths.join(prefix, name)

    def _refused(self, reason: str) -> UnsupportedError:
        return UnsupportedError(f"{self._where} {reason}.", _RAW)

    def _broken(self, reason: str) -> CorruptError:
        return CorruptError(f"{self._where} {reason}.", _RAW)

    # ---- notes and warnings

    def notes(self) -> Iterator[str]:
        """Yield how modules were converted, and what their state dicts lack."""
        count = sum(self.classes.values())
        them = "1 whole module, an object" if count == 1 else f"{count} whole modules, objects"
        yield (
            f"{self._where} contains {them} of {some(self.classes, 3)}: the output has the result of state_dict(). "
            "Other attributes are left out; --raw converts all."
        )
        if self._left:
            yield (
                f"{len(self._left)} of the left-out attributes contain tensors other than parameters and persistent "
                f"buffers: {some(self._left)}."
            )

    def warnings(self) -> Iterator[str]:
        """Yield how the state dict that the classes would give may differ."""
        if self._hooked:
            yield (
                f"Hooks of {count_of(len(self._hooked), 'module')} may change a state dict, and were not run: "
                f"{some(self._hooked, form=str)}. Tensors have the names of the parameters and buffers."
            )


def _is_module(value: Any) -> bool:
    return _state_of(value) is not None or _convolution(value) is not None


def _convolution(value: Any) -> dict[str, Any] | None:
    """Return the saved parts of a quantized convolution, by name; None for anything else."""
    if type(value) is not Opaque or len(value.state) != 1:
        return None
    return convolution(value.cls, value.state[0])


def _is_plain(value: Any) -> bool:
    """Return whether a value consists of numbers, text and containers only."""
    return all(type(node) in (*MAPPINGS, list, tuple) for node in walk(value))


def _changes(hooks: Any) -> bool:
    """Return whether a module's hooks may change its state dict."""
    return isinstance(hooks, Mapping) and any(class_of(hook) not in _HARMLESS for hook in hooks.values())
