"""`--attest`: statements for others, of what outputs are and of what they were made."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
from cells import trained
from checkpoints import seven_shards
from digested import sha256
from features.provenance.attested import dependencies, mixed_model, statements
from stores import FAR

from ckptconv import convert
from ckptconv.errors import CorruptError, UsageError
from ckptconv.formats.registered import DESCRIBING
from ckptconv.options.table import OPTIONS

MANIFEST = ".ckptconv-manifest.json"
SHARD = 100_000


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seven_shards(tmp_path_factory.mktemp("model") / "model.pt", rows=25)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixed_model(tmp_path_factory.mktemp("mixed") / "mixed.pt")


def test_what_contradicts_is_refused(mixed: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none are computed"):
        convert(mixed, tmp_path / "out", attest=tmp_path / "out.jsonl")
    with pytest.raises(UsageError, match="both specify"):
        convert(mixed, tmp_path / "out", digest="sha256", attest=tmp_path / "x", manifest=tmp_path / "x")
    with pytest.raises(UsageError, match="is in the output, but the file cannot describe itself"):
        convert(mixed, tmp_path / "out", digest="sha256", attest=tmp_path / "out/statements.jsonl")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------ statements


@pytest.mark.parametrize("for_hub", [False, True])
def test_model_signing_is_told_all_files_of_the_directory(for_hub: bool, shards: Path, tmp_path: Path) -> None:
    out, stated = tmp_path / "out", tmp_path / "out.jsonl"
    convert(shards, out, max_shard_size=SHARD, digest="sha256", attest=stated, for_hub=for_hub)
    signing, provenance = statements(stated)
    found = sorted((path.name, sha256(path.read_bytes())) for path in out.iterdir())
    assert (MANIFEST in dict(found)) != for_hub
    assert {each["name"]: each["digest"]["sha256"] for each in provenance["subject"]} == dict(found)
    # As model_signing 1.1.1 has it: the digest of the model is that of the digests of its files.
    root = sha256(b"".join(bytes.fromhex(digest) for _, digest in found))
    assert signing["_type"] == "https://in-toto.io/Statement/v1"
    assert signing["predicateType"] == "https://model_signing/signature/v1.0"
    assert signing["subject"] == [{"name": "out", "digest": {"sha256": root}}]
    assert signing["predicate"]["resources"] == [
        {"name": name, "algorithm": "sha256", "digest": digest} for name, digest in found
    ]
    assert signing["predicate"]["serialization"]["method"] == "files"


def test_a_single_file_is_the_model(mixed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    convert(mixed, out, digest="sha256", attest=tmp_path / "out.jsonl")
    signing, provenance = statements(tmp_path / "out.jsonl")
    digest = sha256(out.read_bytes())
    assert signing["predicate"]["resources"] == [{"name": ".", "algorithm": "sha256", "digest": digest}]
    assert provenance["subject"] == [{"name": out.name, "digest": {"sha256": digest}}]


def test_the_provenance_says_of_what_and_how_it_was_made(mixed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(mixed, out, digest="sha256", attest=tmp_path / "out.jsonl", dtype="bf16")
    _, provenance = statements(tmp_path / "out.jsonl")
    told = json.loads((out / MANIFEST).read_text())
    assert provenance["predicateType"] == "https://slsa.dev/provenance/v1"
    files = {entry["name"]: entry["digest"]["sha256"] for entry in provenance["subject"]}
    assert files == {path.name: sha256(path.read_bytes()) for path in out.iterdir()}
    definition = provenance["predicate"]["buildDefinition"]
    assert definition["externalParameters"]["options"] == {"dtype": "bfloat16"}
    assert definition["internalParameters"] == {"plan": told["plan"]}
    assert {each["name"]: each["annotations"] for each in definition["resolvedDependencies"]} == told["source"][
        "inputs"
    ]
    assert provenance["predicate"]["runDetails"]["builder"]["version"] == {"ckptconv": told["ckptconv"]}


# ----------------------------------------------------------------------------------------- the inputs in a statement


def digests_in(directory: Path, prefix: str = "") -> dict[str, str]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {f"{prefix}{path.relative_to(directory)}": sha256(path.read_bytes()) for path in files}


def test_every_input_has_the_digest_that_sha256sum_prints(mixed: Path, tmp_path: Path) -> None:
    for number, path in enumerate((mixed, *trained())):
        place = tmp_path / str(number)
        place.mkdir()
        kinds: Any = {"optimizer": place / "states"} if path in trained() else {}
        total: list[int] = []
        done: list[int] = []
        asked: Any = {"digest": "sha256", "on_total": total.append, "progress": done.append, **kinds}
        report = convert(path, place / "out", attest=place / "out.jsonl", **asked)
        found = dependencies(place / "out.jsonl")
        assert found, path
        known = digests_in(path if path.is_dir() else path.parent)
        assert found == {name: next(known[each] for each in known if each.endswith(name)) for name in found}
        assert sum(done) == total[0], path
        # Nothing but the statements depends on it.
        plain = convert(path, place / "plain", digest="sha256")
        assert (place / "plain" / MANIFEST).read_bytes() == (place / "out" / MANIFEST).read_bytes()
        assert report.bytes_read > plain.bytes_read, path


@pytest.mark.skipif("like" not in OPTIONS, reason="there are no references")
def test_a_reference_and_companions_are_inputs(mixed: Path, tmp_path: Path) -> None:
    convert(mixed, tmp_path / "like")
    (tmp_path / "like" / "config.json").write_text("{}")
    convert(mixed, tmp_path / "out", like=tmp_path / "like", digest="sha256", attest=tmp_path / "out.jsonl")
    like = digests_in(tmp_path / "like", "--like/")
    assert dependencies(tmp_path / "out.jsonl") == {
        "mixed.pt": sha256(mixed.read_bytes()),
        "config.json": like["--like/config.json"],
        "--like/model.safetensors": like["--like/model.safetensors"],
        "--like/ckptconv.structure.json": like["--like/ckptconv.structure.json"],
    }


def test_the_index_of_a_set_is_an_input(shards: Path, tmp_path: Path) -> None:
    convert(shards, tmp_path / "set", max_shard_size="300KB")
    index, out = tmp_path / "set/model.safetensors.index.json", tmp_path / "out"
    convert(index.parent, out, digest="sha256", attest=tmp_path / "out.jsonl")
    assert dependencies(tmp_path / "out.jsonl")[index.name] == sha256(index.read_bytes())
    assert index.name in json.loads((out / MANIFEST).read_text())["source"]["inputs"]


def test_the_data_behind_a_description_is_an_input(mixed: Path, tmp_path: Path) -> None:
    for suffix in DESCRIBING:
        described = tmp_path / f"mixed{suffix}"
        convert(mixed, described)
        convert(described, tmp_path / "out", digest="sha256", attest=tmp_path / "out.jsonl")
        assert dependencies(tmp_path / "out.jsonl") == {
            described.name: sha256(described.read_bytes()),
            mixed.name: sha256(mixed.read_bytes()),
        }


@FAR
def test_what_is_remote_has_a_digest(mixed: Path, tmp_path: Path) -> None:
    fsspec.filesystem("memory").pipe_file("/digests/mixed.pt", mixed.read_bytes())
    try:
        convert("memory://digests/mixed.pt", tmp_path / "out", digest="sha256", attest=tmp_path / "out.jsonl")
        assert [*dependencies(tmp_path / "out.jsonl").values()] == [sha256(mixed.read_bytes())]
    finally:
        fsspec.filesystem("memory").rm("/digests", recursive=True)


def test_an_input_that_changes_before_it_is_digested_is_found(mixed: Path, tmp_path: Path) -> None:
    class Changing:
        def __call__(self, count: int) -> None: ...

        def on_file(self, name: str) -> None:
            if name == "computing digests of the inputs":
                source.write_bytes(source.read_bytes())
                os.utime(source, ns=(1, 1))

    source = tmp_path / "source.pt"
    source.write_bytes(mixed.read_bytes())
    with pytest.raises(CorruptError, match=r"source\.pt changed while it was read"):
        convert(source, tmp_path / "out", digest="sha256", attest=tmp_path / "out.jsonl", progress=Changing())
    assert [path.name for path in tmp_path.iterdir()] == ["source.pt"]
