"""The commands for maps: `maps` lists the built-in ones, `show` prints one, `check` tries one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptconv.cli.options import named, output_of, taking
from ckptconv.cli.typer_compat import Command, Group
from ckptconv.errors import UsageError
from ckptconv.text import some

if TYPE_CHECKING:
    from ckptconv.cli.console import Printer
    from ckptconv.features.maps.checking import MapCheck, MapSummary
    from ckptconv.features.maps.printed import Maps

OTHER_WORDS = {
    "maps": ("list-maps", "maps list"),
    "convert --map NAME": (
        "map",
        "megatron2hf",
        "mcore2hf",
        "hf2megatron",
        "hf2mcore",
        "titan2hf",
        "convert-to-hf",
        "convert-from-hf",
        "meta2hf",
        "rename-keys",
    ),
}


class _Maps(Group):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command; a map in its place is an error of its own."""
        from ckptconv.features.maps.file import catalogue

        if args[0] not in self.commands and args[0] in catalogue():
            raise UsageError(f"{args[0]} is a map, not a command.", f"To print it: ckptconv maps show {args[0]}")
        of_word = [name for name in catalogue() if args[0].lower() in name.split("-")]
        if args[0] not in self.commands and of_word:
            raise UsageError(
                f"{args[0]} is not a command of ckptconv maps.",
                f"Maps with this word: {some(of_word, form=str)}. To print one: ckptconv maps show NAME",
            )
        return super().resolve_command(ctx, args)


maps = typer.Typer(
    name="maps",
    cls=_Maps,
    invoke_without_command=True,
    help="""List the built-in maps, show one, or check one.

A map gives tensors the names and layouts of another program. Apply it with --map.

\b
Examples:
  ckptconv maps
  ckptconv maps show megatron-qwen3
  ckptconv maps check my-map.toml checkpoint/
""",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

MapName = Annotated[
    str, typer.Argument(metavar="MAP", show_default=False, help="The name of a built-in map, or a file of rules.")
]


@maps.callback()
@taking(*named("json"))
def _listed(ctx: typer.Context, **options: Any) -> None:
    if ctx.invoked_subcommand is None:
        from ckptconv.features.maps.checking import summarized
        from ckptconv.features.maps.file import catalogue, from_catalogue

        _list(output_of("maps", options), [summarized(from_catalogue(name)) for name in catalogue()])


@maps.command("show", cls=Command)
@taking(*named("json storage_options"))
def maps_show(map_: MapName, **options: Any) -> None:
    """Print a map.

    A map is text in TOML. To make your own, copy it to a file and change it.

    \b
    Examples:
      ckptconv maps show megatron-qwen3
      ckptconv maps show megatron-qwen3 > my-map.toml
    """
    from ckptconv.features.maps.checking import summarized
    from ckptconv.features.maps.choosing import read_map

    shown = output_of("maps show", options)
    shown_map = read_map(map_, options.pop("storage_options", {}))
    _list(shown, [summarized(shown_map)], shown_map.text)


@maps.command("check", cls=Command)
@taking(*named("size key include exclude strip_prefix rename like partial fill json quiet verbose storage_options"))
def maps_check(
    map_: MapName,
    source: Annotated[
        str | None, typer.Argument(metavar="SOURCE", show_default=False, help="A checkpoint to try the map on.")
    ] = None,
    **options: Any,
) -> None:
    """Check a map; with SOURCE, check that it fits a checkpoint.

    Both sides of each rule must have the same elements. With SOURCE, each tensor must have a rule, and the sizes must
    fit. With --like, the result of the map must match REF. Only descriptions are read, no tensor data.

    \b
    Examples:
      ckptconv maps check my-map.toml
      ckptconv maps check my-map.toml checkpoint/ --size n=32
      ckptconv maps check my-map.toml checkpoint/ --like hf://org/model
    """
    from ckptconv.features.maps.checking import check_map

    shown = output_of("maps check", options)
    _tell(shown, check_map(map_, source, **options))


def _list(output: Printer, maps: Sequence[MapSummary], text: str = "") -> None:
    """List maps; with `text`, print the only map, whose text it is."""
    if output.json:
        fields: Maps = {"maps": maps}
        if text:
            fields["text"] = text
        output.print_json(True, fields)
        return
    width = max((len(summary.name) for summary in maps), default=0)
    table = [f"{summary.name:{width}}  {' ⇄ '.join(summary.sides)}  {summary.about}".rstrip() for summary in maps]
    output.tell(text.splitlines() if text else table)


def _tell(output: Printer, check: MapCheck) -> None:
    """Report a valid map, and its result for a checkpoint."""
    for warning in check.warnings:
        output.warn(warning)
    if output.json:
        fields: Maps = {
            "maps": [check.map],
            "precedence": check.precedence,
            "source": check.source or None,
        }
        if check.direction:
            fields["direction"], fields["made_of"] = check.direction, check.made_of
            fields["warnings"] = check.warnings
        output.print_json(True, fields)
        return
    from ckptconv.text import count_of

    summary = check.map
    sizes = f"; sizes: {', '.join(summary.sizes)}" if summary.sizes else ""
    lines = [f"{summary.name}: {count_of(summary.rules, 'rule')}, {' ⇄ '.join(summary.sides)}{sizes}"]
    lines.extend(f"{first} takes precedence over {second}" for first, second in check.precedence)
    if check.direction:
        tensors = count_of(len(check.made_of), "tensor")
        lines.append(f"{check.source}: {' → '.join(check.direction)} yields {tensors}")
        if output.verbose:
            lines.extend(f"{name} ← {', '.join(of)}" for name, of in check.made_of.items())
    output.tell(lines)
