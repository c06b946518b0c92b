"""Which rule has a name, on the way there and on the way back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from effort import every
from features.maps.mapping import Checkpoint, numbered, same, values

from ckptconv.errors import UsageError
from ckptconv.features.maps.claims import precedences
from ckptconv.features.maps.compile import apply_map
from ckptconv.features.maps.file import from_catalogue, parse_map


def there_and_back(path: Path, text: str, names: Mapping[str, str], **sizes: int) -> None:
    """Check that the map gives each tensor its new name, and the old one back."""
    map_ = parse_map(text, "test.toml")
    there = numbered(**dict.fromkeys(names, (2, 2)))
    back = {names[name]: array for name, array in there.items()}
    a, b = map_.sides
    same(values(apply_map(map_, Checkpoint(path / "there", there).tensors, sizes=sizes, target=b).tensors), back)
    same(values(apply_map(map_, Checkpoint(path / "back", back).tensors, sizes=sizes, target=a).tensors), there)


PREFIX = """
[[rule]]   # everything else, under another prefix
a = "{name}"
b = "model.{name}"
[[rule]]
a = "head.weight : (x + y) h"
b = ["lm_head.one : x h", "lm_head.two : y h"]
[[rule]]
a = "layers.{l}.norm.weight"
b = "model.layers.{l}.input_norm.weight"
[sizes]
x = 1
"""


def test_a_more_special_rule_has_a_name_before_a_more_general_one(tmp_path: Path) -> None:
    names = {
        "scale": "model.scale",
        "tok.weight": "model.tok.weight",
        "layers.0.norm.weight": "model.layers.0.input_norm.weight",
        "layers.0.mlp.norm.weight": "model.layers.0.mlp.norm.weight",
    }
    there_and_back(tmp_path, PREFIX, names)


def test_a_name_of_one_part_does_not_decide_how_many_parts_an_index_has(tmp_path: Path) -> None:
    text = '[[rule]]\na = "decoder.{name}"\nb = "model.{name}"\n'
    names = ("scale", "norm.weight", "mlp.norm.weight")
    there_and_back(tmp_path, text, {f"decoder.{name}": f"model.{name}" for name in names})


@every(
    "special, general",
    [
        ("x.y", "x.{a}"),
        ("x.{a}.y", "x.{a}.{b}"),
        ("x.{a}.w{b}", "x.{a}.{b}"),
        ("x.{a}_{b}.w", "x.{a}.w"),
        ("x.pre_{a}", "x.pr{a}"),
    ],
)
def test_special_is_what_has_no_name_that_the_other_has_not(tmp_path: Path, special: str, general: str) -> None:
    for rules in ((special, general), (general, special)):
        text = "".join(
            f'[[rule]]\na = "{name}"\nb = "{"one" if name == special else "two"}.{name}"\n' for name in rules
        )
        map_ = parse_map(text, "test.toml")
        name = special.replace("{a}", "p").replace("{b}", "q")
        made = apply_map(map_, Checkpoint(tmp_path / "x", numbered(**{name: (1,)})).tensors, target="b")
        assert [*made.tensors] == [f"one.{name}"]
        ((first, second),) = precedences(map_)
        assert (str(first.sides[0][0].name), str(second.sides[0][0].name)) == (special, general)


def test_of_rules_that_are_special_in_different_places_neither_wins(tmp_path: Path) -> None:
    text = '[[rule]]\na = "x.{a}"\nb = "one.{a}"\n[[rule]]\na = "{a}.y"\nb = "two.{a}"\n'
    map_ = parse_map(text, "test.toml")
    assert precedences(map_) == []
    rules = (
        r"Several entries of the map test\.toml match the name 'x\.y': test\.toml:1, rule 1 and test\.toml:4, rule 2"
    )
    with pytest.raises(UsageError, match=rules):
        apply_map(map_, Checkpoint(tmp_path / "x", numbered(**{"x.y": (1,)})).tensors, target="b")


def test_a_rule_that_needs_more_is_not_passed_over_for_a_general_one(tmp_path: Path) -> None:
    text = '[[rule]]\na = ["x.q : a h", "x.k : b h"]\nb = "x.qk : (a + b) h"\n[[rule]]\na = "x.{p}"\nb = "y.{p}"\n'
    tensors = Checkpoint(tmp_path / "x", numbered(**{"x.q": (1, 2), "x.norm": (2,)})).tensors
    with pytest.raises(UsageError, match=r"test\.toml:1, rule 1: 'x\.q' exists, but the rule also needs 'x\.k'"):
        apply_map(parse_map(text, "test.toml"), tensors)


def test_what_is_kept_or_dropped_by_name_is_not_taken_by_a_rule_that_has_all(tmp_path: Path) -> None:
    text = '[[rule]]\na = "{p}"\nb = "model.{p}"\n[drop]\na = ["inv_freq"]\n[keep]\na = ["lm_*"]\n'
    there = numbered(x=(1,), inv_freq=(1,), lm_head=(1,))
    made = apply_map(parse_map(text, "test.toml"), Checkpoint(tmp_path / "x", there).tensors, target="b")
    assert ([*made.tensors], [*made.dropped]) == (["model.x", "lm_head"], ["inv_freq"])


@every(
    "text, name, told",
    [
        (
            '[[rule]]\na = "x.{p}"\nb = "y.{p}"\n[[rule]]\na = "z"\nb = "y.w"\n',
            "x.w",
            r"test\.toml:1, rule 1 makes 'y\.w', but in reverse, from b, test\.toml:4, rule 2 matches that name",
        ),
        (
            '[[rule]]\na = "x.{p}"\nb = "y.{p}"\n[keep]\na = ["y.*"]\n[[rule]]\na = "w"\nb = "w"\n',
            "y.k",
            r"\[keep\] keeps 'y\.k', but in reverse, from b, test\.toml:1, rule 1 matches that name",
        ),
        (
            '[[rule]]\na = "x.{p}"\nb = "y.{p}"\n[drop]\nb = ["y.w"]\n',
            "x.w",
            r"rule 1 makes 'y\.w', but in reverse, from b, 'y\.w' of \[keep\] or \[drop\] matches that name",
        ),
        (
            '[[rule]]\na = "{p}.x.{q}"\nb = "{p}_x_{q}"\n',
            "a_x_b.x.c",
            r"'a_x_b_x_c', but in reverse, from b, test\.toml:1, rule 1 matches that name, with other indices",
        ),
        (
            '[[rule]]\na = "x.{p}"\nb = "y.{p}.c"\n[[rule]]\na = "z.{p}"\nb = "y.b.{p}"\n',
            "x.b",
            r"reverse map is ambiguous.*Several entries of the map test\.toml match the name 'y\.b\.c'",
        ),
    ],
)
def test_a_map_without_a_way_back_is_refused_when_it_is_applied(
    tmp_path: Path, text: str, name: str, told: str
) -> None:
    tensors = Checkpoint(tmp_path / "x", numbered(**{name: (1,)})).tensors
    with pytest.raises(UsageError, match=told):
        apply_map(parse_map(text, "test.toml"), tensors, target="b")


def test_an_error_names_the_rules_that_took_the_tensors(tmp_path: Path) -> None:
    text = '[[rule]]\na = "x"\nb = "z"\n[[rule]]\na = "y"\nb = "z"\n'
    tensors = Checkpoint(tmp_path / "x", numbered(x=(1,), y=(1,))).tensors
    with pytest.raises(UsageError, match=r"rule 2: 'y' would become 'z', but so would 'x' \(test\.toml:1, rule 1\)"):
        apply_map(parse_map(text, "test.toml"), tensors, target="b")


@every("special", ["0", "1{e}"])
def test_a_number_in_a_template_tells_names_from_those_of_other_numbers(tmp_path: Path, special: str) -> None:
    """Names that differ in numbers alone are of one template, unless another has one of the numbers."""
    text = f'[[rule]]\na = "x.{{e}}.w"\nb = "y.{{e}}.w"\n[[rule]]\na = "x.{special}.w"\nb = "z.{special}.w"\n'
    first = special.replace("{e}", "7")
    names = {"x.5.w": "y.5.w", f"x.{first}.w": f"z.{first}.w", "x.23.w": "y.23.w", "x.e.w": "y.e.w"}
    there_and_back(tmp_path, text, names)


def test_a_glob_that_keeps_all_names_is_told_the_rule_that_does(tmp_path: Path) -> None:
    rule = '[[rule]]\na = "x.{l}.q"\nb = "y.{l}"\n'
    tensors = Checkpoint(tmp_path / "x", numbered(**{"x.0.q": (1,), "norm.weight": (1,)})).tensors
    with pytest.raises(UsageError, match="Several entries of the map") as error:
        apply_map(parse_map(f'{rule}[keep]\nnames = ["*"]\n', "test.toml"), tensors, target="b")
    advice = error.value.hint.rpartition("instead of the glob: ")[2].rstrip(".")
    assert advice == 'a = "{name}" and b = "{name}"'
    followed = f"{rule}[[rule]]\n" + advice.replace(" and ", "\n")
    assert [*apply_map(parse_map(followed, "test.toml"), tensors, target="b").tensors] == ["y.0", "norm.weight"]


def test_names_without_a_rule_are_told_the_globs_that_keep_them(tmp_path: Path) -> None:
    text = '[[rule]]\na = "x.{l}.q"\nb = "y.{l}"\n'
    names = {"x.0.q": "y.0", **{name: name for name in ("x.0.bias", "x.1.bias", "q.1", "norm[0].weight")}}
    tensors = Checkpoint(tmp_path / "x", numbered(**dict.fromkeys(names, (1,)))).tensors
    with pytest.raises(UsageError, match="has no rule for 4 tensors") as error:
        apply_map(parse_map(text, "test.toml"), tensors, target="b")
    advice = error.value.hint.partition("unchanged, write ")[2].partition(" below [keep]")[0]
    assert advice == "a = ['x.{i}.bias', 'q.{i}', 'norm[[]0].weight']"
    followed = apply_map(parse_map(f"{text}[keep]\n{advice}\n", "test.toml"), tensors, target="b").tensors
    assert sorted(followed) == sorted(names.values())


def test_names_that_are_endings_of_names_with_a_rule_are_told_no_globs(tmp_path: Path) -> None:
    tensors = Checkpoint(tmp_path / "x", numbered(**{"x.0.q": (1,), "0.q": (1,)})).tensors
    with pytest.raises(UsageError, match="has no rule for") as error:
        apply_map(parse_map('[[rule]]\na = "x.{l}.q"\nb = "y.{l}"\n', "test.toml"), tensors, target="b")
    assert "[keep]" not in error.value.hint


def test_a_built_in_map_without_a_rule_is_to_be_copied_first(tmp_path: Path) -> None:
    tensors = Checkpoint(tmp_path / "x", numbered(**{"norm.weight": (1,), "mine": (1,)})).tensors
    with pytest.raises(UsageError, match="has no rule for") as error:
        apply_map(from_catalogue("torchtitan-llama3"), tensors, target="hf")
    assert (
        "a copy of the map (ckptconv maps show torchtitan-llama3 > my.toml; then --map ./my.toml)" in error.value.hint
    )
    assert "write titan = ['mine'] below [keep]" in error.value.hint
