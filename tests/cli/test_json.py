"""What --json prints: one object, of a published schema, whatever a command does and however it fails."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks.corpus import CASES
from cells import READ_BACK, VERIFY, of_features, verifying
from checkpoints import COMMAND, Run, ckptconv_here, done
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

import ckptconv.cli
from ckptconv.errors import ERROR_KINDS, StoppedError
from ckptconv.options.registered import missing
from ckptconv.process import has_feature

SCHEMAS = {
    path.stem: json.loads(path.read_text()) for path in (Path(ckptconv.cli.__file__).parent / "schemas").glob("*.json")
}
REGISTRY: Registry[Any] = Registry().with_resources(
    (schema["$id"], Resource.from_contents(schema)) for schema in SCHEMAS.values()
)
SCHEMA_OF = {
    command: name for name, schema in SCHEMAS.items() for command in schema["properties"]["command"].get("enum", ())
}


def check(run: Run, name: str) -> Any:
    """The object that a command printed, which is of the schema `name`."""
    assert run.out.count("\n") == 1, run.out
    found = run.json
    Draft202012Validator(SCHEMAS[name], registry=REGISTRY).validate(found)
    assert found["ok"] == (run.code == 0)
    return found


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"w": torch.ones(3), "v": torch.ones(2, 2)}, "epoch": 3}, "model.pt")


# ------------------------------------------------------------------------------------------------------------- success

# Each command, and what it is called with, one after another.
WAYS: dict[str, list[list[Any]]] = {
    "convert": [["model.pt", "other.safetensors"], ["other.safetensors", "again.safetensors", "--no-structure"]],
    "pt2safetensors": [
        ["model.pt"],
        ["model.pt", "--dry-run"],
        ["model.pt", *VERIFY, "--checksum", "--key", "model"],
    ],
}


def test_what_a_command_prints_is_of_its_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for before in (
        ["pt2safetensors", "model.pt", *READ_BACK],
        *itertools.chain(*of_features("BEFORE")),
    ):
        _ = before() if callable(before) else done(ckptconv_here(*before))
    for command, calls in itertools.chain(WAYS.items(), *(ways.items() for ways in of_features("WAYS"))):
        # Each command has a directory of its own, as the first has made it.
        monkeypatch.chdir(
            shutil.copytree(tmp_path, tempfile.mkdtemp(prefix=command, dir=tmp_path.parent), dirs_exist_ok=True)
        )
        for arguments in calls:
            found = check(done(ckptconv_here(*command.split(), *arguments, "--json", "-q")), SCHEMA_OF[command])
            assert found["command"] == command
            assert found["input"], command


@pytest.mark.skipif(bool(missing("output_dir")), reason="convert takes one input")
def test_several_inputs_are_one_object_with_a_report_or_an_error_of_each() -> None:
    Path("cut.pt").write_bytes(Path("model.pt").read_bytes()[:-100])
    Path("whole.pt").write_bytes(Path("model.pt").read_bytes())
    several = ["convert", "model.pt", "cut.pt", "whole.pt", "--output-dir", "all", "--json"]
    found = check(ckptconv_here(*several), "convert-several")
    assert [each["ok"] for each in found["results"]] == [True, False, True]
    assert (found["error"]["exit_code"], found["results"][1]["error"]["kind"]) == (4, "corrupt")
    assert "error" not in check(
        ckptconv_here("convert", "model.pt", "--output-dir", "one", "--json"), "convert-several"
    )


def with_json(group: Any, path: str = "") -> Iterator[str]:
    """The commands in `group`, and in the groups in it, that have --json."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from with_json(command, f"{path}{name} ")
        if "json" in {parameter.name for parameter in command.params}:
            yield f"{path}{name}"


def test_every_command_has_a_schema() -> None:
    assert set(SCHEMA_OF) == set(with_json(COMMAND))
    tried = {*WAYS}.union(*of_features("WAYS"), *of_features("PRINTED"))
    assert set(SCHEMA_OF) == tried, "what these print is tried where they are"
    for name, schema in SCHEMAS.items():
        Draft202012Validator.check_schema(schema)
        assert schema["$id"] == f"urn:ckptconv:1:{name}"


def schemas_in(value: Any) -> Iterator[dict[str, Any]]:
    """Every schema in a schema that describes an object by its fields."""
    if isinstance(value, dict):
        if isinstance(value.get("properties"), dict):
            yield value
        for each in value.values():
            yield from schemas_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from schemas_in(each)


def test_every_field_is_described_in_a_sentence() -> None:
    for name, whole in SCHEMAS.items():
        for schema in schemas_in(whole):
            for field, described in schema["properties"].items():
                assert described["description"].endswith((".", "…")), (name, field)


def test_a_field_that_is_not_published_is_refused() -> None:
    found = check(ckptconv_here("pt2safetensors", "model.pt", "--json"), "conversion")
    validator = Draft202012Validator(SCHEMAS["conversion"], registry=REGISTRY)
    assert not validator.is_valid({**found, "more": 1})
    assert not validator.is_valid({**found, "version": 2})
    assert not validator.is_valid({name: value for name, value in found.items() if name != "seconds"})


# ------------------------------------------------------------------------------------------------------------- failure


def broken() -> None:
    Path("cut.pt").write_bytes(Path("model.pt").read_bytes()[:-40])
    Path("attack.pt").write_bytes(CASES["live_os_system.pt"].make("canary"))
    Path("plain.pt").write_bytes(CASES["plain.pt"].make("canary"))
    Path("there.safetensors").touch()
    Path("other.safetensors").write_bytes(Path("model.pt").read_bytes())
    torch.save({"w": torch.zeros(3)}, "other.pt")


