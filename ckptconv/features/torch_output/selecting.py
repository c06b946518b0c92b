"""Select the content of a file for torch.load from its source. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.features.torch_files import writable
from ckptconv.formats.optimizers import optimizers_in, subtree, weights_key
from ckptconv.formats.registered import NUMBERS
from ckptconv.formats.source import Source
from ckptconv.options.table import NONE, Options
from ckptconv.outputs import computed, selection
from ckptconv.outputs.naming import tree_of
from ckptconv.outputs.pipeline import names_of
from ckptconv.outputs.renaming import with_keys
from ckptconv.outputs.selected import Selected
from ckptconv.outputs.selection import Rename
from ckptconv.process import of_feature
from ckptconv.structure import keymap, parted
from ckptconv.structure.choice import Choice
from ckptconv.tensors.lazy import untagged


def tree_in(source: Source, options: Options) -> Any:
    """Return the tree of which a `.pt` file of the source is made: `tree_of`, with tensors made of their parts."""
    source.check_weights()
    tree = tree_of(source, options)
    is_stored = not source.structured and options.structure and not options.key
    return parted.assembled(tree, source.remarks) if is_stored else tree


def selected_tree(source: Source, options: Options, rename: Rename = selection.renamed) -> Selected:
    """Select the content of a `.pt` file of the source by the options.

    The tensors of `known` are tagged with their facts. Raise UsageError for other names where a structure record says
    under which keys tensors are.
    """
    source = restored(source, options)
    tree = tree_in(source, options)
    choice = Choice(options.include, options.exclude)
    ways = [change for way in computed.ways_of(source) if (change := way.tree)]
    restated: computed.Restated | None = None
    if ways and isinstance(tree, Mapping) and tree.keys() == {"state", "param_groups"}:
        restated = computed.restated(source, tree["state"], tree["param_groups"], {})
        if restated:
            tree, ways = {"state": restated.states, "param_groups": restated.groups}, []
    described = keymap.describe(tree, leave_out=writable.leaving_out(options), tagged=True, choice=choice)
    known = described.tensors
    names = names_of(source, known, options, choice, rename)
    uncastable = described.uncastable | selection.scales(known)
    module = of_feature(NUMBERS, "among")
    around = weights_key(tree).rpartition(".")[0]
    optimizers = [f"{around}.{name}".lstrip(".") for name, _ in optimizers_in(subtree(tree, around))] if module else []
    optimizers = optimizers or ["" for _ in optimizers_in([tree]) if module]  # the tree is one
    warnings, notes = module.told(optimizers, names, described, options, tree) if optimizers else ((), ())
    if options.structure and not ways and any(old != new for old, new in names.items()):
        state, lost = with_keys(tree, known, names)
        if state is None:
            raise UsageError(
                f"{source.path} is nested, and the .pt file keeps this structure, so --strip-prefix and --rename "
                "cannot change the keys.",
                "Use --no-structure to write a flat dict of the tensors, or --key to convert one dict.",
            )
        tree, notes = state, (*notes, *lost)
        described = keymap.describe(tree, leave_out=writable.leaving_out(options), tagged=True)
    bare = {new: untagged(known[old]) for old, new in names.items()}
    dtype = options.dtype or source.defaults.dtype
    chosen = Selected(
        names,
        known,
        bare,
        described,
        options.structure,
        {},
        choice,
        dtype,
        widen_only=options.dtype is None,
        uncastable=frozenset(names[name] for name in uncastable if name in names),
        warnings=warnings,
        notes=notes,
        equal=tuple(restated.equal) if restated else (),
    )
    chosen = restated.noted(chosen, options) if restated else chosen
    for change in ways:
        chosen = change(chosen, source, options)
    return chosen


def restored(source: Source, options: Options) -> Source:
    """Return `source` as one that is computed back, if a remark records how it was computed."""
    for way in computed.COMPUTED.values():
        if way.remark and way.remark in source.remarks:
            source = way.computing.restored(source, options)
    return source


def not_undone(source: Source, options: Options) -> dict[str, Any]:
    """Return the members of a heading which say that the computations in remarks were not undone."""
    ways = (way for way in computed.COMPUTED.values() if way.remark and way.remark in source.remarks)
    return {way.members[0]: {} for way in ways if _is_none(way, options)}


def _is_none(way: computed.Way, options: Options) -> bool:
    return any(getattr(options, option, None) == NONE for option in way.options)
