#!/usr/bin/env bash
# Makes a ZeRO-3 checkpoint of 100 M parameters in DIRECTORY, converts it, and shows what that took.
# usage: demo.sh [DIRECTORY]; `ckptconv` and the `python` it is installed for have to be on the PATH.
# Runs on bash 3.2 and with the tools of BSD: what these lack, Python does.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

where=${1:-build/demo}
checkpoint=$where/checkpoint
result=$where/model

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
[ -t 1 ] || say() { printf '\n== %s\n' "$*"; }
run() {
    printf '$ %s\n' "$*"
    "$@"
}
sizes() {
    python - "$1" <<'END'
import sys
from pathlib import Path

from ckptconv.text import format_size

place = Path(sys.argv[1])
for path in sorted(place.rglob("*")):
    if path.is_file() and not path.name.startswith(".") and path.name != "example.json":
        print(f"{format_size(path.stat().st_size):>10}  {path.relative_to(place)}")
END
}
# Prints how long a command takes. SYNCED is a file that has to be on the disk then, or nothing.
seconds() { # SYNCED COMMAND...
    python -c '
import os, subprocess, sys, time

start = time.perf_counter()
subprocess.run(sys.argv[2:], check=True)
if sys.argv[1]:
    with open(sys.argv[1], "rb") as written:
        os.fsync(written)
print(f"{time.perf_counter() - start:.2f}")' "$@"
}

mkdir -p "$where"
if [ ! -e "$checkpoint/latest" ]; then
    say "A ZeRO-3 checkpoint of 100 M parameters, as 4 ranks would have saved it"
    rm -rf "$checkpoint"
    run python scripts/make_example.py "$checkpoint" --params 100e6 --ranks 4
fi
say "The checkpoint: master weights, and twice as much optimizer state"
sizes "$checkpoint"

say "What is inside, without reading a tensor"
run ckptconv inspect "$checkpoint"

say "Its fp32 weights, as safetensors"
run ckptconv zero-to-fp32 "$checkpoint" "$result"
sizes "$result"

say "Beside a plain copy of that result: seconds, three rounds in turn"
model=$result/model.safetensors
copy=$where/copy
printf '%22s%22s%22s%22s\n' cp 'cp, then sync' 'ckptconv --no-fsync' 'ckptconv'
for _ in 1 2 3; do
    printf '%22s' "$(seconds "" cp "$model" "$copy")"
    rm "$copy"
    printf '%22s' "$(seconds "$copy" cp "$model" "$copy")"
    rm "$copy"
    printf '%22s' "$(seconds "" ckptconv zero-to-fp32 --quiet --no-fsync "$checkpoint" "$result")"
    printf '%22s\n' "$(seconds "" ckptconv zero-to-fp32 --quiet "$checkpoint" "$result")"
done

say "Is every number right? They were made by a formula, which is now computed again"
run python scripts/make_example.py --check "$result" "$checkpoint"

say "One tensor, loaded by the safetensors library"
run python - "$result/model.safetensors" <<'END'
import sys

from safetensors import safe_open

with safe_open(sys.argv[1], "pt") as model:
    name = "transformer.h.0.attn.c_attn.weight"
    print(f"{name}\n{model.get_tensor(name)}")
END
