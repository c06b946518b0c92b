"""Records and descriptions of staged parts that are changed at random."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

from attacks.assemble import zipped
from fuzz import ending
from mutations import members_of, of_json
from samples import ZIPS

from ckptconv.conversion import convert
from ckptconv.features.parts.finish import finish


def fuzz_parts(chance: random.Random, place: Path) -> str:
    """A record or description of staged parts, changed: what `finish` publishes is what the parts made."""
    model, output = place / "model.pt", place / "parts"
    shutil.rmtree(output, ignore_errors=True)
    model.write_bytes(zipped(members_of(ZIPS[0])))
    for part in ("0/2", "1/2"):
        convert(model, output, max_shard_size=20, part=part, fsync=False)
    files = {path.name: path.read_bytes() for path in output.rglob("*.safetensors")}
    victim = chance.choice([path for path in output.rglob(".*") if path.stat().st_size and path.is_file()])
    victim.write_text(of_json(json.loads(victim.read_text()), chance))
    if chance.random() < 0.3:
        ending(lambda: convert(model, output, max_shard_size=20, part="1/2", fsync=False))
    manifest = chance.choice(["", str(place / "manifest.json")])
    ended = ending(lambda: finish(output, checksum=chance.random() < 0.5, manifest=manifest))
    published = {path.name: path.read_bytes() for path in output.glob("*.safetensors")}
    assert published == (files if ended == "done" else {}), "what was published is not what was made"
    return ended
