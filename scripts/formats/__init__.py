"""Checks of formats beside the programs that write them: a module for each, with `check`, which `test_formats.py`
calls."""

from __future__ import annotations
