"""Names of files, canonical: links resolved, and the directory of many files once."""

from __future__ import annotations

import io
import os
import random
from pathlib import Path
from unittest import mock

import pytest

from ckptconv.errors import UsageError
from ckptconv.storage.paths import resolved_name, resolving
from ckptconv.text import parse_path

PARTS = ("a", "b", "file", "link", "there", "up", "loop", "dangling", "nothing", "..", ".", "")


def test_many_paths_are_resolved_as_each_by_itself(place: Path) -> None:
    (place / "a/b/a").mkdir(parents=True)
    (place / "a/b/file").touch()
    for link, target in (("link", "a/b"), ("a/b/link", "file"), ("there", place), ("a/up", "../link")):
        os.symlink(target, link)
    for link, target in (("loop", "loop"), ("a/dangling", "nowhere"), ("file", "a/b/file")):
        os.symlink(target, link)
    dice, resolve = random.Random(0), resolving()
    made = ("/".join(dice.choices(PARTS, k=dice.randint(1, 5))) for _ in range(300))
    # Through what is not there, and back, the system finds nothing, and `realpath` the link.
    for path in ("nothing/../link", "a/nothing/../up", "file/../link", *made):
        for each in (path, f"{place}/{path}"):
            assert resolve(each) == resolved_name(each), each
    assert resolve("s3://bucket/a/../b/") == resolve("s3a://bucket//b") == "s3://bucket/b"
    assert resolve("local:///a/../b") == "/b"


def test_a_directory_of_many_files_is_resolved_once(place: Path) -> None:
    paths = [place / f"{n}" for n in range(50)]
    for path in paths:
        path.touch()
    resolve = resolving()
    with mock.patch.object(os.path, "realpath", side_effect=os.path.realpath) as asked:
        assert [resolve(str(path)) for path in paths] == [str(path) for path in paths]
    assert asked.call_count == 1


@pytest.mark.parametrize("data", [b"PK", bytearray(b"PK"), io.BytesIO(b"PK")])
def test_data_in_the_place_of_a_path_has_to_be_in_a_file(data: object) -> None:
    with pytest.raises(UsageError, match="is not a path") as refused:
        parse_path(data)
    assert refused.value.hint == "Write it to a file, and give the path of the file."
