"""Write ckptconv/features/merge/memory.txt: under which names files have what transformers holds under others.

    python scripts/memory_names.py            # compares what is written with what transformers says now
    python scripts/memory_names.py --write    # writes it

Makes every model that transformers' automatic classes know, without memory for its weights, and has transformers'
own conversion mapping say what files call each of its tensors. Families of models with the same rules are one.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
    dot_natural_key,
)
from transformers.models.auto import modeling_auto

TABLE = Path(__file__).resolve().parents[1] / "ckptconv/features/merge/memory.txt"
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
# How the operations that make files of memory are called whose result the table can say.
_STACKED = (["SplitModulelist"], ["Chunk", "SplitModulelist"])
_JOINED, _CUT = ["Concatenate"], ["Chunk"]


class Pair(NamedTuple):
    """What some names in memory are in files, and by which operations."""

    memory: list[str]
    files: list[str]
    operations: list[Any]


def models() -> Iterator[tuple[str, str]]:
    """Yield the type and class of every model that the automatic classes know."""
    found: set[tuple[str, str]] = set()
    for each in dir(modeling_auto):
        if each.startswith("MODEL_") and each.endswith("MAPPING_NAMES"):
            for kind, classes in getattr(modeling_auto, each).items():
                found.update((kind, name) for name in ([classes] if isinstance(classes, str) else classes))
    yield from sorted((kind, name) for kind, name in found if kind in CONFIG_MAPPING)


def shrunk(config: PretrainedConfig) -> PretrainedConfig:
    """Return a configuration with few experts: there is a name for each."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            shrunk(value)
        elif type(value) is int and value > 4 and "expert" in name and not re.search("per_tok|group|size", name):
            setattr(config, name, 4)
    return config


