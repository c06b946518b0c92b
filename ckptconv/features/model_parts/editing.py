"""Change a configuration's keys on layers, experts, the vocabulary and quantized modules, so that they are true of a
part. Pure.

A key is known by its value: a number that equals the number of layers in the names of the weights, a list with an
entry for each of them, a list of their numbers, or a rule over their numbers. A value that cannot be true of the part
is an error, which names the key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError, UsageError
from ckptconv.features.model_parts import patterns
from ckptconv.features.model_parts.facts import Facts
from ckptconv.features.model_parts.numbers import text_of
from ckptconv.features.model_parts.rules import KINDS, MLPS, PERIODIC, PERIODS, RULES, in_period
from ckptconv.formats.configs import QUANTIZING
from ckptconv.text import brief, some

# Keys that count layers, those of them that predict further tokens, experts, and the experts that a token takes.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_ALSO_LAYERS = ("num_blocks", "decoder_layers")  # if they have that number
_FURTHER = re.compile(
    r"num_nextn_predict_layers|mtp_num_(?:hidden_)?layers|(?:num|n)_mtp_(?:hidden_)?(?:layers|modules)"
)
_EXPERTS = (
    "num_experts",
    "n_routed_experts",
    "num_local_experts",
    "moe_num_experts",
    "num_routed_experts",
    "n_experts",
    "num_moe_experts",
)
_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "moe_topk",
    "moe_top_k",
    "experts_per_token",
    "top_k",
)
# A nested configuration is that of the language model if it is called one of these; one with a model type of its own,
# or called like another component, is another's.
_TEXT = ("text_config", "language_config", "llm_config", "thinker_config")
_OTHER = re.compile(r"vision|visual|image|video|audio|speech|talker|code2wav|token2wav|projector|codec|vq|mtp|nextn")
# Words of keys about layers; of lists that have nothing to do with layers; of rules over the numbers of layers, and of
# computing with them.
_SPEAKS = re.compile(r"layer|block|idx|indices|pattern")
_FOREIGN = re.compile(r"architectures|token|section|label|factor|lang|mean|std|kernel|stage|patch|grid|eps|norm")
_RULE = re.compile(
    r"(?:layer|block).*(?:interval|period|offset|step|freq|group|start|end|skip)|(?:every|first|last|per).*layer"
    r"|(?:layers|blocks)_per_|(?<!rescale)(?<!base)_(?:every|freq|frequency|interval)(?:_|$)|share_factor"
)
# Numbers of which some configurations have a list, with one for each layer.
_SIZES = re.compile(r"(?:ffn_)?intermediate_size|num_(?:attention|key_value)_heads")
_BY_NUMBER = re.compile(r"by_.*layer_(?:idx|index|id|number)")
# The scale of residuals, which programs divide by the root of the number of layers.
_SCALE = "scale_depth"
_FULL, _TAKEN = "full_attention", "shared"
# A window of attention, of some layers or of all.
_WINDOW = re.compile(r"(?:sliding_|local_|attention_)?window(?:_size)?|attention_chunk_size")


class Row(NamedTuple):
    """A changed value of a configuration: its key, with those of the objects around it, and both values."""

    key: str
    old: Any
    new: Any


class Edited(NamedTuple):
    """A configuration as a part needs it: the changes, and sentences for the user on values that could not change, and
    on those of which it is not known whether they have to."""

    config: dict[str, Any]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def _scopes(config: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the objects in a configuration that describe the language model: where each is, and the object."""
    yield at, config
    for key, value in config.items():
        if isinstance(value, Mapping) and not _is_other(key, value):
            yield from _scopes(value, f"{at}{key}.")


def _is_other(key: str, value: Mapping[str, Any]) -> bool:
    if key in QUANTIZING or _OTHER.search(key) or key.startswith("rope"):
        return True
    return key not in _TEXT and "model_type" in value


