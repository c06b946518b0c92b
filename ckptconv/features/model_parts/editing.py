"""Change a configuration's keys on layers, experts and quantized modules, so that they are true of a
part. Pure.

A key is known by its value: a number that equals the number of layers in the names of the weights, a list with an
entry for each of them, a list of their numbers, or a rule over their numbers. A value that cannot be true of the part
is an error, which names the key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ckptconv.errors import CorruptError, UsageError
from ckptconv.features.configs.configs import QUANTIZING
from ckptconv.features.model_facts import counts
from ckptconv.features.model_facts.counts import key_of
from ckptconv.features.model_facts.edits import WHOLE, Edited, Editor, Row
from ckptconv.features.model_parts import patterns
from ckptconv.features.model_parts.facts import Facts
from ckptconv.features.model_parts.numbers import text_of
from ckptconv.features.model_parts.rules import KINDS, MLPS, PERIODIC, PERIODS, RULES, in_period
from ckptconv.text import brief, count_of, some

# Words of lists that have nothing to do with layers; of rules over the numbers of layers, and of
# computing with them.
_FOREIGN = re.compile(r"architectures|token|section|label|factor|lang|mean|std|kernel|stage|patch|grid|eps|norm")
_RULE = re.compile(
    r"(?:layer|block).*(?:interval|period|offset|step|freq|group|start|end|skip)|(?:every|first|last|(?<!size_)per).*layer"
    r"|(?:layers|blocks)_per_|(?<!rescale)(?<!base)_(?:every|freq|frequency|interval)(?:_|$)|share_factor"
)
# Numbers of which some configurations have a list, with one for each layer.
_SIZES = re.compile(r"(?:ffn_)?intermediate_size|num_(?:attention|key_value)_heads")
_BY_NUMBER = re.compile(r"by_.*layer_(?:idx|index|id|number)")
# The scale of residuals, which programs divide by the root of the number of layers.
_SCALE = "scale_depth"
_FULL, _TAKEN = "full_attention", "shared"
# Keys of models whose programs compute full attention in the last layer, whatever the configuration says of it.
_ENDING = frozenset({"global_head_dim", "per_layer_config"})
# Keys of lists of layers of which the first one computes what the others take.
_GROUPS = re.compile(r"(?:reuse|shar|layer)\w*groups?")
# A window of attention, of some layers or of all.
_WINDOW = re.compile(r"(?:sliding_|local_|attention_)?window(?:_size)?|attention_chunk_size")


# Keys of a configuration of several components that are about all of them.
_TIED = "tie_word_embeddings"
_SHARED = ("dtype", "torch_dtype", _TIED, "transformers_version", *QUANTIZING)


def edited(config: Mapping[str, Any], facts: Facts, path: str = "") -> Edited:
    """Return `config` as it is true of a part with these `facts`. Raise UsageError for a fact that it cannot state,
    CorruptError for a value that is not true of the model. A file at `path` that the user gave for it may have the
    configuration of the component alone."""
    editor = _Editor(facts)
    component = facts.renaming.component
    key = key_of(component, config) if component in ("text", "vision") else ""
    if component in ("text", "vision") and not key and (not path or _components(config)):
        others = f", but {some(_components(config), form=str)}" if _components(config) else ""
        raise UsageError(
            f"{path or 'config.json'} has no configuration of its {component} component, such as {component}_config"
            f"{others}.",
            f"Write the configuration of the {component} component alone, with its model_type, to a file, and specify "
            "the file with --config FILE; or omit config.json from the output with --no-copy-config.",
        )
    if key:
        editor.rows.append(Row(WHOLE, "configuration of the whole model", key))
        shared = {name: config[name] for name in _SHARED if name in config and name not in config[key]}
        is_said = component == "text" and (_TIED in config or _TIED in config[key])
        config = {**config[key], **shared}
        if is_said:
            # Programs write a head only where it is not the embeddings.
            config[_TIED] = editor.changed(_TIED, config.get(_TIED), not facts.has_head)
        if "architectures" not in config:
            editor.notes.append(f"{key} has no architectures, so AutoModel uses its model_type.")
    return editor.edited(editor.of(config))


def _components(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of the configurations of components in that of a whole model."""
    text = key_of("text", config)
    return [
        key for key, value in config.items() if isinstance(value, Mapping) and (key == text or counts.OTHER.search(key))
    ]


