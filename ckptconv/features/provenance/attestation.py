"""Makes statements about an output from its manifest, for others to sign. Pure.

Both are in-toto statements (https://in-toto.io/Statement/v1). The first is the one that OpenSSF Model Signing signs:
its predicate is that of model_signing 1.0, https://model_signing/signature/v1.0. The second names the inputs of the
output, as SLSA provenance: https://slsa.dev/provenance/v1.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from ckptconv.errors import UsageError
from ckptconv.features.provenance.inputs import Digested
from ckptconv.formats.run_names import POINTERS
from ckptconv.outputs.schema import parse_json
from ckptconv.outputs.targets import MANIFEST
from ckptconv.storage.digests import hasher
from ckptconv.storage.paths import basename

_STATEMENT = "https://in-toto.io/Statement/v1"
_MODEL_SIGNING = "https://model_signing/signature/v1.0"
_PROVENANCE = "https://slsa.dev/provenance/v1"
_HOME = "https://github.com/ckptconv/ckptconv"
_BUILD_TYPE = f"{_HOME}/blob/main/docs/provenance.md"
# Names that model_signing ignores in every model.
_IGNORED = (".git", ".gitattributes", ".github", ".gitignore")


def statements(outputs: Sequence[tuple[str, bool, bool, bytes]], inputs: Sequence[Mapping[str, Digested]]) -> bytes:
    """Return two statements for each output, one a line, as JSON. An output is given as its path, whether it is a file,
    whether its manifest lies among its files, and its manifest; `inputs` are those of each by name. Raises UsageError
    for a manifest without digests."""
    lines = []
    for (path, is_file, has_manifest, manifest), named in zip(outputs, inputs, strict=True):
        record = parse_json(manifest)
        if "digest" not in record:
            raise without_digests(path)
        digests = _digests(path, is_file, record)
        if has_manifest:
            hashing = hasher(record["digest"])
            hashing.update(manifest)
            digests[MANIFEST] = hashing.hexdigest()
        lines += [_model_signing(path, is_file, record["digest"], digests), _provenance(record, digests, named)]
    return b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)


def without_digests(path: str) -> UsageError:
    """Return the error for an output without digests."""
    return UsageError(
        f"{path} cannot be attested: it was written without digests.",
        "Run the conversion with --digest sha256.",
    )


def _digests(path: str, is_file: bool, record: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of the files of an output by name, but for its manifest."""
    digests = {name: entry["digests"]["file"] for name, entry in record["files"].items()}
    if is_file:
        return {basename(path): digest for digest in digests.values()}
    for name in POINTERS:
        digests.pop(name, None)  # a file next to the directory
    return digests


def _model_signing(path: str, is_file: bool, algorithm: str, digests: Mapping[str, str]) -> dict[str, Any]:
    """Return the statement that model_signing computes for a model with these files and its default settings.

    Source: `Payload` in model_signing/_signing/signing.py of release 1.1.1.
    """
    # The paths are sorted name by name; a model that is one file is called ".".
    ordered = sorted(digests.items(), key=lambda item: item[0].split("/"))
    resources = [
        {"name": "." if is_file else name, "algorithm": algorithm, "digest": digest} for name, digest in ordered
    ]
    root = hashlib.sha256(b"".join(bytes.fromhex(digest) for _, digest in ordered)).hexdigest()
    serialization = {
        "method": "files",
        "hash_type": algorithm,
        "allow_symlinks": False,
        "ignore_paths": list(_IGNORED),
    }
    return {
        "_type": _STATEMENT,
        "subject": [{"name": basename(path), "digest": {"sha256": root}}],
        "predicateType": _MODEL_SIGNING,
        "predicate": {"serialization": serialization, "resources": resources},
    }


def _provenance(
    record: Mapping[str, Any], digests: Mapping[str, str], inputs: Mapping[str, Digested]
) -> dict[str, Any]:
    """Return the statement that ties the files of an output to its inputs, options, map, and version."""
    source = dict(record["source"])
    known = source.pop("inputs")
    # Files that were read and have no entry in the manifest have a size and a digest.
    named = {**known, **{name: {"size": file.size} for name, file in sorted(inputs.items()) if name not in known}}
    chosen = {
        name: record[name]
        for name in ("kind", "options", "like", "map", "dequantized", "quantized", "average", "adapters", "adapter")
        if name in record
    }
    return {
        "_type": _STATEMENT,
        "subject": [{"name": name, "digest": {record["digest"]: digest}} for name, digest in digests.items()],
        "predicateType": _PROVENANCE,
        "predicate": {
            "buildDefinition": {
                "buildType": _BUILD_TYPE,
                "externalParameters": {"source": source, **chosen},
                "internalParameters": {"plan": record["plan"]},
                "resolvedDependencies": [
                    {
                        "name": name,
                        # A name may hold half a surrogate pair.
                        "uri": quote(name, errors="surrogatepass"),
                        **({"digest": {record["digest"]: inputs[name].digest}} if name in inputs else {}),
                        "annotations": digested,
                    }
                    for name, digested in named.items()
                ],
            },
            "runDetails": {"builder": {"id": _HOME, "version": {"ckptconv": record["ckptconv"]}}},
        },
    }
