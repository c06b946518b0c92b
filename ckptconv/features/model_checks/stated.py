"""The numbers of layers, experts and tokens that a configuration states, compared with the names of tensors. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ckptconv.errors import CkptconvError, CorruptError, UnsupportedError
from ckptconv.features.model_facts import places
from ckptconv.features.model_facts.counts import experts_in, key_of, layers_in, vocabularies_in
from ckptconv.options.registered import missing
from ckptconv.tensors.lazy import LazyTensor

_OUTPUT = "the output"


def untrue(
    config: Mapping[str, Any], before: Collection[str], after: Collection[str], tensors: Mapping[str, LazyTensor]
) -> Iterator[str]:
    """Yield a warning for each number of `config` that is not the number in `tensors`; none if an output lacks some of
    its source's, `before`, as others compare these with `after`. Names that do not say how many there are of something
    are not compared."""
    if not tensors:
        return
    if len(after) < len(before):
        yield from _left_out(config, before, after)
        return
    try:
        layers_in(config, places.stack_of(tensors, _OUTPUT).size, _OUTPUT)
    except UnsupportedError:
        pass
    except CorruptError as error:
        yield error.message
    try:
        sizes = {module.size for module in places.experts_of(tensors, _OUTPUT) if not places.is_beside(module.module)}
    except CkptconvError:
        return
    for key, count in experts_in(config):
        if sizes and count not in sizes:
            has = " or ".join(map(str, sorted(sizes)))
            yield f"config.json has {key} {count}, but the number of experts in a layer of the output is {has}."


def of_vocabulary(
    config: Mapping[str, Any], tensors: Mapping[str, LazyTensor], coded: Collection[str]
) -> Iterator[str]:
    """Yield a warning if no embeddings or head among the `tensors` have as many rows as `config` states tokens, for all
    of its statements. Tensors that are `coded`, or parts of such ones, are not compared."""
    matrices = {name: tensor.shape for name, tensor in tensors.items() if len(tensor.shape) == 2 and name not in coded}
    rows = {name: shape[0] for name, shape in matrices.items() if places.is_of_vocabulary(name)}
    # Of a head alone it is not known whether its rows are tokens.
    embeddings = [name for name in rows if name.split(".")[-1] == "weight" and name.split(".")[-2] in places.EMBEDDINGS]
    stated = vocabularies_in(config)
    if embeddings and stated and not any(possible & {*rows.values()} for _, _, possible in stated):
        key, size, _ = stated[0]
        yield (
            f"config.json has {key} {size}, but {embeddings[0]!r} of the output has {rows[embeddings[0]]} rows, which "
            "loaders refuse for most models. If the training run resized the vocabulary, correct config.json, and use "
            "the tokenizer of that run."
        )


def _left_out(config: Mapping[str, Any], before: Collection[str], after: Collection[str]) -> Iterator[str]:
    """Yield a warning if a configuration describes a component, and an output has no tensor of it."""
    for component, kept, whole in (("vision", "text", "language model"), ("text", "vision", "vision model")):
        key = key_of(component, config)
        if key and places.component_of(component, before) and not places.component_of(component, after):
            is_kept = places.component_of(kept, before) and not missing("component")
            how = f" Use --component {kept} to convert the {whole} with its own config.json." if is_kept else ""
            fact = (
                f"config.json describes the {component} model, under {key}, but the output has no tensors of that "
                "model."
            )
            yield f"{fact}{how}"
