"""What conversions from and to S3 ask of it, for the golden set."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from cells import looking, of_features
from checkpoints import ckptconv
from features.s3.server import BUCKET, proxy_to, s3_server
from remote import SHARD, a_model


def of_s3() -> dict[str, Any]:
    """What conversions from and to a store ask of it, and make there."""
    found = {}
    with tempfile.TemporaryDirectory() as where, s3_server() as s3, proxy_to(s3) as proxy:
        place = Path(where)
        torch.save(a_model(layers=10), place / "model.pt")
        s3.put(place / "model.pt", "model.pt")
        others = [asked for more in of_features("ASKED") for asked in more]
        for _, path, name, _ in others:
            s3.put(path, name)
        options = ("--json", "--storage-options", json.dumps(s3.through(proxy.endpoint)))
        url = f"s3://{BUCKET}/"
        for command in (
            ("pt2safetensors", url + "model.pt", url + "out", "--max-shard-size", f"{SHARD}B"),
            *((command, url + name, url + output) for command, _, name, output in others),
            *((command, url + "model.pt") for command in looking()),
            ("verify", url + "model.pt", url + "out"),
        ):
            proxy.asked.clear()
            code = ckptconv(*command, *options).code
            kinds: dict[str, int] = {}
            for each in proxy.asked:
                kinds[each.method] = kinds.get(each.method, 0) + 1
            found[" ".join(command)] = {"code": code, "requests": kinds, "bytes": proxy.bytes_asked}
        found["files"] = {
            key: hashlib.sha256(s3.get(key)).hexdigest()
            for prefix in ("out", "fp32", *(out for *_, out in others))
            for key in s3.keys(prefix)
        }
    return found
