"""Cut a checkpoint of torch.distributed.checkpoint like another one, which `--like` names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptconv.features.dcp_output.contents import Leaf
from ckptconv.features.dcp_output.layout import Layout, read_layout
from ckptconv.features.dcp_output.options import GIVEN
from ckptconv.features.joining.names import Roles, dotted
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs.targets import Target
from ckptconv.pickles.children import MAPPINGS
from ckptconv.storage.location import Location
from ckptconv.storage.paths import normalize
from ckptconv.text import some


def like(source: Source, targets: Sequence[Target], options: Options) -> tuple[list[Target], Options]:
    """Return the targets with the layout of the checkpoint that they are to be like, and the options with its keys."""
    layout = read_layout(Location(normalize(options.fitting()["like"]), dict(options.storage_options)))
    return [target._replace(layout=layout) for target in targets], fitted(options, layout, source)


def fitted(options: Options, layout: Layout, source: Source) -> Options:
    """Return the options with the keys under which a checkpoint of this layout has its weights and states, if the user
    names none. A state that has such a key itself gets no other."""
    tensors = [layout.paths[key] for key in layout.shapes]
    roles = Roles.of(layout.paths.values(), tensors)
    chosen, added = GIVEN.of(options), dict[str, Any]()
    top = options.key or (type(source.weights) in MAPPINGS and roles.model[:1] and roles.model[0] in source.weights)
    if not chosen.model_key and roles.model and not top:
        added["model_key"] = dotted(roles.model)
    if not chosen.optimizer_key and len(roles.optimizers) == 1:
        (path,) = roles.optimizers
        inside = [
            steps[len(path)] for steps in layout.paths.values() if steps[: len(path)] == path and len(steps) > len(path)
        ]
        added["optimizer_key"] = dotted(path)
        added["flat_optimizer"] = chosen.flat_optimizer or any(map(_is_setting, inside))
    return options.replaced(**added)


def _is_setting(step: str | int) -> bool:
    """Return whether a step of a path is the flat key of a setting of a parameter."""
    return type(step) is str and step.startswith("param_groups.")


def has_flat_states(layout: Layout) -> bool:
    """Return whether a checkpoint of this layout has an optimizer's settings under flat keys, by parameter."""
    return any(_is_setting(step) for path in layout.paths.values() for step in path)


def unlike(tensors: Mapping[str, Leaf], layout: Layout, path: str) -> Iterator[str]:
    """Yield warnings on tensors that differ from those of the checkpoint of `layout`, at `path`: in their keys, in
    their shapes, and weights that only that checkpoint has."""
    extra = [key for key in tensors if key not in layout.shapes]
    if extra:
        yield f"written whole, because {path} has no tensors of these names: {some(extra)}"
    others = [key for key, (_, tensor) in tensors.items() if layout.shapes.get(key, tensor.shape) != tensor.shape]
    if others:
        yield f"written whole, because their shapes differ from those in {path}: {some(others)}"
    roles = Roles.of(layout.paths.values(), [layout.paths[key] for key in layout.shapes])
    weights = [key for key in layout.shapes if roles.is_model(layout.paths[key])]
    lacking = [key for key in weights if key not in tensors]
    if 0 < len(lacking) < len(weights):  # an output of states alone has none
        yield f"{path} has weights that the output lacks: {some(lacking)}"
