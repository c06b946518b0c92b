"""Maps as text: what is read, and what is refused, with the place of the error."""

from __future__ import annotations

import pytest
from effort import every

from ckptconv.errors import UsageError
from ckptconv.features.maps.file import matches, parse_map
from ckptconv.features.maps.notation import expand, make_rules, parse_tensor, written
from ckptconv.features.maps.sizes import Expression, resolve


@every(
    "text, axes",
    [
        ("a.weight : (g (q + k + v) d) h", "(g (q + k + v) d) h"),
        ("a.weight: h", "h"),
        ("a:weight : h", "h"),
        ("a :", ""),
        ("a : ((g q d) + (g p d)) h", "(g q d + g p d) h"),
        ("a : (g q d + g p d) h", "(g q d + g p d) h"),
        ("a : ((b c)) (d) 1 () 2", "(b c) d 1 () 2"),
    ],
)
def test_axes_are_read_and_written(text: str, axes: str) -> None:
    tensor = parse_tensor(text)
    assert tensor.dims is not None
    assert written(tensor.dims) == axes


def test_a_name_without_a_colon_has_no_axes() -> None:
    assert parse_tensor("model.norm.weight").dims is None


def test_sums_are_expanded_from_left_to_right() -> None:
    (dim,) = parse_tensor("x : ((a + b) (c + d))").dims or ()
    assert ["".join(axis.name for axis in piece) for piece in expand(dim)] == ["ac", "ad", "bc", "bd"]


@every(
    "text, at, told",
    [
        ("x : (a b", 5, "not closed"),
        ("x : a) b", 6, "has no opening parenthesis"),
        ("x : a + b", 7, "parentheses"),
        ("x : (a + ) b", 5, "missing"),
        ("x : a $", 7, r"'\$'"),
        ("x : a-b", 6, "'-'"),
        ("x{ : a", 2, "brace"),
        ("x{a b} : a", 2, "index"),
        ("x{a + } : a", 2, "index"),
        ("x{a - 1} : a", 2, "index"),
        ("x{a}{b} : a", 4, "two adjacent indices"),
        (" : a", 1, "name is missing"),
        ("x y : a", 1, "must not contain spaces"),
        ("x : " + "(" * 40 + "a" + ")" * 40, 21, "nested"),
        ("x : " + "a " * 2000, 1, "1000 characters"),
        ("{a}x{b}x{c} : a", 1, "2 indices"),
    ],
)
def test_an_error_shows_where_it_is(text: str, at: int, told: str) -> None:
    # A parenthesis that is not closed is shown where it was opened or where its end is missed.
    with pytest.raises(UsageError, match=told) as caught:
        parse_tensor(text)
    assert f"character {at}:" in caught.value.message or told == "not closed"


def rule(left: str | list[str], right: str | list[str]) -> None:
    make_rules("m.toml, rule 3", 3, ("a", "b"), [[each] if isinstance(each, str) else each for each in (left, right)])


@every(
    "left, right, told",
    [
        ("x : (a + b) c", "y : a c", "one side has 2 pieces \\('x'\\), but the other has 1 piece"),
        ("x : a b", "y : a c", "Axes only of the first: b; axes only of the second: c"),
        ("x : a a", "y : a", "occurs twice"),
        ("x.{l} : a", "y : a", r"\{l\} is an index of other tensors"),
        ("x.{a} : a", "y.{a} : a", "both an index of the name and an axis"),
        ("x : a", "y", "has no axes"),
        (["x", "y"], "z", "2 names cannot become 1"),
        ("x : (a _) b", "y : a b", "padding must be a separate term"),
        ("x : _", "y : a", "padding must be a separate term"),
        ("x : a", [], "it has 0 tensors"),
        ("x : (a + b) (c + d) (e + f) (g + h) (i + j) (k + l) (m + n) (o + p) (q + r)", "y : a", "more than 256"),
        ("x : (a b", "y : a", r"m\.toml, rule 3, a: 'x : \(a b'"),
    ],
)
def test_sides_that_do_not_hold_the_same_are_refused(left: str | list[str], right: str | list[str], told: str) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        rule(left, right)
    assert caught.value.message.startswith("m.toml, rule 3")


