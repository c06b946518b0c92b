"""The options of conversions about parts of models."""

from __future__ import annotations

from typing import Any

from ckptconv.errors import UsageError
from ckptconv.options import TAKE
from ckptconv.options.kinds import PATH, ValueKind, choice
from ckptconv.options.option import Given, deciding, option

COMPONENTS = ("text", "vision", "mtp")
_OTHER_COMPONENTS = {"language": "text", "language-model": "text", "llm": "text", "visual": "vision", "image": "vision"}


def _layers(value: Any, called: str) -> str:
    if value == "":
        return ""
    from ckptconv.features.model_parts import numbers  # most conversions are of a whole model

    return numbers.numbers_of(value, called)


def _experts(value: Any, called: str) -> tuple[str, ...]:
    if value in ("", ()):
        return ()
    from ckptconv.features.model_parts import numbers

    return numbers.experts_of(value, called)


_COMPONENT = choice(*COMPONENTS, words=_OTHER_COMPONENTS, unset="")


def _component(value: Any, called: str) -> Any:
    try:
        return _COMPONENT.parse(value, called)
    except UsageError as error:
        error.hint = error.hint or (
            "To convert another component, select its tensors by name with --include, such as "
            "'multi_modal_projector.*'."
        )
        raise


LAYERS = ValueKind(_layers, unset="", accepts="str | list[int] | tuple[int, ...] | range")
EXPERTS = ValueKind(_experts, stored=list, unset=(), accepts="str | list[int] | list[list[int]] | list[str] | range")


class PartOptions(Given):
    """The part of a model that is converted."""

    layers: str = deciding(
        LAYERS,
        "Convert only these layers, such as 0-3,60, renumbered in this order, and change config.json accordingly.",
        metavar="NUMBERS",
        group=TAKE,
    )
    experts: tuple[str, ...] = deciding(
        EXPERTS,
        "Convert only these experts of each layer, such as 0-7, renumbered, with their rows of the routers. FILE is "
        "JSON with a list of numbers for each layer that has experts.",
        metavar="NUMBERS|FILE",
        group=TAKE,
    )
    component: str = deciding(
        ValueKind(_component, unset="", accepts=_COMPONENT.accepts, values=_COMPONENT.values),
        "Convert only one component: the language model (text) or the vision model (vision), with its own config.json, "
        "or the layers that predict further tokens (mtp).",
        metavar="text|vision|mtp",
        group=TAKE,
    )
    config: str = option(
        PATH,
        "The configuration of the model, or of the component alone, if no config.json next to the checkpoint has it. "
        "The output of a part contains it as config.json.",
        metavar="FILE",
        group=TAKE,
    )


GIVEN = PartOptions
# Other words for them, as commands and as options.
OTHER_WORDS = {
    "convert --layers 0-3": ("slice", "drop-layers"),
    "convert INPUT OUTPUT --include GLOB, --layers 0-3 or --component text": ("extract",),
}
OTHER_OPTIONS = {
    "--num-layers --n-layers --keep-layers --num-hidden-layers": "Use --layers, such as --layers 0-3.",
    "--num-experts --keep-experts": "Use --experts, such as --experts 0-7.",
    "--text-only --language-model": "Use --component text.",
}
