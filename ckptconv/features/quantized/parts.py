"""Recognition of the tensors of quantized weights by names and dtypes. `joining` joins them into weights."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping

from ckptconv.features.quantized import dialects
from ckptconv.features.quantized.table import Format
from ckptconv.tensors.lazy import LazyTensor

# The endings of the names of weights, and of torchao's codes.
WEIGHT, _TORCHAO = ".weight", "~_qdata"


def parts_among(tensors: Mapping[str, LazyTensor]) -> dict[str, str]:
    """Return {name: what it is part of} for the tensors that are parts of quantized weights, by names and dtypes; also
    of those that are not read."""
    owners = {
        part: name
        for name, companions in groups_of(tensors).items()
        if any(has_parts(format_, companions, tensors) for format_ in dialects.formats())
        or _are_codes(companions, tensors)
        for part in companions.values()
    }
    modules = {name.removesuffix(ending) for name, (ending, _, _) in unread(tensors).items()}
    for name in tensors if modules else ():
        outer = name.rpartition(".")[0]
        module = outer if outer in modules else outer.rpartition(".")[0]
        if module in modules and not name.endswith(".bias"):
            owners.setdefault(name, f"{module}{WEIGHT}")
    return owners


def _are_codes(companions: Mapping[str, str], tensors: Mapping[str, LazyTensor]) -> bool:
    """Return whether parts can only be those of quantized weights, and include codes."""
    dtypes = [tensors[part].dtype for part in companions.values()]
    return is_telling(companions, tensors) and any(dtype.itemsize == 1 or dtype.kind in "iu" for dtype in dtypes)


def is_telling(companions: Mapping[str, str], tensors: Mapping[str, LazyTensor]) -> bool:
    """Return whether parts have names that only parts of quantized weights have, or scales next to 32-bit words."""
    if "=.scales" in companions and "+" in companions and tensors[companions["+"]].dtype.name == "uint32":
        return True
    return any(part.endswith(dialects.telling()) for part in companions.values())


def unread(tensors: Mapping[str, LazyTensor]) -> dict[str, tuple[str, str, str]]:
    """Return the tensors with names of parts of weights that are not supported: {name: (its ending, the kind of the
    weight, a program that reads it)}."""
    unread_parts = {}
    not_read = dialects.not_read()
    endings = tuple(not_read)
    for name in tensors:
        if name.endswith(endings):
            ending = next(ending for ending in endings if name.endswith(ending))
            unread_parts[name] = ending, *not_read[ending]
    return unread_parts


@functools.cache
def _endings() -> tuple[tuple[str, str, str], ...]:
    """Return (ending, the text that replaces it in the weight's name, pattern) of all names of parts, longest first."""
    instead = {"+": "", "=": WEIGHT, "~": ""}
    endings = [(pattern[1:], instead[pattern[0]], pattern) for pattern in dialects.patterns() if pattern != "+"]
    return tuple(sorted(endings, key=lambda ending: -len(ending[0])))


def groups_of(tensors: Mapping[str, LazyTensor]) -> dict[str, dict[str, str]]:
    """Return {name of a weight: {pattern: name of a part}} for all that may be quantized."""
    groups: defaultdict[str, dict[str, str]] = defaultdict(dict)
    endings = tuple(ending for ending, _, _ in _endings())
    for name in tensors:
        if not name.endswith(endings):  # most names, told by one call
            continue
        for ending, instead, pattern in _endings():
            if not name.endswith(ending):
                continue
            base = name[: -len(ending)] + instead
            if pattern[0] == "~":
                module, dot, own = base.rpartition(".")
                if not own.startswith("_"):
                    continue
                base = module + dot + own[1:]
            groups[base][pattern] = name
    # A part that torchao names is nothing else.
    torchao = {
        part: name for name, companions in groups.items() if _TORCHAO in companions for part in companions.values()
    }
    for name, companions in groups.items():
        groups[name] = {pattern: part for pattern, part in companions.items() if torchao.get(part, name) == name}
    known = {name: {**({"+": name} if name in tensors else {}), **companions} for name, companions in groups.items()}
    return {name: companions for name, companions in known.items() if len(companions) > 1}


def has_parts(format_: Format, companions: Mapping[str, str], tensors: Mapping[str, LazyTensor]) -> bool:
    """Return whether the parts are exactly those of a format, in its dtypes."""
    known: set[str] = set()
    layers = [format_, format_.scale] if format_.scale else [format_]
    for layer in layers:
        for part in layer.parts.values():
            names = [companions[pattern] for pattern in part.names.split() if pattern in companions]
            names = [name for name in names if tensors[name].dtype.name in part.dtypes.split()]
            if not names and not part.optional and part.names:
                return False
            known.update(names)
    return known.issuperset(companions.values())