def layers_in(config: Mapping[str, Any] | None, total: int, path: str) -> int:
    """Return how many of the `total` layers in the names of weights are not layers that predict further tokens; that is
    the number in a configuration. Raise CorruptError if it states another."""
    if config is None:
        return total
    every = [(at, key, value) for at, scope in _scopes(config) for key, value in scope.items()]
    numbers = [(at + key, value) for at, key, value in every if type(value) is int]
    further = max((value for key, value in numbers if _FURTHER.fullmatch(key.rpartition(".")[2])), default=0)
    counts = {key: value for key, value in numbers if key.rpartition(".")[2] in _LAYERS}
    possible = (total, total - further)
    if wrong := next((key for key, value in counts.items() if value not in possible), None):
        raise CorruptError(
            f"config.json says {wrong} {counts[wrong]}, but the weights of {path} have {total} layers.",
            "Correct config.json, or convert the whole checkpoint.",
        )
    if len({*counts.values()}) > 1:
        said = some(counts.items(), form=lambda count: f"{count[0]} {count[1]}")
        raise CorruptError(f"config.json contradicts itself: it says {said}.", "Correct the wrong one.")
    if counts:
        return next(iter(counts.values()))
    lengths = [len(value) for _, key, value in every if isinstance(value, (list, str)) and _SPEAKS.search(key)]
    return possible[1] if total not in lengths and possible[1] in lengths else total


