"""What tests of the trunk ask of files of other programs too."""

from __future__ import annotations

from pathlib import Path

from attacks.corpus import UNSUPPORTED, Case, evil

FLUTTER = b"# This file tracks properties of this Flutter project.\nversion:\n  channel: stable\n"
APPLE_DOUBLE = b"\0\5\x16\7\0\2\0\0Mac OS X        " + bytes(100)
_FILES = {
    "other_gzip.pt": ("compressed", b"\x1f\x8b\x08" + bytes(100)),
    "other_hdf5.pt": ("a file of Keras", b"\x89HDF\r\n\x1a\n" + bytes(100)),
    "other_gguf.pt": ("a GGUF file", b"GGUF" + bytes(100)),
    "other_npy.pt": ("an array of numpy", b"\x93NUMPY\x01\x00" + bytes(100)),
    "other_apple_double.pt": ("what macOS keeps beside a file", APPLE_DOUBLE),
    "other_flutter.pt": ("a description of a Flutter project", FLUTTER),
}
ATTACKS = [
    Case(file, "other", UNSUPPORTED, why, lambda canary, data=data: data)  # type: ignore[misc]
    for file, (why, data) in _FILES.items()
]
_OBJECTS = b"\x93NUMPY\1\0v\0" + b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n"
ATTACKS += [
    Case(
        "scan_seven_zip.pt",
        "scanners",
        UNSUPPORTED,
        "a 7z archive",
        lambda canary: b"7z\xbc\xaf\x27\x1c\0\4" + evil(canary),
    ),
    Case(
        "scan_npy_objects.pt",
        "scanners",
        UNSUPPORTED,
        "an array of objects, which is a pickle",
        lambda canary: _OBJECTS + evil(canary),
    ),
]


def scene(here: Path) -> None:
    """Put a checkpoint of Paddle beside what others made."""
    (here / "paddle").mkdir()
    (here / "paddle" / "0.metadata").write_text("")


REFUSED = "convert a.pt paddle\n"
