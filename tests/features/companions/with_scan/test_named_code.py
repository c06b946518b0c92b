"""`scan` of a model's directory whose configurations name code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import ckptconv_here, seven_shards

import ckptconv


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "processor_config.json"])
@pytest.mark.parametrize(
    ("own", "code"),
    [
        ({"AutoModel": "modeling_own.Model"}, "modeling_own.py"),
        ({"AutoTokenizer": ["own.Slow", None]}, "own.py"),
        ({"AutoModel": "org/other--modeling_own.Model"}, "org/other--modeling_own.py"),
    ],
)
def test_a_configuration_that_names_code_is_unknown(
    name: str, own: dict[str, object], code: str, tmp_path: Path
) -> None:
    ckptconv.convert(seven_shards(tmp_path / "model.pt", rows=5), tmp_path / "hub")
    assert ckptconv.scan(tmp_path / "hub").verdict == "safe"
    (tmp_path / "hub" / name).write_text(json.dumps({"auto_map": own}))
    report = ckptconv.scan(tmp_path / "hub")
    assert report.verdict == "unknown"
    (finding,) = [finding for file in report.files for finding in file.findings]
    assert finding.rule == "repository-code"
    assert f"refers to code in a repository: {code}." in finding.message
    codes = [ckptconv_here("scan", *level, tmp_path / "hub").code for level in ([], ["--fail-on", "unknown"])]
    assert codes == [0, 3]


@pytest.mark.parametrize("text", ["{", "[]", '{"auto_map": 3}', '{"auto_map": {"AutoModel": 3}}', "{}"])
def test_another_configuration_is_no_checkpoint(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    report = ckptconv.scan(tmp_path)
    assert (report.files, report.skipped) == ([], 1)