@every(
    "text, told",
    [
        ("", "has no rules"),
        ("rule = 3", "has no rules"),
        ("[[rule]]\na = 'x'", "rule 1 has 1 side "),
        ("[[rule]]\na = 'x'\nb = 'y'\n[[rule]]\na = 'x'\nc = 'y'", "rule 2 has the sides"),
        ("[[rule]]\na = 3\nb = 'y'", "rule 1, a is 3"),
        ("[[rule]]\na = 'x'\nb = 'y'\n[sizes]\nn = 1.5", r"\[sizes\], n: 1.5"),
        ("[[rule]]\na = 'x'\nb = 'y'\n[sizes]\nn = 'a b'", r"\[sizes\], n: 'a b'"),
        ("[[rule]]\na = 'x'\nb = 'y'\n[size]\nn = 1", "'size' is not a key"),
        ("[[rule]]\na = 'x'\nb = 'y'\n[keep]\nc = 'z'", "'c' is neither"),
        ("[[rule]\n", "is not TOML"),
        ('{"old": "new"}', "is not TOML"),
        ("x = " + "[" * 100_000, "is not TOML"),
        ("[[rule]]\na = 'x'\nb = 'y'\n" * 2001, "2001 rules"),
        ("# " + "x" * (1 << 20), "bytes"),
    ],
)
def test_what_is_no_map_is_refused(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        parse_map(text, "m.toml")
    assert caught.value.message.startswith("m.toml")
    if told in ("is not TOML", "has no rules"):
        assert "[[rule]] and one line for each side" in caught.value.hint
        assert "--rename" in caught.value.hint


def test_globs_are_of_one_side_or_of_both() -> None:
    start = "[[rule]]\na = 'x'\nb = 'y'\n"
    assert parse_map("keep = ['k']\n" + start, "m").keep == (("k",), ("k",))
    assert parse_map(start + "[drop]\na = '*._extra_state'\nb = ['i', 'j']", "m").drop == (
        ("*._extra_state",),
        ("i", "j"),
    )


@every("key", ["names", "both"])
def test_globs_of_both_sides_stand_under_a_key(key: str) -> None:
    assert parse_map(f"[[rule]]\na = 'x'\nb = 'y'\n[keep]\n{key} = ['k']", "m").keep == (("k",), ("k",))


def test_an_index_in_a_glob_is_one_part_of_a_name() -> None:
    assert matches("layers.0.norm.weight", ("layers.{l}.norm.*",))
    assert matches("model.layers.0.norm", ("layers.{l}.norm",))
    assert not matches("layers.0.mlp.norm", ("layers.{l}.norm",))


def test_an_error_says_in_which_line_the_rule_begins() -> None:
    with pytest.raises(UsageError, match=r"^m\.toml:5, rule 2: piece 1 of 1"):
        parse_map("# two\n[[rule]]\na = 'x'\nb = 'y'\n[[rule]]\na = 'v : n'\nb = 'w : m'\n", "m.toml")
    with pytest.raises(UsageError, match=r"^m\.toml, rule 1: piece 1 of 1"):
        parse_map("rule = [{a = 'v : n', b = 'w : m'}]", "m.toml")


def test_a_glob_is_compared_with_endings_of_a_name() -> None:
    assert matches("layers.0.rotary_emb.inv_freq", ("rotary_emb.inv_freq",))
    assert matches("layers.0._extra_state", ("*._extra_state",))
    assert not matches("layers.0.xrotary_emb.inv_freq", ("rotary_emb.inv_freq",))


CONFIG = {"hidden_size": 64, "num_attention_heads": 4, "text": {"heads": 2}, "head_dim": None, "wide": 3.0}


@every(
    "text, value",
    [
        ("hidden_size / num_attention_heads", 16),
        ("text.heads * 2", 4),
        ("(hidden_size + 8) / (num_attention_heads - 1)", 24),
        ("(hidden_size + 5) // 6 * 6", 66),
        ("hidden_size / 3 // 2", 10),
        ("wide", 3),
        ("7", 7),
    ],
)
def test_a_size_is_an_expression_over_the_configuration(text: str, value: int) -> None:
    assert resolve({"n": (text,)}, CONFIG) == {"n": value}


def test_of_alternatives_the_first_counts_that_is_there() -> None:
    sizes = {"d": ("head_dim", "hidden_size / num_attention_heads"), "x": ("nothing",), "q": ("n / g",), "g": (2,)}
    assert resolve(sizes, CONFIG, {"n": 8}) == {"n": 8, "d": 16, "q": 4, "g": 2}


def test_a_size_may_be_called_as_the_configuration_calls_it() -> None:
    sizes = {"hidden_size": ("hidden_size",)}
    assert resolve(sizes, CONFIG) == {"hidden_size": 64}
    assert resolve(sizes, {}) == {}


@every(
    "text",
    ["", "a b", "a +", "(a", "a)", "__import__('os')", "a ** b", "a[0]", "1.5", "lambda: 1", "(" * 30, "1" * 300, "-1"],
)
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Expression(text)


@every(
    "sizes, told",
    [
        ({"n": ("hidden_size / 7",)}, "whole number"),
        ({"n": ("hidden_size / 0",)}, "divides by zero"),
        ({"n": ("hidden_size // 0",)}, "divides by zero"),
        ({"n": ("hidden_size - 100",)}, "whole number"),
        ({"n": ("m",), "m": ("n",)}, "in a circle"),
        ({"n": ("999999999999999999 * 999999999999999999 * 999999999999999999",)}, "whole number"),
    ],
)
def test_what_is_no_size_is_refused(sizes: dict[str, tuple[str]], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        resolve(sizes, CONFIG)
