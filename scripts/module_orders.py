"""Write the orders in which transformers' modules have their parameters: orders.json of the feature optimizer_numbers.

    module_orders.py [--old DIRECTORY] [--write]

Each model is built without memory, as configured by default, with biases, and with nothing tied. It must save its
parameters, each as it is, under their own names or others. Of an architecture that an earlier release in DIRECTORY has
too, both must have one order. The exit code is 1 if the file differs and is not written.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ORDERS = ROOT / "ckptconv/features/optimizer_numbers/orders.json"
TASKS = (
    "CAUSAL_LM",
    "MASKED_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SEQUENCE_CLASSIFICATION",
    "TOKEN_CLASSIFICATION",
    "QUESTION_ANSWERING",
    "IMAGE_TEXT_TO_TEXT",
    "IMAGE_CLASSIFICATION",
    "SPEECH_SEQ_2_SEQ",
)
LAYERS = re.compile(r"(num_(hidden_)?|n_|encoder_|decoder_|num_encoder_|num_decoder_)layers?")
# What is shared saves so many characters, at least.
LEAST = 200
Tree = dict[str, Any]


def names_of(architecture: str, kind: str, change: dict[str, Any]) -> list[str] | None:
    """Return the names under which a model's parameters are saved, in its order; None if it saves other tensors."""
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    configuration = CONFIG_MAPPING[kind]()
    for own in (configuration, *(each for each in vars(configuration).values() if hasattr(each, "to_dict"))):
        for key, value in list(vars(own).items()):
            if type(value) is int and value > 2 and LAYERS.fullmatch(key):
                setattr(own, key, 2)
            if key == "layer_types" and isinstance(value, list) and len({*value}) == 1:
                setattr(own, key, value[:2])
            if type(value) is bool and any(word in key for word in change):
                setattr(own, key, next(new for word, new in change.items() if word in key))
    with torch.device("meta"):
        model = getattr(transformers, architecture)(configuration)
    names = [name for name, _ in model.named_parameters()]
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return names
    stored = {id(each): name for name, each in revert_weight_conversion(model, dict(model.named_parameters())).items()}
    own = [stored.get(id(each), "") for each in model.parameters()]
    return own if all(own) and len(own) == len(stored) else None


def grown(tree: Tree, names: list[str]) -> Tree:
    """Return `tree` with the steps of `names` in their order: {step: what is below}, numbers as *."""
    made: Tree = {}
    for name in names:
        node = made
        for step in re.sub(r"\b\d+\b", "*", name).split("."):
            node = node.setdefault(step, {})
    return joined(tree, made)


def joined(one: Tree, other: Tree) -> Tree:
    """Return both trees as one. Raise ValueError if they have steps in different orders."""
    order: list[str] = []
    left, right = list(one), list(other)
    while left or right:
        if left and left[0] not in right:
            order.append(left.pop(0))
        elif right and right[0] not in left:
            order.append(right.pop(0))
        elif left[0] == right[0]:
            order.append(left.pop(0))
            right.pop(0)
        else:
            raise ValueError(f"{left[0]} and {right[0]} are in two orders")
    return {step: joined(one.get(step, {}), other.get(step, {})) for step in order}


def layered(names: list[str]) -> Iterator[list[str]]:
    """Yield the names of each layer with those outside of it: a layer may have what another lacks."""
    numbers = {name: re.findall(r"\b\d+\b", name) for name in names}
    for own in sorted({tuple(each) for each in numbers.values()}, key=len, reverse=True):
        yield [name for name in names if numbers[name] == list(own[: len(numbers[name])])]


def text_of(tree: Tree, shared: Mapping[str, int]) -> str:
    """Return a tree as text: a step, and in parentheses what is below it, unless that is one step; @ and a number for
    what is `shared`."""
    parts = []
    for step, below in tree.items():
        inner = text_of(below, shared)
        inner = f"@{shared[inner]}" if inner in shared else inner
        parts.append(f"{step}.{inner}" if len(below) == 1 else f"{step}({inner})" if below else step)
    return " ".join(parts)


def trees_in(tree: Tree) -> Iterator[Tree]:
    """Yield a tree and all in it, inner ones first."""
    for below in tree.values():
        yield from trees_in(below)
    yield tree


def written(found: Mapping[str, Tree]) -> str:
    """Return the file for the trees of architectures: what occurs often is there once."""
    shared: dict[str, int] = {}
    while True:
        texts = (text_of(below, shared) for tree in found.values() for below in trees_in(tree) if len(below) > 1)
        often = {text: count for text, count in Counter(texts).items() if count > 1 and text not in shared}
        most = max(often, key=lambda text: (often[text] - 1) * len(text), default="")
        if (often.get(most, 1) - 1) * len(most) < LEAST:
            break
        shared[most] = len(shared)
    by_text: dict[str, list[str]] = {}
    for architecture, tree in sorted(found.items()):
        by_text.setdefault(text_of(tree, shared), []).append(architecture)
    told = {"orders": {" ".join(names): text for text, names in by_text.items()}, "shared": list(shared)}
    return json.dumps(told, indent=0, sort_keys=True) + "\n"


def orders() -> dict[str, Tree]:
    """Return the tree of each architecture of this release of transformers."""
    import transformers
    from transformers.models.auto import modeling_auto

    transformers.logging.set_verbosity_error()
    found: dict[str, Tree] = {}
    for task in TASKS:
        for kind, classes in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}).items():
            for architecture in classes if isinstance(classes, (tuple, list)) else [classes]:
                if architecture in found:
                    continue
                tree: Tree = {}
                try:
                    for change in ({}, {"bias": True}, {"tie_": False}):
                        names = names_of(architecture, kind, change)
                        if names is None:
                            raise ValueError("it saves other tensors than its parameters")
                        for own in layered(names):
                            tree = grown(tree, own)
                        if position_sorted(tree, names) != names:
                            raise ValueError("its parameters are in no order of modules")
                except Exception as error:  # a model may want anything
                    print(f"without {architecture}: {str(error)[:100]}", file=sys.stderr)
                else:
                    found[architecture] = tree
    return found


def position_sorted(tree: Tree, names: list[str]) -> list[str]:
    """Return `names` in the order of a tree."""

    def key(name: str) -> list[int]:
        node, found = tree, []
        for step in name.split("."):
            own = step if step in node else "*"
            found += [list(node).index(own), int(step) if own == "*" else 0]
            node = node[own]
        return found

    return sorted(names, key=key)


def agreeing(new: Tree, old: Tree) -> bool:
    try:
        joined(new, old)
    except ValueError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--old", default="", help="where an earlier release of transformers is installed")
    parser.add_argument("--write", action="store_true", help="replace the file")
    parser.add_argument("--dump", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found = orders()
    if options.dump:
        print(json.dumps(found))
        return 0
    if options.old:
        command = [sys.executable, __file__, "--dump"]
        environment = {**os.environ, "PYTHONPATH": options.old}
        run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        for architecture, tree in json.loads(run.stdout).items():
            if architecture in found and not agreeing(found[architecture], tree):
                print(f"without {architecture}: releases differ", file=sys.stderr)
                del found[architecture]
    text = written(found)
    print(f"{len(found)} architectures, {len(text)} bytes")
    if options.write:
        ORDERS.write_text(text)
    return 0 if ORDERS.exists() and ORDERS.read_text() == text else 1


if __name__ == "__main__":
    sys.exit(main())
