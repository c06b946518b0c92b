"""Databases of OCDBT: the values of their keys come out, and files that lie are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from effort import every, examples
from features.ocdbt.attacks import HOSTILE, Attack
from features.ocdbt.writer import FILE, NODE, database, frame, inner, leaf, nodes
from hypothesis import given
from hypothesis import strategies as st

from ckptconv.errors import CkptconvError
from ckptconv.features.joining.values import Files
from ckptconv.features.ocdbt.database import Database
from ckptconv.storage.location import Location

VALUES = {f"{name}/{at}": f"{name} {at}".encode() * at for name in ("a", "a.b", "a.b/c", "ü") for at in range(4)}


def opened(place: Path) -> tuple[Database, Files]:
    files = Files(Location(str(place)))
    return Database(files), files


def values_of(place: Path) -> dict[str, bytes]:
    """All keys of a database, and their values."""
    found, files = opened(place)
    places = found.under("")
    return dict(zip(places, files.contents([*places.values()]), strict=True))


@every("compression", [0, 1])
@every("inline", [0, 7, 1 << 20])
def test_values_come_out_of_nodes_and_of_files(inline: int, compression: int, tmp_path: Path) -> None:
    database(tmp_path, VALUES, inline=inline, compression=compression)
    assert values_of(tmp_path) == VALUES


def test_keys_below_a_name_are_those_with_a_slash_behind_it(tmp_path: Path) -> None:
    database(tmp_path, VALUES)
    found, files = opened(tmp_path)
    below = found.under("a.b")
    assert dict(zip(below, files.contents([*below.values()]), strict=True)) == {
        key.removeprefix("a.b/"): value for key, value in VALUES.items() if key.startswith("a.b/")
    }
    assert found.under("a.") == {}
    assert found.listed() == sorted(VALUES)


@given(st.lists(st.text("ab/", min_size=1, max_size=6), min_size=1, max_size=12, unique=True), st.data())
@examples(25)
def test_a_tree_of_nodes_has_the_keys_of_its_leaves(
    tmp_path_factory: pytest.TempPathFactory, keys: list[str], data: st.DataObject
) -> None:
    """Keys are cut into leaves anywhere, and these into inner nodes of any common prefix."""
    place = tmp_path_factory.mktemp("tree")
    names = sorted(key.encode() for key in keys)
    cuts = sorted({0, *data.draw(st.lists(st.integers(0, len(names) - 1), max_size=4))})
    groups = [names[start:stop] for start, stop in zip(cuts, [*cuts[1:], len(names)], strict=True)]
    bodies, children, at, prefixes = [], [], 0, []
    for group in groups:
        shared = len(group[0])
        while not all(name.startswith(group[0][:shared]) for name in group):
            shared -= 1
        shared = data.draw(st.integers(0, shared))
        body = leaf([(name[shared:], name) for name in group])
        size = len(frame(NODE, body))
        bodies.append(body)
        children.append((group[0], at, size, len(group)))
        prefixes.append(shared)
        at += size
    nodes(place, b"", [*bodies, inner(children, cuts=prefixes)], keys=len(names), height=1)
    assert values_of(place) == {name.decode(): name for name in names}


def test_no_value_in_a_file_is_read(tmp_path: Path) -> None:
    nodes(tmp_path, bytes(1 << 20), [leaf([(b"a", (0, 0, 1 << 20))])])
    _, files = opened(tmp_path)
    assert set(files.inputs) == {"manifest.ocdbt", FILE}
    assert files.bytes_read < 1 << 12


# What is said of those whose other numbers would be refused elsewhere too.
SAID = {
    "manifest_prefix": "reuses 90 bytes of b'a'",
    "manifest_large": "at most 4194304 are supported",
    "node_void": "it has 0 entries",
    "node_void_child": "it has 0 entries",
    "node_inherited": "one of 32000 bytes",
    "manifest_longer": "but its header records 1099511627776",
    "manifest_bomb": "unpacks to more than",
    "manifest_files": "refers to 524288 data files",
    "node_itself": "its height is not 0, which its parent records",
    "node_twice": "belong to another node: b'a'",
    "node_order": "its keys are out of order",
    "node_overlap": "the values at bytes 0 and 5 overlap",
    "node_words": "exceeds the limit",
    "node_first": "belong to another node: b'a'",
    "node_last": "belong to another node: b'a'",
    "node_spelled": "bytes, which unpack to",
    "manifest_frames": "not exactly one zstandard frame",
}


@every("attack", HOSTILE, [attack.file for attack in HOSTILE])
def test_a_database_that_lies_is_refused(attack: Attack, tmp_path: Path) -> None:
    attack.change(database(tmp_path, {"w/a": b"1", "w/b": b"2" * 2000}, compression=0))
    with pytest.raises(CkptconvError) as error:
        opened(tmp_path)
    assert error.value.exit_code == attack.exit
    assert [text for text in (str(tmp_path), SAID.get(attack.file, "")) if text not in str(error.value)] == []


def test_what_is_said_is_said_of_attacks() -> None:
    assert SAID.keys() <= {attack.file for attack in HOSTILE}
