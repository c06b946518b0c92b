"""The action for workflows of other projects, which runs `scan`."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import yaml

from ckptconv.features.scan.options import COMMAND

ROOT = Path(__file__).parents[3]


def test_the_action_runs_the_command_with_options_that_it_has() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    assert action["runs"]["using"] == "composite"
    for step in action["runs"]["steps"]:
        assert ("uses" in step) != ("run" in step)
        if "run" in step:
            # What a caller gives is a variable of the shell, never a part of the script.
            assert step["shell"] == "bash"
            assert "${{" not in step["run"]
            assert subprocess.run(["bash", "-n"], input=step["run"], text=True, check=False).returncode == 0
        else:
            assert re.fullmatch(r"[\w-]+/[\w/-]+@v\d+", step["uses"])
    text = (ROOT / "action.yml").read_text()
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == set(action["inputs"])
    assert all(each["description"] for each in (action, *action["inputs"].values(), *action["outputs"].values()))
    given = {
        flag for step in action["runs"]["steps"] for flag in re.findall(r"--(?:sarif|fail-on)", step.get("run", ""))
    }
    assert given == {COMMAND["sarif"].flags[0], COMMAND["fail_on"].flags[0]}
