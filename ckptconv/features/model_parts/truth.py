"""The numbers of layers and experts that a configuration states, compared with the names of tensors. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ckptconv.errors import CkptconvError, CorruptError, UnsupportedError
from ckptconv.features.model_parts import places
from ckptconv.features.model_parts.editing import experts_in, layers_in
from ckptconv.tensors.lazy import LazyTensor

_OUTPUT = "the output"


def untrue(
    config: Mapping[str, Any] | None,
    before: Collection[str],
    after: Collection[str],
    tensors: Mapping[str, LazyTensor],
    publishing: bool,
) -> Iterator[str]:
    """Yield a warning for each number of `config` that is not the number in `tensors`; none if an output lacks some of
    its source's, `before`, as others compare these with `after`. Names that do not say how many there are of something
    are not compared."""
    if config is None or len(after) < len(before) or not tensors:
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
            yield f"config.json says {key} {count}, and the output has {min(sizes)} experts in each layer."
