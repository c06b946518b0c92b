"""What tests of the trunk ask of whole modules too."""

from __future__ import annotations

from .attacks import FILES

ATTACKS = FILES