def pairs(model: Any) -> list[Pair]:
    """Return what transformers would save of `model`: as its `revert_weight_conversion`, with what came of what."""
    known = [each for each in get_model_conversion_mapping(model, add_legacy=False) if type(each) is not PrefixChange]
    steps = [each.reverse_transform() for each in known[::-1]]
    renamings = [each for each in steps if isinstance(each, WeightRenaming)]
    converters = [each for each in steps if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    found: list[Pair] = []
    converted: dict[str, tuple[Any, list[tuple[int, str]]]] = {}
    for name, tensor in sorted(model.state_dict().items(), key=lambda item: dot_natural_key(item[0])):
        target, pattern = apply_converters(name, converters)
        if pattern is None:
            found.append(Pair([name], [apply_renamings(name, renamings)], []))
            continue
        converter, names = converted.setdefault(target, (deepcopy(by_pattern[pattern]), []))
        names.append((converter.source_patterns.index(pattern), name))
        converter.add_tensor(target, name, pattern, tensor)
    for target, (converter, names) in converted.items():
        made = converter.convert(target, model=model, config=model.config)
        files = [apply_renamings(name, renamings) for name in made]
        found.append(Pair([name for _, name in sorted(names)], files, converter.operations))
    return found


def numbered(name: str) -> tuple[str, list[str]]:
    """Return a name with stars for numbers, and these."""
    return _NUMBER.sub("*", name), _NUMBER.findall(name)


def pattern_of(samples: Sequence[tuple[list[str], str]]) -> str | None:
    """Return what files have for names that are alike but for their numbers: with a star for each of these, in order;
    None if that does not give all of them."""
    first = samples[0][1].split(".")
    made, used = [], 0
    for at, part in enumerate(first):
        every = [(file.split(".")[at : at + 1], numbers[used : used + 1]) for numbers, file in samples]
        if all(mine == number for mine, number in every):
            made.append("*")
            used += 1
        elif all(mine == [part] for mine, _ in every):
            made.append(part)
        else:
            return None
    is_whole = all(file.count(".") == len(first) - 1 and len(numbers) == used for numbers, file in samples)
    return ".".join(made) if is_whole else None


def rules(found: Sequence[Pair]) -> set[tuple[str, str]]:
    """Return the rules of a model: how names in memory begin, and how those in files do."""
    samples: dict[str, list[tuple[list[str], str]]] = {}
    special: set[tuple[str, str]] = set()
    for memory, files, operations in found:
        called = [type(each).__name__ for each in operations]
        if operations:
            special.update(_special(memory, files, called, operations))
            continue
        name, numbers = numbered(memory[0])
        samples.setdefault(name, []).append((numbers, files[0]))
    leaves = {name: file for name, found in samples.items() if (file := pattern_of(found)) is not None}
    absolute: dict[str, str] = {}
    _gather("", list(leaves.items()), absolute)
    relative = {(name, file): _without_common(name, file) for name, file in absolute.items() if name != file}
    endings = defaultdict(set)
    for short, other in relative.values():
        endings[short].add(other)
    # What says different things at different places is told from the beginning of the name.
    plain = {
        (short, file) if short and len(endings[short]) == 1 else (f"^{full[0]}", full[1])
        for full, (short, file) in relative.items()
    }
    return plain | special


def _gather(prefix: str, items: list[tuple[str, str]], into: dict[str, str]) -> None:
    """Put into `into` the shortest beginnings of names under which all names change alike."""
    ends = {file[: len(file) - len(name) + len(prefix)] if file.endswith(name[len(prefix) :]) else None
            for name, file in items}  # fmt: skip
    if len(ends) == 1 and (end := ends.pop()) is not None and (prefix or not end):
        into[prefix] = end
        return
    groups = defaultdict(list)
    for name, file in items:
        if name == prefix:
            into[prefix] = file
        else:
            more = name[len(prefix) + 1 :] if prefix else name
            groups[f"{prefix}.{more.split('.')[0]}" if prefix else more.split(".")[0]].append((name, file))
    for group, members in groups.items():
        _gather(group, members, into)


def _without_common(name: str, *files: str, keep: int = 0) -> tuple[str, ...]:
    """Return names without the parts that all begin with, but for the last `keep`."""
    parts = [each.split(".") for each in (name, *files)]
    common = 0
    while all(len(each) > common and each[common] == parts[0][common] for each in parts):
        common += 1
    return tuple(".".join(each[max(common - keep, 0) :]) for each in parts)


def _special(memory: list[str], files: list[str], called: list[str], operations: list[Any]) -> set[tuple[str, str]]:
    """Return the rules of tensors that are stacked, joined or cut in memory; "!" for another layout."""
    name, numbers = numbered(memory[0])
    if called in _STACKED and len(memory) == 1 and operations[-1].dim == 0:
        patterns: dict[str, None] = {}
        for file in files:
            full, theirs = numbered(file)
            if theirs[:-1] != numbers:
                return {(f"^{name}", "!")}
            at = full.rfind("*")
            patterns[full[:at] + "+" + full[at + 1 :]] = None
        if called == _STACKED[0] or operations[0].dim == 1:
            short, *others = _without_common(name, *patterns, keep=1)
            return {(short, " | ".join(others))}
    elif called == _CUT and operations[0].dim == 0 and all(numbered(file)[1] == numbers for file in files):
        short, *others = _without_common(name, *(numbered(file)[0] for file in files), keep=1)
        return {(short, " | ".join(others))}
    elif called == _JOINED and operations[0].dim == 0 and len(files) == 1 and numbered(files[0])[1] == numbers:
        file = numbered(files[0])[0]
        every = [_without_common(numbered(each)[0], file, keep=1) for each in memory]
        return {(short, f"{other} {at}/{len(every)}") for at, (short, other) in enumerate(every)}
    return {(f"^{numbered(each)[0]}", "!") for each in memory}


def table(only: Sequence[str] = ()) -> str:
    families: dict[tuple[tuple[str, str], ...], dict[str, None]] = {}
    for kind, name in models():
        if only and kind not in only:
            continue
        try:
            config = shrunk(CONFIG_MAPPING[kind]())
            with torch.device("meta"):
                model = getattr(transformers, name)(config)
            found = pairs(model)
        except Exception as error:  # configurations without values, libraries that are not there
            print(f"{kind} {name}: {type(error).__name__}", file=sys.stderr)
            continue
        if made := rules(found):
            families.setdefault(tuple(sorted(made)), {})[kind] = None
    # What another family says too is said once: names that a base does not have are none of its.
    for each in sorted(families, key=len):
        if larger := next((other for other in families if {*each} < {*other}), None):
            families[larger].update(families.pop(each))
    lines = [
        f"# Made by scripts/memory_names.py of transformers {transformers.__version__}: conversion_mapping.py.",
        "# Names in memory = names in files. *: a number; +: that of an expert; |: one after the other along the rows;",
        "# i/n: part i of n of the rows; ^: from the beginning of the name; !: in another layout.",
    ]
    for each, kinds in sorted(families.items(), key=lambda item: list(item[1])):
        lines += ["", f"[{' '.join(kinds)}]", *(f"{name} = {file}" for name, file in each)]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table")
    parser.add_argument("kinds", nargs="*", help="only these types of models; then the table is printed")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    made = table(asked.kinds)
    if asked.kinds:
        print(made)
    elif asked.write:
        TABLE.write_text(made, "utf-8")
    elif TABLE.read_text("utf-8") != made:
        print(f"{TABLE} is not what transformers {transformers.__version__} says: --write it.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
