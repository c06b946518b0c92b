"""The table of options: what Python and the command line may say, that both mean the same, and what is refused."""

from __future__ import annotations

import inspect
import itertools
import json
import pickle
import pydoc
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cells import of_features, verified
from checkpoints import ckptconv_here, contents
from hypothesis import given
from hypothesis import strategies as st

import ckptconv
from ckptconv import Options, UsageError, process
from ckptconv.cli.commands import app
from ckptconv.options import keywords, registered
from ckptconv.options.kinds import FLAG, Rules
from ckptconv.options.option import FeatureOption, Option
from ckptconv.options.table import COMMAND, OPENING, OPTIONS, named_in
from ckptconv.outputs.kinds import NAMED
from ckptconv.publish.statements import AFTERWARDS, STATEMENTS

# For each option: what its default is, a value, and how that may be written, in Python and last as words.
ACCEPTED: dict[str, tuple[Any, Any, list[Any]]] = {
    "max_shard_size": (None, 5_000_000_000, [5_000_000_000, np.int64(5_000_000_000), "5000000000", "5GB"]),
    "dtype": (None, "bfloat16", [torch.bfloat16, "torch.bfloat16", "bfloat16", "bf16"]),
    "key": ("", "state_dict", ["state_dict"]),
    "include": ((), ("*.bias",), ["*.bias", ("*.bias",), ["*.bias"]]),
    "exclude": ((), ("a", "b"), [("a", "b"), ["a", "b"]]),
    "strip_prefix": ("", "model.", ["model."]),
    "rename": ((), ("a=b",), ["a=b", ("a=b",), ["a=b"]]),
    "tied": ("alias", "duplicate", ["duplicate"]),
    "structure": (True, False, [False]),
    "to": ("", "safetensors", ["safetensors"]),
    "states": ("", "states", [Path("states"), "states"]),
    "jobs": (None, 3, [3, np.uint8(3), "3"]),
    "memory": (None, 1 << 20, [1 << 20, "1048576", "1MiB"]),
    "fsync": (True, False, [False]),
    "clobber": (True, False, [False]),
    "overwrite": (False, True, [True]),
    "checksum": (False, True, [True]),
    "spool_dir": ("", "/tmp/x", [Path("/tmp/x"), "/tmp/x"]),
    "manifest": ("", "m.json", [Path("m.json"), "m.json"]),
    "digest": ("", "sha256", ["sha256"]),
    "dry_run": (False, True, [True]),
    "storage_options": ({}, {"anon": True}, [{"anon": True}, '{"anon": true}']),
    "raw": (False, True, [True]),
    "alone": (False, True, [True]),
    "family": ("", "torch", ["torch"]),
    "tag": ("", "global_step1", ["global_step1"]),
    "exclude_frozen_parameters": (False, True, [True]),
    "master": (False, True, [True]),
    "unstack": (False, True, [True]),
    "optimizer": ("", "states", [Path("states"), "states"]),
    "for_hub": (False, True, [True]),
    "per_rank": (False, True, [True]),
    "opaque": ("", "keep", ["keep"]),
    "drop_opaque": (False, False, [False]),  # the same as opaque="drop"
    **{name: values for more in of_features("ACCEPTED_VALUES") for name, values in more.items()},
}
NOT_TEXT = [3, b"x", ["a"], True]
REFUSED: dict[str, list[Any]] = {
    "max_shard_size": [-1, 0, True, 5e9, "", "5 apples", "-1", "9" * 5000, "1e3", [1]],
    "dtype": [3, "int8", "", torch.int8, np.float64, float, torch.float64, ["bf16"], object()],
    "key": NOT_TEXT,
    "include": [3, b"x", [3], {"a"}, {"a": 1}],
    "exclude": [3, ("a", None)],
    "strip_prefix": NOT_TEXT,
    "rename": ["a", "", "(=b", ["a=b", "c"], 3, "(" * 3000 + ")" * 3000 + "=", "a{99999999999999}=b"],
    "tied": ["x", "", 3, ["alias"]],
    "to": ["x", 3, ["safetensors"]],
    "jobs": [0, -1, 257, True, 1.0, "0", "many", "", "1 000"],
    "memory": [0, -1, "x", 1.5, "GiB", "5i"],
    "spool_dir": [3, b"/tmp"],
    "manifest": [3, b"m", ["m"]],
    "digest": ["md5", 3, True, "SHA256"],
    "storage_options": ["[]", "{", "3", 3, {3: 1}, [("anon", True)], "[" * 100_000],
    "family": NOT_TEXT,
    "tag": NOT_TEXT,
    "optimizer": [3, b"o"],
    "states": [3, b"o"],
    "opaque": ["x", 3, True],
    **{name: values for more in of_features("REFUSED_VALUES") for name, values in more.items()},
    **{name: [None, 1, 0, "yes", ""] for name, option in OPTIONS.items() if option.kind is FLAG},
}


