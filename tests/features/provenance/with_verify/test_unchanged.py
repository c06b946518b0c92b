"""`verify OUTPUT`: the files of an output are those of its manifest, by their digests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cells import verify
from checkpoints import ckptconv_here, seven_shards
from stores import FAR, PLACES

from ckptconv import DifferenceError, UsageError, convert

MANIFEST = ".ckptconv-manifest.json"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    convert(seven_shards(tmp_path / "model.pt", rows=5), tmp_path / "out", digest="sha256", max_shard_size=20_000)
    (tmp_path / "model.pt").unlink()
    return tmp_path / "out"


def test_files_that_are_those_of_the_manifest_are_verified_without_the_source(output: Path) -> None:
    report = verify(output)
    assert sorted(Path(file.path).name for file in report.outputs) == sorted(
        path.name for path in output.iterdir() if path.name != MANIFEST
    )
    assert report.bytes_compared == sum(file.bytes for file in report.outputs) > 20_000
    assert "but not with their source" in report.warnings[0]
    run = ckptconv_here("verify", output)
    assert run.code == 0
    assert f"equal to {output / MANIFEST}: " in run.out


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_flip, r"has the sha256 .* records"),
        (lambda file: file.write_bytes(file.read_bytes() + b" "), r"has \d+ bytes, but .* records \d+ bytes"),
        (Path.unlink, "is missing"),
    ],
)
def test_any_other_file_is_a_difference(damage: Callable[[Path], object], said: str, output: Path) -> None:
    damage(sorted(output.glob("*.safetensors"))[-1])
    with pytest.raises(DifferenceError, match=said):
        verify(output)


def test_files_that_the_manifest_does_not_name_are_told_when_the_source_is_given_too(tmp_path: Path) -> None:
    source = seven_shards(tmp_path / "in.pt", rows=5).rename(tmp_path / "model.pt")
    output = tmp_path / "out"
    convert(source, output, max_shard_size=20_000)
    assert verify(source, output).warnings == []
    (output / "pytorch_model.bin").write_bytes(b"of another")
    (told,) = verify(source, output).warnings
    assert "also contains pytorch_model.bin, which its manifest does not list: not compared" in told


def test_an_output_in_the_directory_of_its_source_has_other_files_beside_it(tmp_path: Path) -> None:
    source = seven_shards(tmp_path / "model.pt", rows=5)
    convert(source, tmp_path, max_shard_size=20_000)
    assert verify(source, tmp_path).warnings == []


def test_a_manifest_in_the_place_of_the_output_is_known(tmp_path: Path) -> None:
    source = seven_shards(tmp_path / "model.pt", rows=5)
    convert(source, tmp_path / "out", max_shard_size=20_000)
    with pytest.raises(UsageError) as refused:
        verify(source, tmp_path / "out" / MANIFEST)
    assert "is a manifest, not a checkpoint" in refused.value.message
    assert refused.value.hint == f"Specify the output: ckptconv verify {source} {tmp_path / 'out'}"
    assert verify(source, tmp_path / "out").tensors


def test_files_that_the_manifest_does_not_name_are_told_and_refused_if_they_are_loaded_too(output: Path) -> None:
    (output / "notes.txt").write_text("of the user")
    (told, _) = verify(output).warnings
    assert "also contains notes.txt, which its manifest does not list: not compared" in told
    (output / "model-00009-of-00009.safetensors").write_bytes(b"")
    with pytest.raises(
        DifferenceError, match=r"contains model-00009-of-00009\.safetensors, which .* Remove these files"
    ):
        verify(output)


def test_a_manifest_cannot_lead_out_of_the_output(output: Path, tmp_path: Path) -> None:
    manifest = json.loads((output / MANIFEST).read_text())
    manifest["files"]["../secret"] = manifest["files"].pop("model.safetensors.index.json")
    (output / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(DifferenceError, match=r"'\.\./secret' is not the name of an output file"):
        verify(output)


def test_one_file_is_compared_with_a_manifest_elsewhere(tmp_path: Path) -> None:
    source = seven_shards(tmp_path / "model.pt", rows=5)
    convert(source, tmp_path / "one.safetensors", digest="sha256", manifest=str(tmp_path / "m.json"))
    assert verify(tmp_path / "one.safetensors", manifest=str(tmp_path / "m.json")).tensors > 0


@FAR
def test_an_output_on_a_store_is_compared_too(tmp_path: Path) -> None:
    place = PLACES["memory"]()
    convert(seven_shards(tmp_path / "model.pt", rows=5), place.url, digest="sha256")
    assert verify(place.url).outputs


def test_without_digests_the_source_is_asked_for(tmp_path: Path) -> None:
    source = seven_shards(tmp_path / "model.pt", rows=5)
    convert(source, tmp_path / "out")
    for path, reason in (
        (tmp_path / "out", "contains none"),
        (tmp_path, "does not exist"),
        (source, "is a single file"),
    ):
        named = "" if path.is_dir() else " --manifest FILE"
        advice = f"ckptconv verify SOURCE OUTPUT. A conversion with --digest sha256{named} writes digests."
        with pytest.raises(UsageError, match=rf" {reason}.* {advice} .* --manifest FILE"):
            verify(path)
    with pytest.raises(FileNotFoundError, match="none does not exist"):
        verify(tmp_path / "none")
    with pytest.raises(UsageError, match="OUTPUT is missing"):
        verify(tmp_path / "out", dtype="bf16")


def test_a_manifest_is_not_taken_for_an_output(tmp_path: Path) -> None:
    manifest = tmp_path / "m.json"
    convert(seven_shards(tmp_path / "model.pt", rows=5), tmp_path / "out.safetensors", manifest=manifest)
    run = ckptconv_here("verify", manifest)
    run.refused(2, "m.json is a manifest, not a checkpoint.", f"ckptconv verify OUTPUT --manifest {manifest}")
    run = ckptconv_here("verify", manifest, tmp_path / "out.safetensors")
    run.refused(2, f"ckptconv verify SOURCE {tmp_path / 'out.safetensors'} --manifest {manifest}")
    manifest.write_text("{}")
    ckptconv_here("verify", manifest).refused(2, "m.json is a single file, whose manifest is stored separately")


def test_options_for_digests_lead_to_the_output_alone(output: Path) -> None:
    for option in ("--sha256", "--digest=sha256"):
        told = "ckptconv verify OUTPUT, without SOURCE, compares the files with the digests in its manifest."
        ckptconv_here("verify", output, option).refused(2, told)
        assert told not in ckptconv_here("diff", output, output, option).refused(2, "There is no option")
    told = "use: ckptconv convert SOURCE OUTPUT --checksum. To compare the digests"
    ckptconv_here("verify", output, output, "--checksum").refused(2, told)
    assert ckptconv_here("verify", output).code == 0


def test_a_directory_of_outputs_names_those_with_manifests(output: Path) -> None:
    above = output.with_name("above")
    above.mkdir()
    output = output.rename(above / "one")
    said = ckptconv_here("verify", above).refused(2)
    assert "It contains outputs with manifests, which must be verified separately: 'one'." in said
    assert ckptconv_here("verify", output).code == 0
    (output / MANIFEST).unlink()
    assert "outputs with manifests" not in ckptconv_here("verify", above).refused(2)
