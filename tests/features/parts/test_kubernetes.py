"""The example of a job for Kubernetes, whose pods make parts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from checkpoints import ZERO, ckptconv_here

ROOT = Path(__file__).parents[3]


def test_the_job_for_kubernetes_runs_commands_that_exist_as_the_user_of_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (user,) = re.findall(r"^USER (\d+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    jobs = list(yaml.safe_load_all((ROOT / "examples/kubernetes.yaml").read_text()))
    completions = jobs[0]["spec"]["completions"]
    for job in jobs:
        pod = job["spec"]["template"]["spec"]
        assert str(pod["securityContext"]["runAsUser"]) == user
    (tmp_path / "checkpoints").symlink_to(ZERO / "z3_bf16_w2" / "checkpoint")
    convert, finish = (job["spec"]["template"]["spec"]["containers"][0] for job in jobs)
    here = [[word.replace("/data", str(tmp_path)) for word in each["args"]] for each in (convert, finish)]
    monkeypatch.setenv("JOB_COMPLETIONS", convert["env"][0]["value"])
    for index in range(completions):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
        assert ckptconv_here(*here[0]).code == 0
    assert ckptconv_here(*here[1]).code == 0
    assert list((tmp_path / "model").glob("*.safetensors"))