def test_every_option_is_tried_here() -> None:
    assert ACCEPTED.keys() == OPTIONS.keys() == REFUSED.keys()
    assert vars(Options()) == {}


@pytest.mark.parametrize("name", OPTIONS)
def test_python_means_what_the_command_line_means(name: str) -> None:
    default, value, ways = ACCEPTED[name]
    assert getattr(Options(), name) == default
    for way in ways:
        found = getattr(Options(**{name: way}), name)
        assert found == value
        assert type(found) is type(value)
        assert getattr(Options(**{name: found}), name) == found
    words = ways[-1] if OPTIONS[name].kind is not FLAG else value is not default
    assert OPTIONS[name].of_words(words) == value
    if OPTIONS[name].kind is not FLAG:
        assert getattr(Options(**{name: None}), name) == default


def test_pairs_instead_of_json_are_answered_with_the_right_form() -> None:
    with pytest.raises(UsageError, match=r"is not JSON, such as '{\"key\": \"value\"}'") as caught:
        OPTIONS["storage_options"].of_words("key=AKIA")
    assert "AKIA" not in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_a_wrong_value_is_one_sentence_that_names_the_option(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        Options(**{name: value})
    assert caught.value.message.startswith(name)
    assert len(caught.value.message.splitlines()) == 1
    with pytest.raises(UsageError):
        ckptconv.convert(tmp_path / "none.pt", tmp_path / "out", **{name: value})


@pytest.mark.parametrize("name", [name for name in OPTIONS if name in REFUSED and OPTIONS[name].kind is not FLAG])
def test_of_the_command_line_the_option_is_named_as_it_is_written_there(name: str) -> None:
    for value in (value for value in REFUSED[name] if isinstance(value, str)):
        with pytest.raises(UsageError) as caught:
            OPTIONS[name].of_words(value)
        assert caught.value.message.startswith(OPTIONS[name].flags[0])


def test_short_names_of_dtypes_are_their_names() -> None:
    for short, full in {"fp32": "float32", "float": "float32", "half": "float16", "f16": "float16"}.items():
        assert Options(dtype=short).dtype == full


def test_the_case_of_the_name_of_a_dtype_does_not_matter() -> None:
    for written, full in {"BF16": "bfloat16", "Float32": "float32", "KEEP": "keep"}.items():
        assert Options(dtype=written).dtype == full
    with pytest.raises(UsageError, match="'FP8' is not a supported output dtype"):
        Options(dtype="FP8")


def test_torch_is_not_imported_to_know_its_dtypes() -> None:
    code = """
import sys
from ckptconv import Options
class Dtype:
    def __str__(self):
        return "torch.bfloat16"
assert Options(dtype=Dtype()).dtype == "bfloat16"
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_guessed_name_of_an_error_leads_to_the_one_that_there_is() -> None:
    for name, said in (
        ("Error", "no attribute 'Error'. Did you mean CkptconvError?"),
        ("opne", "attribute 'opne'$"),
        ("__nothing__", "attribute '__nothing__'$"),
        ("load", "attribute 'load'. Did you mean load_state_dict?"),
        ("save_file", "attribute 'save_file'. Did you mean save_state_dict?"),
        ("safe_open", "attribute 'safe_open'. Did you mean open?"),
    ):
        with pytest.raises(AttributeError, match=said.replace("?", r"\?")):
            getattr(ckptconv, name)
    assert issubclass(ckptconv.CkptconvError, Exception)


def test_dtypes_for_some_tensors_lead_to_the_way_to_keep_theirs() -> None:
    way = "To leave some tensors of a conversion unchanged, use exclude=GLOB, graft='INPUT:GLOB'"
    for dtype in ({"*norm*": "fp32"}, "*norm*=fp32", "bf16,fp32"):
        with pytest.raises(UsageError, match="dtype") as caught:
            Options(dtype=dtype)  # type: ignore[arg-type]
        assert (way in str(caught.value)) is not bool(registered.missing("graft"))
    with pytest.raises(UsageError) as caught:
        Options(dtype="bf17")
    assert "graft" not in str(caught.value)


def test_options_are_values() -> None:
    options = Options(dtype="bf16", include="a", storage_options={"anon": True}, jobs="1")
    assert pickle.loads(pickle.dumps(options)) == options
    assert options.replaced(jobs=2) == Options(**{**vars(options), "jobs": "2"})
    assert options.replaced(rename=Rules(["(=b"])).rename == ("(=b",)
    with pytest.raises(AttributeError):
        options.jobs = 3  # type: ignore[misc]
    given = {"anon": True}
    taken = Options(storage_options=given)
    given["anon"] = False
    assert taken.storage_options == {"anon": True}
    Options().storage_options["anon"] = True  # type: ignore[index]
    assert Options().storage_options == {}


def test_keeping_and_dropping_contradict_each_other() -> None:
    assert Options(drop_opaque=True) == Options(opaque="drop")
    with pytest.raises(UsageError, match="contradict"):
        Options(drop_opaque=True, opaque="keep")


# ---------------------------------------------------------------------------------------------------------- the record

TEXT = st.text(max_size=5)
DECIDING = {
    "alone": st.booleans(),
    "max_shard_size": st.integers(1, 1 << 70) | st.sampled_from(["5GB", "1GiB"]),
    "dtype": st.sampled_from(["fp32", "bfloat16", "half", "keep"]),
    "key": TEXT,
    "include": TEXT | st.lists(TEXT),
    "exclude": TEXT | st.lists(TEXT).map(tuple),
    "strip_prefix": TEXT,
    "rename": st.lists(st.sampled_from(["a=b", "^(x)=\\1", "="])),
    "tied": st.sampled_from(["alias", "duplicate"]),
    "structure": st.booleans(),
    "to": st.sampled_from(["", *NAMED]),
    "raw": st.booleans(),
    "tag": TEXT,
    "exclude_frozen_parameters": st.booleans(),
    "master": st.booleans(),
    "unstack": st.booleans(),
    "opaque": st.sampled_from(["", "keep", "drop"]),
    **{name: values for more in of_features("DECIDING") for name, values in more.items()},
}


@given(st.fixed_dictionaries({}, optional=DECIDING))
def test_what_a_manifest_records_read_back_is_what_was_asked_for(asked: dict[str, Any]) -> None:
    options = Options(**asked, jobs=3, checksum=True)
    told = json.loads(json.dumps(options.recorded()))
    assert Options(**told, jobs=3, checksum=True) == options
    assert all(type(value) is OPTIONS[name].kind.stored for name, value in told.items())


def test_all_that_decides_is_recorded_and_nothing_else() -> None:
    for name, (_, value, _) in ACCEPTED.items():
        if name not in ("drop_opaque", "for_hub"):  # which stand for other options
            assert list(Options(**{name: value}).recorded()) == ([name] if OPTIONS[name].decides else [])
    assert {name for name, option in OPTIONS.items() if option.decides} == {*DECIDING, "drop_opaque", "for_hub"}


def test_an_option_of_a_feature_that_is_not_here_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "m.pt")
    ckptconv.convert(tmp_path / "m.pt", tmp_path / "out", fsync=False)
    monkeypatch.setattr(registered, "FEATURES", {**registered.FEATURES, "absent": "bend twist_more"})
    with pytest.raises(UsageError, match=r"'twist_more' needs the feature absent, which is not installed\."):
        Options(twist_more=True)
    with pytest.raises(UsageError, match=r"'bend' needs the feature absent"):
        ckptconv.convert(tmp_path / "m.pt", tmp_path / "other", bend=1)
    ckptconv_here("convert", tmp_path / "m.pt", tmp_path / "other", "--twist-more").refused(
        2, "--twist-more needs the feature absent, which is not installed."
    )
    manifest = tmp_path / "out" / ".ckptconv-manifest.json"
    told = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**told, "options": {"bend": 3}}))
    for compare in of_features("COMPARING_OUTPUTS"):
        with pytest.raises(UsageError, match=r"records the option 'bend', which requires the feature absent"):
            compare(tmp_path / "m.pt", tmp_path / "out")
    # What tables name of such features is left out of them; a name that nobody has is a mistake.
    assert list(named_in("dtype bend jobs")) == ["dtype", "jobs"]
    with pytest.raises(KeyError):
        named_in("dtype bent")


def test_a_feature_reads_its_own_options_of_those_of_a_conversion() -> None:
    for feature in registered.FEATURES.keys() - {*registered.CARRIED_OUT, *registered.EXECUTORS}:
        if own := process.of_feature(feature, "options"):
            options = Options(**{name: ACCEPTED[name][1] for name in own.GIVEN.table})
            assert vars(own.GIVEN.of(options)) == {name: ACCEPTED[name][1] for name in own.GIVEN.table}


def test_the_table_knows_the_options_of_features_by_name_alone() -> None:
    for feature, names in registered.FEATURES.items():
        if own := process.of_feature(feature, "options"):
            assert list(own.GIVEN.table) == names.split()
            for name, option in own.GIVEN.table.items():
                known = {**OPTIONS, **COMMAND}[name]
                assert isinstance(known, FeatureOption)
                assert (known.flags, known.former, known.env) == (option.flags, option.former, option.env)
                assert (known.kind, known.about, known.decides) == (option.kind, option.about, option.decides)


# ---------------------------------------------------------------------------------------------------- the command line


def commands() -> dict[str, set[str]]:
    """The options of every command, by all their names."""
    found: dict[str, set[str]] = {}

    def walk(command: Any, path: str) -> None:
        for name, below in getattr(command, "commands", {}).items():
            walk(below, f"{path} {name}".strip())
        if not hasattr(command, "commands"):
            shown = (each for each in command.params if not getattr(each, "hidden", False))
            options = [each for each in shown if each.param_type_name == "option"]
            found[path] = {flag for each in options for flag in each.opts}

    walk(app.made(), "")
    return found


def flags(*tables: dict[str, Option]) -> set[str]:
    every = (
        flag for table in tables for option in table.values() if option.group != "library" for flag in option.flags
    )
    return {name for flag in every if (name := flag.partition("/")[0].strip())}


def test_the_command_line_has_the_options_of_the_table_and_no_others() -> None:
    here = commands()
    every = set().union(*here.values())
    for begin, tables in {begin: tables for each in of_features("FLAGS") for begin, tables in each.items()}.items():
        own = [here.pop(name) for name in [*here] if name.startswith(begin)]
        assert set().union(*own) - flags(OPTIONS, COMMAND) == flags(*tables) - flags(OPTIONS)
    # Commands of features take some of the table too.
    assert set().union(*here.values()) <= flags(OPTIONS, COMMAND) <= every


def options_of_commands(command: Any = None, path: str = "") -> Iterator[tuple[str, Option]]:
    """Each option of each command, with the command's name."""
    command = command or app.made()
    for name, below in getattr(command, "commands", {}).items():
        yield from options_of_commands(below, f"{path} {name}".strip())
    yield from ((path, option) for option in getattr(command.callback, "options", {}).values())


def test_a_command_lists_no_option_that_it_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tried: set[str] = set()
    for command, options in itertools.groupby(options_of_commands(), key=itemgetter(0)):
        called = [[*command.split(), *(f"none-{n}" for n in range(count))] for count in (3, 2, 1)]
        words = next(words for words in called if "rguments" not in ckptconv_here(*words).err)
        for _, option in options:
            if option.name in ACCEPTED:
                value = [] if option.kind is FLAG else [str(ACCEPTED[option.name][2][-1])]
                run = ckptconv_here(*words, option.flags[0].partition("/")[0], *value)
                assert run.code, run.out
                assert "no option" not in run.err, (command, option, run.err)
                tried.add(option.name)
    assert ACCEPTED.keys() - tried == {"family"}


def test_a_name_has_one_meaning_in_every_command_and_in_every_call() -> None:
    words: dict[str, dict[int, str]] = {}
    for command, option in options_of_commands():
        for name in flags({option.name: option}):
            words.setdefault(name, {})[id(option.origin)] = command
    names: dict[str, dict[int, str]] = {}
    for call, (table, _) in keywords.tables().items():
        for name, option in table.items():
            names.setdefault(name, {})[id(option.origin)] = call
    several = {name: [*of.values()] for name, of in (*words.items(), *names.items()) if len(of) > 1}
    assert several == {}
    assert len(words) > 80


def test_states_are_written_to_one_option_and_read_from_another() -> None:
    for command, option in options_of_commands():
        if option.flags[0] == "--optimizer":
            assert option.about.startswith("Write"), command
        if option.flags[0] == "--states":
            assert not option.about.startswith("Write"), command


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ({"dtype": torch.bfloat16, "include": "layer*"}, ["--dtype", "bf16", "--include", "layer*"]),
        ({"dtype": "fp16", "max_shard_size": "2KB"}, ["--dtype", "float16", "--max-shard-size", "2KB"]),
        ({"max_shard_size": 2000, "memory": "1MiB", "jobs": "2"}, ["--max-shard-size", "2KB"]),
        ({"rename": "^layer=l", "exclude": ["*1*"]}, ["--rename", "^layer=l", "--exclude", "*1*"]),
        ({"tied": "duplicate", "structure": False}, ["--tied", "duplicate", "--no-structure"]),
        *([({"part": "0/1", "checksum": True}, ["--part", "0/1", "--checksum"])] if "part" in OPTIONS else []),
    ],
)
def test_the_library_makes_the_same_files(python: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    tied = torch.arange(600.0)
    state = {"layer0": tied, "layer1": {"w": torch.ones(30, 20)}, "layer2": tied, "epoch": 3}
    torch.save(state, tmp_path / "m.pt")
    for place in ("library", "words"):
        (tmp_path / place).mkdir()
    library, other = tmp_path / "library", tmp_path / "words"
    manifest, as_words = (
        ({}, []) if "part" in python else ({"manifest": library / "m.json"}, ["--manifest", other / "m.json"])
    )
    ckptconv.convert(tmp_path / "m.pt", library / "out", family="torch", **manifest, **python)
    run = ckptconv_here("pt2safetensors", tmp_path / "m.pt", other / "out", *as_words, *words)
    assert run.code == 0, run.err
    if "part" in python:
        ckptconv.finish([library / "out"], manifest=library / "m.json", fsync=False)
        assert ckptconv_here("finish", other / "out", "--manifest", other / "m.json", "--no-fsync").code == 0
    made = contents(library)
    assert "m.json" in made
    assert made == contents(other)
    verified(tmp_path / "m.pt", library / "out", manifest=library / "m.json")


def test_every_path_may_be_a_file_url(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "m.pt")
    here = f"file://{tmp_path}"
    names = ("manifest", *named_in(" ".join((*STATEMENTS, *AFTERWARDS))))
    paths = {name: f"{here}/{name}" for name in names}
    ckptconv.convert(f"{here}/m.pt", f"{here}/out", spool_dir=here, digest="sha256", fsync=False, **paths)
    assert {*paths, "out"} < {path.name for path in tmp_path.iterdir()}


# -------------------------------------------------------------------------------------------------------- wrong names

CALLS: dict[str, Callable[..., Any]] = {
    "convert": lambda **options: ckptconv.convert("none.pt", "out", **options),
    "Options": Options,
    **{name: call for calls in of_features("CALLS") for name, call in calls.items()},
}


@pytest.mark.parametrize(
    ("call", "name", "meant"),
    [
        ("convert", "dtpe", "dtype"),
        ("convert", "no_fsync", "fsync"),
        ("convert", "progess", "progress"),
        ("convert", "maxshardsize", "max_shard_size"),
        ("Options", "job", "jobs"),
        *itertools.chain(*of_features("MISSPELT")),
    ],
)
def test_a_wrong_name_is_met_with_the_one_that_was_meant(call: str, name: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        CALLS[call](**{name: 1})
    assert caught.value.message.startswith(f"There is no option {name!r}.")
    assert meant in caught.value.hint


def test_a_name_like_no_other_is_told_where_the_names_are() -> None:
    for name in ("zzz", "finish" * 100):
        with pytest.raises(UsageError, match="Use the option names of the command line"):
            ckptconv.convert("none.pt", **{name: 1})


def test_arguments_in_order_are_counted() -> None:
    with pytest.raises(UsageError, match=r"^convert\(source, output\) lacks source\."):
        ckptconv.convert(output="x")  # type: ignore[call-arg]
    with pytest.raises(
        UsageError, match=r"^convert\(source, output\) was given 3 arguments without a name\."
    ) as caught:
        ckptconv.convert("a", "b", "c")  # type: ignore[misc]
    assert caught.value.hint == "Give the other arguments by name."


def test_only_a_state_is_met_with_what_writes_one(tmp_path: Path) -> None:
    for value in ({"a": torch.ones(1)}, torch.nn.Linear(2, 2)):
        with pytest.raises(UsageError, match="writes a state dict"):
            ckptconv.convert(value, tmp_path / "x")  # type: ignore[arg-type]
    with pytest.raises(UsageError) as caught:
        Options(manifest={"a": "b"})
    assert not caught.value.hint


def test_options_of_what_is_printed_are_the_command_line_s() -> None:
    for name in ("json", "quiet", "verbose"):
        with pytest.raises(UsageError) as caught:
            ckptconv.convert("none.pt", **{name: True})  # type: ignore[arg-type]
        assert caught.value.hint == "Only the command line has this option."


def test_dtypes_of_numpy_are_those_of_the_same_name() -> None:
    for dtype in (np.float16, np.dtype("float16"), np.dtype(">f2"), "numpy.float16"):
        assert Options(dtype=dtype).dtype == "float16"
    with pytest.raises(UsageError, match=r"^dtype float is not a dtype\.") as caught:
        Options(dtype=float)
    assert caught.value.hint == "Give the name of a dtype, or a dtype of torch or numpy."


def test_a_name_of_another_program_is_met_with_advice() -> None:
    for call, name, advice in (
        ("convert", "torch_dtype", "Use dtype, such as dtype bf16."),
        ("convert", "num_workers", "Use jobs N."),
        *itertools.chain(*of_features("ADVISED")),
    ):
        with pytest.raises(UsageError) as caught:
            CALLS[call](**{name: 1})
        assert caught.value.hint == advice, (call, name)


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        *itertools.chain(*of_features("WRONG_VALUES")),
    ],
)
def test_other_functions_check_their_options_too(call: str, name: str, value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        CALLS[call](**{name: value})
    assert caught.value.message.startswith(name)


def test_every_option_of_opening_takes_words() -> None:
    assert OPENING["model_rank"].parse(0) == 0


def test_functions_keep_their_signatures() -> None:
    assert next(iter(inspect.signature(ckptconv.convert).parameters)) == "source"
    assert [*inspect.signature(ckptconv.convert).parameters][-len(OPTIONS) :] == list(OPTIONS)


def test_help_lists_the_options() -> None:
    shown = pydoc.render_doc(Options, renderer=pydoc.plaintext)
    for name, option in OPTIONS.items():
        assert re.search(rf"\b{name}: .{{1,160}} = {re.escape(repr(option.default))}", shown)
        assert f"{name} = <{option.flags[0]}: {option.about[:10]}" in shown


def test_a_size_without_a_unit_that_is_hardly_meant_is_refused(tmp_path: Path) -> None:
    for name in ("max_shard_size", "memory"):
        option = OPTIONS[name]
        for text in ("5", " 999999 ", "5.5"):
            with pytest.raises(UsageError, match=f"{option.flags[0]} {text} has no unit, so it means .* Write .*GB or"):
                option.of_words(text)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert [option.of_words(text) for text in ("5B", "0.5k", "1000000")] == [5, 500, 10**6]
            assert option.parse(5) == 5
    run = ckptconv_here("convert", tmp_path / "none.pt", "--max-shard-size", 5)
    run.refused(2, "--max-shard-size 5 has no unit, so it means 5 bytes. ", "Write 5GB or 5MB")
