"""`--states`, where it had the name of what writes the states."""

from __future__ import annotations

from ckptconv.options.table import OPTIONS

STATES_READ = OPTIONS["states"].explained(OPTIONS["states"].about, former="--optimizer")
