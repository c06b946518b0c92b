"""Writes a report as SARIF 2.1.0, the format in which code hosts take the results of scanners.

Source: OASIS, Static Analysis Results Interchange Format (SARIF) Version 2.1.0.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any
from urllib.parse import quote

from ckptconv.features.scan.report import ATTACK, RULES, SUSPICIOUS, ScanReport
from ckptconv.storage.paths import is_remote
from ckptconv.storage.reading import Reader
from ckptconv.text import printable
from ckptconv.version import __version__

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
# The beginning of a report of `scan`, and the bytes in which it lies.
_BEGINS = re.compile(
    rb'\{\s*"\$schema": "[^"]*",\s*"version": "2\.1\.0",\s*"runs": \[[\s{]*"tool": '
    rb'[\s{]*"driver": [\s{]*"name": "ckptconv"'
)
_HEAD = 4096
_HOME = "https://github.com/ckptconv/ckptconv"
# The level of a result, and its severity on a code host: from 0 to 10.
_LEVELS = {ATTACK: ("error", "9.8"), SUSPICIOUS: ("warning", "6.0")}
_OTHER = ("note", "3.0")

# The option for a report, and the name of the file's kind in `publish.earlier`.
SARIF = ("--sarif", "sarif")


def is_ours(reader: Reader) -> bool:
    """Return whether a file is a report that this program wrote."""
    return _BEGINS.match(reader.read_at(0, min(reader.file.size, _HEAD))) is not None


def document(report: ScanReport, directory: str = "") -> str:
    """Return `report` as the text of a SARIF file. Local files are named relative to `directory`, the working directory
    if it is empty."""
    directory = directory or os.getcwd()
    results = [
        {
            "ruleId": finding.rule,
            "ruleIndex": list(RULES).index(finding.rule),
            "level": _LEVELS.get(RULES[finding.rule].verdict, _OTHER)[0],
            "message": {"text": printable(finding.message)},
            "locations": [{"physicalLocation": {"artifactLocation": _location(file.path, directory)}}],
        }
        for file in report.files
        for finding in file.findings
    ]
    driver = {"name": "ckptconv", "version": __version__, "informationUri": _HOME, "rules": _rules()}
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _rules() -> list[dict[str, Any]]:
    return [
        {
            "id": name,
            "shortDescription": {"text": rule.title},
            "fullDescription": {"text": rule.help},
            "help": {"text": rule.help},
            "helpUri": f"{_HOME}/blob/main/docs/scan.md#{name}",
            "defaultConfiguration": {"level": _LEVELS.get(rule.verdict, _OTHER)[0]},
            "properties": {"security-severity": _LEVELS.get(rule.verdict, _OTHER)[1], "tags": ["security"]},
        }
        for name, rule in RULES.items()
    ]


def _location(path: str, directory: str) -> dict[str, str]:
    """Return the location of a file: a URL, or a path relative to `directory` if it is below it."""
    if is_remote(path):
        return {"uri": quote(path, safe=":/?#[]@!$&'()*+,;=%-._~")}
    path = os.path.abspath(path)
    inner = os.path.relpath(path, directory)
    if inner == os.pardir or inner.startswith(os.pardir + os.sep):
        return {"uri": f"file://{quote(os.fsencode(path))}"}
    return {"uri": quote(os.fsencode(inner.replace(os.sep, "/")))}
