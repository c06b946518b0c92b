"""The JSON schemas of what --json prints, from the fields of what the commands report: their types, and the docstring
after each. scripts/reference.py writes them to ckptconv/cli/schemas."""

from __future__ import annotations

import ast
import collections.abc
import functools
import inspect
import json
import textwrap
import typing
from dataclasses import is_dataclass
from importlib import import_module
from types import UnionType
from typing import Any, Literal, NamedTuple

from ckptconv.cli import printed
from ckptconv.cli.console import VERSION
from ckptconv.result import Report


class Command(NamedTuple):
    """An object that is printed: its title, what it is, the commands that print it, the class of its fields and what
    others call these; `ok` is the one value that it has there, None for either, and what that means."""

    title: str
    about: str
    commands: tuple[str, ...]
    fields: type
    part: str = ""
    ok: bool | None = True
    means: str = "Whether the command succeeded: true with exit code 0 only."
    error: str = ""


# What commands of features print: the module of each that has any of COMMANDS, OF_CONVERSIONS, DIFFERENCES, EXTENDED
# and MORE.
_PRINTED: dict[str, str] = {
    "verify": "ckptconv.features.verify.printed",
    "convert": "ckptconv.features.batch.printed",
    "finish": "ckptconv.features.parts.command",
    "like": "ckptconv.features.like.printed",
    "average": "ckptconv.features.average.command",
    "zero-to-fp32": "ckptconv.features.deepspeed.command",
    "dcp2safetensors": "ckptconv.features.dcp.dcp2safetensors",
    "safetensors2dcp": "ckptconv.features.dcp_output.safetensors2dcp",
    "diff": "ckptconv.features.diff.printed",
    "inspect": "ckptconv.features.inspect.printed",
    "merge": "ckptconv.features.merge.command",
    "patch": "ckptconv.features.deltas.printed",
    "rows": "ckptconv.features.rows.printed",
    "serve": "ckptconv.features.serve.printed",
    "safetensors2pt": "ckptconv.features.torch_output.command",
    "virtual": "ckptconv.features.virtual.command",
    "scan": "ckptconv.features.scan.printed",
    "maps": "ckptconv.features.maps.printed",
    "steps": "ckptconv.features.steps.report",
    "thin": "ckptconv.features.thin.report",
}
FEATURES = tuple(map(import_module, _PRINTED.values()))
_CONVERTING = (
    *("convert", "pt2safetensors"),
    *(command for feature in FEATURES for command in getattr(feature, "OF_CONVERSIONS", ())),
)
COMMANDS = {
    "conversion": Command(
        "Conversions",
        "What a conversion prints with --json when it succeeds, and every command that writes weights.",
        _CONVERTING,
        Report,
        "report",
    ),
    "error": Command("Failures", "", (), printed.Failed, ok=False),
    **{name: Command(*about) for each in FEATURES for name, about in getattr(each, "COMMANDS", {}).items()},
}

# Properties that are printed with the fields.
_PROPERTIES = {each: names for feature in FEATURES for each, names in getattr(feature, "PROPERTIES", {}).items()}
# Classes whose objects have the fields of another schema too.
_EXTENDED = {each: schema for feature in FEATURES for each, schema in getattr(feature, "EXTENDED", {}).items()}
# Fields that are left out where there is nothing to say, and those that are left out unless they were asked for.
_LEFT_OUT = {field for feature in FEATURES for field in getattr(feature, "LEFT_OUT", ())}
_OPTIONAL = {
    *_LEFT_OUT,
    (printed.FoundDifference, "tensor"),
    *(field for feature in FEATURES for field in getattr(feature, "OPTIONAL", ())),
}


def _object(fields: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}


# What the type of a field does not say.
_MORE: dict[tuple[type | str, str], dict[str, Any]] = {
    (printed.OneDifference, "elements"): {"type": "integer", "minimum": 1},
    (printed.FoundDifference, "elements"): {"type": "integer", "minimum": 1},
}
_SCALARS: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer", "minimum": 0},
    float: {"type": "number", "minimum": 0},
    Any: {},
}
_ERROR = "urn:ckptconv:1:error#/properties/error"
_DIFFERENCES = [each for feature in FEATURES for each in getattr(feature, "DIFFERENCES", {}).items()]


def schemas() -> dict[str, dict[str, Any]]:
    """Return the schema of each object, by its name."""
    for feature in FEATURES:
        for field, more in getattr(feature, "MORE", {}).items():
            _MORE[field] = more if isinstance(more, dict) else _of(more, "")
    return {name: _whole(name, command) for name, command in COMMANDS.items()}


def texts() -> dict[str, str]:
    """Return the schemas as text, {file name: text}: a line for each field of a report."""
    return {f"{name}.json": _text(schema) + "\n" for name, schema in schemas().items()}


def _text(value: Any, key: str = "", indent: str = "") -> str:
    if not isinstance(value, dict) or (key not in ("", "properties", "$defs") and indent != "    "):
        return json.dumps(value, ensure_ascii=False)
    more = indent + "  "
    opened = {"": ("properties", "$defs"), "  ": _PARTS, "    ": ("properties",)}.get(indent, ())
    lines = (
        f"{more}{json.dumps(name)}: "
        + (_text(each, name, more) if name in opened else json.dumps(each, ensure_ascii=False))
        for name, each in value.items()
    )
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


_PARTS = tuple(command.part for command in COMMANDS.values() if command.part)