class _Editor(Editor):
    """Changes a configuration to be true of a part."""

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self._facts = facts

    def of(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration for the part. Raise CorruptError if no key counts the layers or experts that the
        part lacks."""
        facts = self._facts

        def codes_of(value: Any, where: str) -> Any:
            return patterns.renamed(value, facts.renaming, where, self.changed)

        of_part = self.walked(config, self._value, codes_of)
        self.check(facts.layers if facts.kept is not None else 0, "layers", counts.LAYERS)
        self.check(facts.experts[0] if facts.experts else 0, "experts", counts.EXPERTS)
        return of_part

    def _value(self, key: str, value: Any, where: str, scope: Mapping[str, Any]) -> Any:
        facts = self._facts
        if isinstance(value, Mapping):
            is_by_layer = (counts.SPEAKS.search(key) or len(value) == facts.layers) and all(map(str.isdecimal, value))
            if facts.kept is None or not is_by_layer:
                return value
            return {str(new): value[str(old)] for new, old in enumerate(facts.kept) if str(old) in value}
        if type(value) is int and counts.FURTHER.fullmatch(key):
            return facts.further[1] if facts.kept is not None or facts.further[0] != facts.further[1] else value
        if facts.kept is not None and not counts.OTHER.search(key):
            value = self._of_layers(key, value, where, scope)
        if facts.experts:
            value = self._of_experts(key, value, where, scope, *facts.experts)
        return value

    # ------------------------------------------------------------------------------------------------------- layers

    def _of_layers(self, key: str, value: Any, where: str, scope: Mapping[str, Any]) -> Any:
        facts, speaks = self._facts, counts.SPEAKS.search(key)
        if type(value) is int:
            return self._of_number(key, value, where, scope)
        if value is True and _BY_NUMBER.search(key) and not facts.is_beginning:
            raise self._untrue(where, value)
        if key == _SCALE and isinstance(value, float):
            return value * math.sqrt(len(facts.kept_layers) / facts.layers)
        if not isinstance(value, (str, list)) or not value:
            return value
        if isinstance(value, str) and speaks and re.fullmatch(r"\d+(?:, ?\d+)+", value):
            comma = ", " if ", " in value else ","
            return comma.join(map(str, self._of_entries(key, [*map(int, value.split(","))], where, scope)))
        if isinstance(value, str) and not key.endswith("pattern"):
            return value
        if key in RULES and len(value) != facts.layers and all(type(entry) is int for entry in value):
            return [self._of_number(key, entry, where, scope) for entry in value]
        return self._of_entries(key, value, where, scope)

    def _of_number(self, key: str, value: Any, where: str, scope: Mapping[str, Any]) -> Any:
        facts, kept = self._facts, self._facts.kept_layers
        if key in counts.LAYERS or (key in counts.ALSO_LAYERS and value == facts.layers):
            self.counted.add("layers")
            return len(kept)
        meanings, lists = RULES.get(key, ((), ()))
        if meanings:
            candidates = (value, *range(1, len(kept) + 2), 0)
            new = next((new for new in candidates if self._is_same(meanings, value, new)), None)
            return self._listed(where, value, scope, lists) if new is None else new
        for period, offset in PERIODS.items():
            if key in (period, offset) and not facts.is_beginning:
                return self._of_period(where, (scope.get(period), scope.get(offset, 0)), scope)[key == offset]
        # The meaning of a rule is not known here; one of the last layers depends on the number of layers.
        if _RULE.search(key) and value and (not facts.is_beginning or "last" in key):
            return self._listed(where, value, scope, lists)
        if _WINDOW.fullmatch(key) and value and not facts.is_beginning and not self._has_kinds(scope):
            self.warnings.append(
                f"config.json has {where} {value}, but does not list the layers with this window. Programs that select "
                "these by number, as for Gemma 2, will select other layers in the part than in the model."
            )
        return value

    def _has_kinds(self, scope: Mapping[str, Any]) -> bool:
        """Return whether an object states the kinds of layers: which have a window of attention, or that none has."""
        kinds = (isinstance(value, (list, str)) and len(value) == self._facts.layers for value in scope.values())
        ruled = (key in PERIODIC or RULES.get(key, ((), ()))[1] == KINDS or key.endswith("pattern") for key in scope)
        return scope.get("use_sliding_window") is False or any(kinds) or any(ruled)

    def _of_period(self, where: str, old: Any, scope: Mapping[str, Any]) -> Any:
        """Return the period and the offset that select the same layers in the part as the `old` ones in the model."""
        if not all(type(number) is int for number in old) or old[0] < 1:
            raise self._untrue(where, [*old])
        candidates = ((period, at) for period in range(1, len(self._facts.kept_layers) + 2) for at in range(period))
        same = (pair for pair in (old, *candidates) if self._is_same((in_period,), old, pair))
        return next(same, None) or self._listed(where, old, scope, KINDS if "attn" in where else MLPS)

    def _is_same(self, meanings: Iterable[Callable[[int, Any, int], bool]], old: Any, new: Any) -> bool:
        """Return whether a rule with its `new` value holds for the same layers of the part as with its `old` value in
        the model."""
        facts, kept = self._facts, self._facts.kept_layers
        return all(
            holds(at, new, len(kept)) == holds(layer, old, facts.layers)
            for holds in meanings
            for at, layer in enumerate(kept)
        )

    def _listed(self, where: str, value: Any, scope: Mapping[str, Any], lists: Iterable[str]) -> Any:
        """Return `value`, which is not true of the part, if one of these `lists` says it of each layer. Raise
        UsageError if none does."""
        said = next((key for key in lists if isinstance(scope.get(key), list)), "")
        if not said:
            raise self._untrue(where, value)
        self.notes.append(
            f"{where} {brief(value)} of config.json was not changed, because programs use the list {said} instead."
        )
        return value

    def _of_entries(self, key: str, value: Sequence[Any], where: str, scope: Mapping[str, Any]) -> Any:
        """Return numbers of layers, or a list or text with an entry for each layer, or for each of a period."""
        facts, kept = self._facts, self._facts.kept or ()
        speaks, is_foreign = counts.SPEAKS.search(key) is not None, _FOREIGN.search(key) is not None
        is_each, types = len(value) in (facts.layers, facts.total), {type(entry) for entry in value}
        if types == {list} and _GROUPS.search(key):
            groups = [[kept.index(layer) for layer in group if layer in kept] for group in value]
            if any(new != sorted(new) or len(new) not in (0, len(old)) for new, old in zip(groups, value, strict=True)):
                raise UsageError(
                    f"config.json has {where} {brief(value)}, but the part contains some layers of a group without "
                    "the others, or in another order. The layers of a group use results of its first layer.",
                    "Keep all layers of each group in their order, or none.",
                )
            return [*filter(None, groups)]
        # A list of two layers' zeros and ones has an entry for each.
        may_be = speaks and types == {int} and len({*value}) == len(value) and not (is_each and max(value) < 2)
        if may_be and min(value) >= 0 and max(value) < facts.total:
            return sorted(new for new, layer in enumerate(kept) if layer in value)
        if is_each and (speaks or not is_foreign):
            self.counted |= {"layers"} if speaks else set()
            entries = [value[layer] for layer in (kept if len(value) == facts.total else facts.kept_layers)]
            if entries[0] == _TAKEN != value[0]:
                raise UsageError(
                    f"config.json has {where} {_TAKEN!r} for layer {kept[0]}, which would be the first layer of the "
                    "part. This layer uses results of an earlier layer.",
                    "Keep the earlier layer too.",
                )
            last = value[facts.kept_layers[-1]]
            if key in KINDS and value[facts.layers - 1] == _FULL != last and not _ENDING.isdisjoint(scope):
                raise UsageError(
                    f"config.json has {where} {last} for layer {facts.kept_layers[-1]}, which would be the last layer "
                    f"of the part. Programs for such models, such as Gemma 4, read the last layer as {_FULL}.",
                    f"Keep a layer of {_FULL} at the end.",
                )
            return "".join(entries) if isinstance(value, str) else entries
        if isinstance(value, str) or key in PERIODIC:
            size = len(value)
            if size > facts.layers:
                raise self._unfit(where, value)
            if any(value[new % size] != value[old % size] for new, old in enumerate(facts.kept_layers)):
                return self._listed(where, value, scope, KINDS)
            return value
        may_be_each = (speaks or _SIZES.fullmatch(key)) and not is_foreign
        if may_be_each and (types == {int} or types <= {str, bool}):
            raise self._unfit(where, value)
        return value

    def _untrue(self, where: str, value: Any) -> UsageError:
        layers = text_of(self._facts.kept_layers)
        return UsageError(
            f"config.json has {where} {brief(value)}, a rule that selects layers by number. No value is known to be "
            f"correct if layers {layers} are renumbered from 0.",
            "Keep the first layers, such as --layers 0-3, or omit config.json with --no-copy-config.",
        )

    def _unfit(self, where: str, value: Sequence[Any]) -> CorruptError:
        return CorruptError(
            f"config.json: {where} has length {len(value)} ({brief(value)}), but the weights have "
            f"{count_of(self._facts.layers, 'layer')}. Its entries are neither one per layer nor numbers of layers "
            "from 0.",
            "Correct config.json, or omit it with --no-copy-config.",
        )

    # ------------------------------------------------------------------------------------------------------ experts

    def _of_experts(self, key: str, value: Any, where: str, scope: Mapping[str, Any], before: int, after: int) -> Any:
        numbers = value if isinstance(value, list) else [value]
        if key in counts.EXPERTS and {*map(type, numbers)} == {int} and max(numbers) > 1:
            if {*numbers} - {0, 1, before}:
                raise CorruptError(
                    f"config.json has {where} {brief(value)}, but the weights have {count_of(before, 'expert')} in "
                    "each layer.",
                    "Correct config.json.",
                )
            self.counted.add("experts")
            kept = [after if number == before else number for number in numbers]
            return kept if isinstance(value, list) else after
        if type(value) is not int:
            return value
        is_taken = key in counts.PER_TOKEN and (
            key != "top_k" or not any(name in scope for name in counts.PER_TOKEN[:-1])
        )
        if is_taken and value > after:
            raise UsageError(
                f"config.json has {where} {value}, but the part has {count_of(after, 'expert')} in each layer.",
                f"Keep at least {value} experts.",
            )
        if key in ("n_group", "num_expert_group") and value > 0:
            if after % value:
                raise UsageError(
                    f"config.json has {where} {value}, but the part has {count_of(after, 'expert')} in each layer, "
                    f"which is not a multiple of {value}.",
                    f"Keep a multiple of {value} experts.",
                )
            groups = scope.get("topk_group")
            taken = next((scope[name] for name in counts.PER_TOKEN if type(scope.get(name)) is int), 0)
            if type(groups) is int and groups > 0 and taken > groups * (after // value):
                raise UsageError(
                    f"config.json specifies that a token uses {count_of(taken, 'expert')} of "
                    f"{count_of(groups, 'group')}, but the part has only {count_of(after // value, 'expert')} in each "
                    f"of its {count_of(value, 'group')} ({where}).",
                    "Keep more experts.",
                )
            pairs = (pair for numbers in self._facts.renaming.experts.values() for pair in numbers.items())
            if any(old * value // before != new * value // after for old, new in pairs):
                self.warnings.append(
                    f"config.json has {where} {value}, but some groups of the part contain experts of several groups "
                    "of the model. For the routing of the model, keep the same number of experts in each group, in the "
                    "order of the groups."
                )
        return value
