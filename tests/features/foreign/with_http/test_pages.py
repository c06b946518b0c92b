"""Pages that a server gives in the place of a directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from features.http.server import http_server

from ckptconv.errors import UsageError
from ckptconv.formats.detect import open_source


def test_a_page_in_the_place_of_a_directory_leads_to_a_final_slash(tmp_path: Path) -> None:
    (tmp_path / "step-1").write_text("<!DOCTYPE html><title>Index of step-1</title>")
    with http_server(tmp_path) as served, pytest.raises(UsageError, match="step-1 is a web page, not a checkp") as told:
        open_source(f"{served.endpoint}/step-1")
    assert told.value.hint.startswith("The address of a directory must end in /.")