def _whole(name: str, command: Command) -> dict[str, Any]:
    called: dict[str, Any] = {"enum": list(command.commands)}
    told = "The command, without `ckptconv`"
    if not command.commands:
        called, told = {"type": ["string", "null"]}, f"{told}; null if none was given or found"
    elif command.ok is None and not command.part:
        called = {"const": command.commands[0]}
    steady = "It changes when a field changes its meaning or goes; new fields do not change it."
    fields: dict[str, Any] = {
        "version": {"const": VERSION, "description": f"The version of this schema. {steady}"},
        "ok": {**({"type": "boolean"} if command.ok is None else {"const": command.ok}), "description": command.means},
        "command": {**called, "description": f"{told}."},
    }
    required = list(fields)
    if command.error:
        fields["error"] = {"$ref": _ERROR, "description": command.error}
    own = _of_class(command.fields, within=name)
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:ckptconv:{VERSION}:{name}",
        "title": command.title,
        "description": command.about or own["description"],
        "type": "object",
    }
    if not command.part:
        return {
            **head,
            "properties": {**fields, **own["properties"]},
            "required": [*required, *own["required"]],
            "additionalProperties": False,
        }
    del own["additionalProperties"]
    return {
        **head,
        "properties": fields,
        "required": required,
        "$ref": f"#/$defs/{command.part}",
        "unevaluatedProperties": False,
        "$defs": {command.part: own},
    }


def _of_class(described: type, within: str = "") -> dict[str, Any]:
    """Return the schema of an object of the fields of a dataclass or TypedDict, in the schema `within`."""
    scope = {**vars(typing), **vars(collections.abc), **_KNOWN}
    hints = typing.get_type_hints(described, localns=scope, include_extras=True)
    for name in _PROPERTIES.get(described, ()):
        called = inspect.getattr_static(described, name)
        getter = getattr(called, "fget", None) or called.func
        hints[name] = typing.get_type_hints(getter, localns=scope)["return"]
    told = _docstrings(described)
    fields, required = {}, []
    for name, hint in hints.items():
        optional = typing.get_origin(hint) is typing.NotRequired or (described, name) in _OPTIONAL
        hint = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.NotRequired else hint
        if (described, name) in _LEFT_OUT:
            hint = typing.get_args(hint)[0]
        found = _MORE.get((described, name)) or _MORE.get((described.__name__, name)) or _of(hint, within)
        if (described, name) == (printed.Failure, "difference"):
            others = [_difference(kind, rest, within) for kind, rest in _DIFFERENCES]
            found = {"type": "object", "oneOf": [found, *others]}
        fields[name] = {**found, "description": told[name]}
        required += [] if optional else [name]
    about = " ".join((inspect.getdoc(described) or "").partition("\n\n")[0].split())
    return {**_object(fields, required), "description": about}


def _of(hint: Any, within: str) -> dict[str, Any]:
    """Return the schema of a value of this type."""
    if hint in _SCALARS:
        return dict(_SCALARS[hint])
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        kinds = [_of(each, within) for each in inner if each is not type(None)]
        if type(None) in inner:
            [kind] = kinds
            return {**kind, "type": [kind["type"], "null"]}
        return {"type": "object", "oneOf": kinds} if within == "error" else {"oneOf": kinds}
    if origin is Literal:
        return {"enum": list(inner)} if len(inner) > 1 else {"const": inner[0]}
    if origin is tuple and inner[-1] is not Ellipsis:
        return {"type": "array", "items": _of(inner[0], within), "minItems": len(inner), "maxItems": len(inner)}
    if origin in (list, tuple, collections.abc.Sequence):
        plain = inner[0] == dict[str, Any]
        return {"type": "array", "items": {"type": "object"} if plain else _of(inner[0], within)}
    if origin in (dict, collections.abc.Mapping):
        return (
            {"type": "object"} if inner[1] is Any else {"type": "object", "additionalProperties": _of(inner[1], within)}
        )
    if hint is printed.Failure and within != "error":
        return {"$ref": _ERROR}
    if hint in _EXTENDED:
        return {"type": "object", **_and(_of_class(hint, within), _EXTENDED[hint])}
    assert is_dataclass(hint) or typing.is_typeddict(hint), hint
    return _of_class(hint, within)


def _difference(kind: type, rest: str, within: str) -> dict[str, Any]:
    """Return the schema of a difference that a feature tells, with the fields of the schema `rest` if that is one."""
    found = _of_class(kind, within)
    return _and(found, f"urn:ckptconv:1:{rest}") if rest else found


def _and(found: dict[str, Any], other: str) -> dict[str, Any]:
    """Return the schema of the fields of `found` together with those of the schema at `other`."""
    return {
        "properties": found["properties"],
        "required": found["required"],
        "$ref": other,
        "unevaluatedProperties": False,
    }


# Classes that annotations name, which their modules import for type checkers alone.
_KNOWN = {each.__name__: each for each in (k for feature in FEATURES for k in getattr(feature, "KNOWN", ()))}


@functools.cache
def _docstrings(described: type) -> dict[str, str]:
    """Return {name: what the docstring after it says} of the fields and properties of a class."""
    [body] = ast.parse(textwrap.dedent(inspect.getsource(described))).body
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for base in body.bases:
        if isinstance(above := getattr(printed, ast.unparse(base), None), type):
            found |= _docstrings(above)
    for node, after in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            assert isinstance(after, ast.Expr), (described, node.target.id)
            assert isinstance(after.value, ast.Constant)
            found[node.target.id] = " ".join(str(after.value.value).split())
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = " ".join((ast.get_docstring(node) or "").split())
    return found