def experts_in(config: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the keys of a configuration that count experts, and their values."""
    every = [(at + key, scope[key]) for at, scope in _scopes(config) for key in _EXPERTS if key in scope]
    return [(key, value) for key, value in every if type(value) is int and value > 1]


def width_of_layer(config: Mapping[str, Any]) -> int:
    """Return how many elements each layer has in tensors of all layers; 0 if there are no such ones."""
    widths = (scope.get("hidden_size_per_layer_input") for _, scope in _scopes(config))
    return next((width for width in widths if type(width) is int), 0)


# Keys of a configuration of several components that are about all of them.
_TIED = "tie_word_embeddings"
_SHARED = ("dtype", "torch_dtype", _TIED, "transformers_version", *QUANTIZING)


def edited(config: Mapping[str, Any], facts: Facts) -> Edited:
    """Return `config` as it is true of a part with these `facts`. Raise UsageError for a fact that it cannot state,
    CorruptError for a value that is not true of the model."""
    editor = _Editor(facts)
    component = facts.renaming.component
    if component in ("text", "vision"):
        key = key_of(component, config)
        if not key:
            raise UsageError(
                f"config.json has no configuration of its {component} component, such as {component}_config.",
                "Give that of the component with --config FILE, or write none with --no-copy-config.",
            )
        editor.rows.append(Row("(all)", "that of the whole model", f"its {key}"))
        shared = {name: config[name] for name in _SHARED if name in config and name not in config[key]}
        is_said = component == "text" and (_TIED in config or _TIED in config[key])
        config = {**config[key], **shared}
        if is_said:
            # Programs write a head only where it is not the embeddings.
            config[_TIED] = editor.changed(_TIED, config.get(_TIED), not facts.has_head)
        if "architectures" not in config:
            editor.notes.append(f"{key} names no architectures: AutoModel goes by its model_type.")
    changed = editor.of(config)
    editor.check()
    return Edited(changed, tuple(editor.rows), tuple(dict.fromkeys(editor.notes)), tuple(editor.warnings))


def key_of(component: str, config: Mapping[str, Any]) -> str:
    """Return the key of the configuration of a component; "" if there is none."""
    words = re.compile("|".join(_TEXT) if component == "text" else r"vis(?:ion|ual)\w*_config")
    return next((key for key, value in config.items() if words.fullmatch(key) and isinstance(value, Mapping)), "")


class _Editor:
    """Changes one configuration. `rows` are its changes, `notes` and `warnings` further sentences for the user."""

    def __init__(self, facts: Facts) -> None:
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self._facts = facts
        self._counted: set[str] = set()

    def of(self, config: Mapping[str, Any], at: str = "") -> dict[str, Any]:
        """Return an object of the configuration as it is true of the part."""
        of_part: dict[str, Any] = {}
        for key, value in config.items():
            where = f"{at}{key}"
            if key in QUANTIZING:
                of_part[key] = patterns.renamed(value, self._facts.renaming, where, self.changed)
            elif not isinstance(value, Mapping):
                of_part[key] = self.changed(where, value, self._value(key, value, where, config))
            elif _is_other(key, value):
                of_part[key] = value
            elif self._facts.kept is not None and self._is_by_layer(key, value):
                layers = {str(new): value[str(old)] for new, old in enumerate(self._facts.kept) if str(old) in value}
                of_part[key] = self.changed(where, value, layers)
            else:
                of_part[key] = self.of(value, f"{where}.")
        return of_part

    def _is_by_layer(self, key: str, value: Mapping[str, Any]) -> bool:
        return (_SPEAKS.search(key) or len(value) == self._facts.layers) and all(map(str.isdecimal, value))

    def check(self) -> None:
        """Raise CorruptError if no key counts the layers, experts or rows of which the part has fewer."""
        facts = self._facts
        for noun, number, keys in (
            ("layers", facts.layers if facts.kept is not None else 0, _LAYERS),
            ("experts", facts.experts[0] if facts.experts else 0, _EXPERTS),
            ("rows of the vocabulary", facts.vocabulary[0] if facts.vocabulary else 0, ("vocab_size",)),
        ):
            if number and noun not in self._counted:
                raise CorruptError(
                    f"config.json does not count the {number} {noun} of the weights: it has none of "
                    f"{some(keys, form=str)}, nor a list with an entry for each.",
                    "Give the configuration of the model with --config FILE, or write none with --no-copy-config.",
                )
        before, after = facts.further
        if after > before and "further" not in self._counted:
            self.notes.append(
                "config.json has no key, such as num_nextn_predict_layers, that counts the layers which predict "
                "further tokens."
            )

    def changed(self, where: str, old: Any, new: Any) -> Any:
        if new != old:
            self.rows.append(Row(where, old, new))
        return new

    def _value(self, key: str, value: Any, where: str, scope: Mapping[str, Any]) -> Any:
        facts = self._facts
        if type(value) is int and _FURTHER.fullmatch(key):
            self._counted.add("further")
            return facts.further[1] if facts.kept is not None or facts.further[0] != facts.further[1] else value
        if facts.kept is not None and not _OTHER.search(key):
            value = self._of_layers(key, value, where, scope)
        if facts.experts:
            value = self._of_experts(key, value, where, scope, *facts.experts)
        if facts.vocabulary:
            value = self._of_vocabulary(key, value, where, *facts.vocabulary)
        return value

    # ------------------------------------------------------------------------------------------------------- layers

    def _of_layers(self, key: str, value: Any, where: str, scope: Mapping[str, Any]) -> Any:
        facts, speaks = self._facts, _SPEAKS.search(key)
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
        if key in _LAYERS or (key in _ALSO_LAYERS and value == facts.layers):
            self._counted.add("layers")
            return len(kept)
        meanings, lists = RULES.get(key, ((), ()))
        if meanings:
            candidates = (value, *range(1, len(kept) + 2), 0)
            new = next((new for new in candidates if self._is_same(meanings, value, new)), None)
            return self._listed(where, value, scope, lists) if new is None else new
        for period, offset in PERIODS.items():
            if key in (period, offset) and not facts.is_beginning:
                return self._of_period(where, (scope.get(period), scope.get(offset, 0)), scope)[key == offset]
        # What it means is not known; one of the last layers depends on how many there are.
        if _RULE.search(key) and value and (not facts.is_beginning or "last" in key):
            return self._listed(where, value, scope, lists)
        if _WINDOW.fullmatch(key) and value and not facts.is_beginning and not self._has_kinds(scope):
            self.warnings.append(
                f"config.json says {where} {value}, and not of which layers: a program that goes by their numbers, as "
                "those of Gemma 2 do, takes others of the part than of the model."
            )
        return value

    def _has_kinds(self, scope: Mapping[str, Any]) -> bool:
        """Whether an object says of which layers a window of attention is, or that there is none."""
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
        """Whether a rule holds with its `new` value of the same layers of the part as with its `old` one of the
        model."""
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
        self.notes.append(f"{where} {brief(value)} of config.json was left as it is: {said} says it of each layer.")
        return value

    def _of_entries(self, key: str, value: Sequence[Any], where: str, scope: Mapping[str, Any]) -> Any:
        """Return numbers of layers, or a list or text with an entry for each layer, or for each of a period."""
        facts, kept = self._facts, self._facts.kept or ()
        speaks, is_foreign = _SPEAKS.search(key) is not None, _FOREIGN.search(key) is not None
        is_each, types = len(value) in (facts.layers, facts.total), {type(entry) for entry in value}
        # A list of two layers' zeros and ones has an entry for each.
        may_be = speaks and types == {int} and len({*value}) == len(value) and not (is_each and max(value) < 2)
        if may_be and min(value) >= 0 and max(value) < facts.total:
            return sorted(new for new, layer in enumerate(kept) if layer in value)
        if is_each and (speaks or not is_foreign):
            self._counted |= {"layers"} if speaks else set()
            entries = [value[layer] for layer in (kept if len(value) == facts.total else facts.kept_layers)]
            if entries[0] == _TAKEN != value[0]:
                raise UsageError(
                    f"config.json says {where} {_TAKEN!r} of layer {kept[0]}: it takes what one before it computes.",
                    "Keep that layer before it too.",
                )
            last = value[facts.kept_layers[-1]]
            if key in KINDS and value[facts.layers - 1] == _FULL != last:
                self.notes.append(
                    f"The last layer of the part is {last} in {where}, that of the model {_FULL}: programs that expect "
                    "this at the end, such as those for Gemma 4, read it as such."
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
            f"config.json says {where} {brief(value)}, a rule over the numbers of layers, of which no value is true of "
            f"layers {layers} as 0 to {len(self._facts.kept_layers) - 1}.",
            "Keep the first layers, such as --layers 0-3, or write no configuration with --no-copy-config.",
        )

    def _unfit(self, where: str, value: Sequence[Any]) -> CorruptError:
        return CorruptError(
            f"config.json has {len(value)} entries in {where}, {brief(value)}, and the weights have "
            f"{self._facts.layers} layers: it has neither an entry for each layer nor numbers of layers from 0.",
            "Correct config.json, or write no configuration with --no-copy-config.",
        )

    # ------------------------------------------------------------------------------------- experts and vocabulary

    def _of_experts(self, key: str, value: Any, where: str, scope: Mapping[str, Any], before: int, after: int) -> Any:
        if key in _EXPERTS and isinstance(value, list) and value and {*value} == {before}:
            self._counted.add("experts")
            return [after] * len(value)
        if type(value) is not int:
            return value
        if key in _EXPERTS and value > 1:
            if value != before:
                raise CorruptError(
                    f"config.json says {where} {value}, but the weights have {before} experts in each layer.",
                    "Correct config.json.",
                )
            self._counted.add("experts")
            return after
        is_taken = key in _PER_TOKEN and (key != "top_k" or not any(name in scope for name in _PER_TOKEN[:-1]))
        if is_taken and value > after:
            raise UsageError(
                f"config.json says {where} {value}, but the part has {after} experts in each layer.",
                f"Keep at least {value} experts.",
            )
        if key in ("n_group", "num_expert_group") and value > 0:
            if after % value:
                raise UsageError(
                    f"config.json says {where} {value}, which does not divide the {after} experts of the part.",
                    f"Keep a multiple of {value} experts.",
                )
            groups = scope.get("topk_group")
            taken = next((scope[name] for name in _PER_TOKEN if type(scope.get(name)) is int), 0)
            if type(groups) is int and groups > 0 and taken > groups * (after // value):
                raise UsageError(
                    f"config.json says that a token takes {taken} experts of {groups} groups, but the part has "
                    f"{after // value} experts in each of its {value} groups ({where}).",
                    "Keep more experts.",
                )
            pairs = (pair for numbers in self._facts.renaming.experts.values() for pair in numbers.items())
            if any(old * value // before != new * value // after for old, new in pairs):
                self.warnings.append(
                    f"config.json says {where} {value}: experts of one group of the model are in several groups of the "
                    "part. Keep as many of each group, in the order of the groups, to route as the model does."
                )
        return value

    def _of_vocabulary(self, key: str, value: Any, where: str, before: int, after: int) -> Any:
        if key == "vocab_size" and type(value) is int:
            self._counted.add("rows of the vocabulary")
            return after
        is_token = re.search(r"_token_(?:id|index)$", key)
        beyond = [
            token for token in (value if isinstance(value, list) else [value]) if type(token) is int and token >= after
        ]
        if is_token and beyond:
            if key == "pad_token_id":
                raise UsageError(
                    f"config.json says {where} {beyond[0]}, but the part has rows 0 to {after - 1} of the vocabulary.",
                    f"Keep at least {beyond[0] + 1} rows.",
                )
            self.notes.append(f"{where} of config.json is {brief(value)}, beyond the {after} rows of the vocabulary.")
        return value