INPUTS = {"cut.pt": (4, "corrupt"), "plain.pt": (5, "unsupported"), "no.pt": (2, "usage")}
if has_feature("attacks"):
    INPUTS["attack.pt"] = 3, "unsafe"


def test_what_a_command_prints_of_a_bad_input_is_of_the_schema_of_errors() -> None:
    broken()
    readers = {"pt2safetensors": (True, True)}
    for more in of_features("READERS"):
        readers |= more
    for command, (writes, reads_first) in readers.items():
        output = ["out.pt" if command == "safetensors2pt" else "out"] if writes else []
        for name, expected in INPUTS.items():
            run = ckptconv_here(*command.split(), name, *output, "--json", "-q")
            found = check(run, "error")
            assert (found["command"], found["input"]) == (command, name)
            assert found["error"]["exit_code"] == run.code, (command, name)
            if reads_first:
                assert (run.code, found["error"]["kind"]) == expected, (command, name)
            assert not os.path.lexists("out"), (command, name)


def test_wrong_usage_names_command_and_input_as_far_as_they_are_known() -> None:
    for words, command, asked in (
        ("pt2safetensors model.pt --jobs 0", "pt2safetensors", "model.pt"),
        ("pt2safetensors --jobs 2 model.pt --tied x", "pt2safetensors", "model.pt"),
        ("pt2safetensors --dtype=x model.pt", "pt2safetensors", "model.pt"),
        ("pt2safetensors --max_shard_size 1GB -q model.pt a b", "pt2safetensors", "model.pt"),
        ("pt2safetensors --no-fsync -- -x.pt", "pt2safetensors", "-x.pt"),
        ("pt2safetensors --nonsense 1 model.pt", "pt2safetensors", None),
        ("pt2safetensors --key", "pt2safetensors", None),
        ("pt2safetensors", "pt2safetensors", None),
        *itertools.chain(*of_features("USAGE")),
        ("model.pt", None, None),
        ("zero2fp32", None, None),
        ("--nonsense", None, None),
        ("", None, None),
    ):
        arguments = words.split()
        end = arguments.index("--") if "--" in arguments else len(arguments)
        found = check(ckptconv_here(*arguments[:end], "--json", *arguments[end:]), "error")
        assert found["error"]["exit_code"] == 2, words
        assert (found["command"], found["input"]) == (command, asked), words


def test_a_failure_and_a_limit() -> None:
    broken()
    run = ckptconv_here("pt2safetensors", "model.pt", "there.safetensors", "--no-clobber", "--json")
    assert check(run, "error")["error"]["kind"] == "failed"
    big = torch.ones(1).expand(1 << 20, 1 << 20)
    torch.save({"w": big}, "big.pt")
    run = ckptconv_here("pt2safetensors", "big.pt", "--json")
    assert (run.code, check(run, "error")["error"]["kind"]) == (4, "limit")


@verifying
def test_a_difference_says_where_it_is() -> None:
    broken()
    assert ckptconv_here("pt2safetensors", "model.pt").code == 0
    found = check(ckptconv_here("verify", "other.pt", "model.safetensors", "--json"), "error")
    assert found["error"]["kind"] == "difference"
    data = bytearray(Path("model.safetensors").read_bytes())
    data[-1] ^= 1
    Path("model.safetensors").write_bytes(data)
    found = check(ckptconv_here("verify", "model.pt", "model.safetensors", "--json"), "error")
    assert found["input"] == "model.pt"
    difference = found["error"]["difference"]
    assert (difference["what"], difference["tensor"], difference["index"]) == ("value", "model.w", [2])
    assert [each["tensor"] for each in difference["differences"]] == ["model.w"]


def test_what_differs_is_a_report_too() -> None:
    for make, words in itertools.chain(*of_features("UNEQUAL")):
        make()
        found = check(ckptconv_here(*words, "--json"), SCHEMA_OF[words[0]])
        assert (found["error"]["kind"], found["error"]["exit_code"]) == ("difference", 1)


def test_the_report_of_a_difference_that_a_feature_finds_is_of_the_schema() -> None:
    for make, words in itertools.chain(*of_features("DIFFERING")):
        make()
        run = ckptconv_here(*words, "--json")
        found = check(run, "error")
        assert (run.code, found["error"]["kind"]) == (1, "difference")
        assert found["error"]["difference"]["findings"]


def test_an_interruption_while_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise StoppedError("Stopped.", exit_code=143)

    monkeypatch.setattr("ckptconv.conversion.convert", stopped)
    run = ckptconv_here("pt2safetensors", "model.pt", "--json")
    found = check(run, "error")
    assert run.code == found["error"]["exit_code"] == 143
    assert (found["command"], found["input"]) == ("pt2safetensors", "model.pt")


def test_an_interruption_before_it_works() -> None:
    code = (
        "import os, signal; from ckptconv.cli import signals; signals.leave_at_once(); "
        "os.kill(os.getpid(), signal.SIGTERM)"
    )
    done = subprocess.run([sys.executable, "-c", code, "--json"], capture_output=True, text=True, check=False)
    assert check(Run(done.returncode, done.stdout, done.stderr), "error")["error"]["exit_code"] == 143


def test_an_error_has_one_of_the_kinds_that_are_published() -> None:
    error = SCHEMAS["error"]["properties"]["error"]["properties"]
    assert error["kind"]["enum"] == list(dict.fromkeys(kind.kind for kind in ERROR_KINDS))


# ------------------------------------------------------------------------------------------------------- what it says
