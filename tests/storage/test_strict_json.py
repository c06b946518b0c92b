"""JSON from files: strict, each name once, and in bounded memory, whole or member by member."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptconv.storage import strict_json
from ckptconv.storage.strict_json import OrNull, check, members, parse

NUMBERS = st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | NUMBERS | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=6)
OBJECTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=6)


def together(text: str) -> Any:
    """The object that the pieces of `members` make up; None where it is refused."""
    made: dict[str, Any] = {}
    try:
        for piece in members(text.encode("utf-8", "surrogatepass")):
            if not made.keys().isdisjoint(piece):
                return None
            made.update(piece)
    except ValueError:
        return None
    return made


@given(OBJECTS, st.sampled_from([None, 1]), st.booleans(), st.sampled_from([8, 64, 1 << 20]))
def test_what_python_writes_is_read_whole_and_in_pieces(
    value: dict[str, Any], indent: int | None, ascii_only: bool, piece: int
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert parse(text) == value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strict_json, "PIECE", piece)
        assert together(text) == value


@given(st.data())
def test_a_damaged_object_is_read_in_pieces_as_it_is_whole(data: st.DataObject) -> None:
    """However it is cut: braces stand in names and in texts too."""
    text = '{"a}":{"x":[1,{"y":{}}],"z":"},{\\"q\\":{}"}, "b":{}, "c":1,"d":[{},{}],"e":{"k":"}"}}'
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        text = (
            text[:at] + data.draw(st.sampled_from(["", *'{}[],:" \\0ax'])) + text[at + data.draw(st.integers(0, 1)) :]
        )
    try:
        whole = parse(text)
    except ValueError:
        whole = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strict_json, "PIECE", 16)
        assert together(text) == (whole if isinstance(whole, dict) else None)


REFUSED = {
    "a name twice": ('{"a":1,"a":1}', "'a' twice"),
    "a name twice, once escaped": ('{"a":1,"\\u0061":1}', "'a' twice"),
    "a name twice, inside": ('{"b":[{"a":1,"a":1}]}', "'a' twice"),
    "NaN": ('{"a":NaN}', "NaN"),
    "a number beyond every float": ('{"a":1e999}', "too large"),
    "a number of very many digits": ('{"a":' + "9" * 5000 + "}", "digits"),
    "half of a surrogate pair": ('{"a":["\\ud800"]}', "surrogate"),
    "half of a surrogate pair in a name": ('{"\\udc00":1}', "surrogate"),
    "nesting": ('{"a":' + "[" * 100_000, "deep"),
    "a comma too many": ('{"a":1,}', "JSON"),
    "something behind it": ('{"a":1}{}', "JSON"),
    "a byte order mark": ('\ufeff{"a":1}', "JSON"),
    "nothing": ("", "JSON"),
    "half of it": ('{"a":', "JSON"),
}


@pytest.mark.parametrize(("text", "why"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse(text)
    with pytest.raises(ValueError, match=why):
        list(members(text.encode("utf-8", "surrogatepass")))


def test_minus_zero_is_a_float_as_in_other_parsers() -> None:
    for text in ('{"a":-0}', '{"a":[1,-0 ]}'):
        value = parse(text)["a"]
        last = value[-1] if isinstance(value, list) else value
        assert (type(last), str(last)) == (float, "-0.0")
    assert parse('{"layer-0":-0.5}') == {"layer-0": -0.5}


def test_halves_of_surrogates_are_taken_where_asked_for() -> None:
    assert parse('["\\udcff"]', surrogates=True) == ["\udcff"]


def test_text_that_is_not_utf8_is_told_with_its_place() -> None:
    with pytest.raises(ValueError, match=r"not UTF-8: .* at byte 2"):
        list(members(b'{"\xff":1}'))


HOSTILE = {
    "lists": '"[" + "[]," * 1_000_000 + "[]]"',
    "objects": '"[" + "{}," * 5_000_000 + "{}]"',
    "numbers": '"[" + "1000," * 1_500_000 + "0]"',
    "members": '"{" + ",".join(f\'"{i}":0\' for i in range(500_000)) + "}"',
}


@pytest.mark.parametrize("made", HOSTILE.values(), ids=HOSTILE)
def test_a_text_that_would_take_too_much_takes_little_more_than_itself(made: str) -> None:
    code = f"""
from ckptconv.process import peak_rss
from ckptconv.storage import strict_json
from ckptconv.storage.strict_json import members, parse
strict_json.MOST //= 4
text = {made}
before = peak_rss()
for read in (parse, lambda text: list(members(('{{"a":' + text + '}}').encode()))):
    try:
        read(text)
    except ValueError as error:
        assert "more values" in str(error), error
    else:
        raise SystemExit("it was read")
print(peak_rss() - before - 4 * len(text))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 16 << 20


SHAPE = {
    "id": re.compile("[0-9a-f]{4}"),
    "of": {str: OrNull(int)},
    "rows?": [(str, float)],
    "by?": frozenset({"a", "b"}),
}
SOUND = {"id": "00ff", "of": {"x": 3, "y": None}, "rows": [["r", 0.5]], "by": "a"}


def test_what_has_the_shape_is_taken() -> None:
    for value in (SOUND, {"id": "0000", "of": {}}, {**SOUND, "rows": []}):
        assert check(value, SHAPE, "it") is value


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"id": "00ff0"}, "'id' of it is not valid"),
        ({"id": 3}, "'id' of it is not text"),
        ({"of": []}, "'of' of it is not an object"),
        ({"of": {"x": -1}}, "'x' of 'of' of it is not a count"),
        ({"of": {"x": True}}, "not a count"),
        ({"rows": {}}, "'rows' of it is not a list"),
        ({"rows": [["r"]]}, "one of 'rows' of it has 1 values, but 2"),
        ({"rows": [["r", 1]]}, "a value of one of 'rows' of it is not a number"),
        ({"by": "c"}, "'by' of it is not one of a, b"),
        ({"more": 1}, "it has 'more', which is not known"),
        ({"rows?": []}, "it has 'rows?', which is not known"),
    ],
)
def test_what_has_another_shape_is_refused_with_its_place(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        check({**SOUND, **change}, SHAPE, "it")
    for name in ("id", "of"):
        with pytest.raises(ValueError, match=f"it lacks '{name}'"):
            check({key: value for key, value in SOUND.items() if key != name}, SHAPE, "it")
