"""The option `--states` under its former name, --optimizer, for commands that write states."""

from __future__ import annotations

from ckptconv.options.table import OPTIONS

STATES_READ = OPTIONS["states"].explained(OPTIONS["states"].about, former="--optimizer")
