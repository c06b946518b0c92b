"""Broken and odd archives of TorchScript."""

from __future__ import annotations

from attacks.assemble import DATA, Member, mapped, members, name, pickled, several, tensor, text, zipped
from attacks.corpus import CORRUPT, DONE, UNSAFE, UNSUPPORTED, WEIGHT, Case, evil, sound_pickle, with_members

FILES: list[Case] = []


def _script(exit_code: int, file: str, why: str, state: bytes, constants: bytes, *more: Member) -> None:
    held = name("__torch__", "M") + b")\x81q\x63" + state + b"b"
    parts = [*members(pickled(held)), Member("archive/constants.pkl", pickled(constants)), *more]
    FILES.append(Case(f"script_{file}.pt", "modules", exit_code, why, lambda canary: zipped(parts)))


CONSTANT = Member("archive/constants/0", DATA)
_script(DONE, "sound", "a script with a constant", WEIGHT, several(tensor()), CONSTANT)
_script(CORRUPT, "missing", "a constant whose data is not there", WEIGHT, several(tensor()))
_script(CORRUPT, "beyond", "a constant beyond its data", WEIGHT, several(tensor(offset=1)), CONSTANT)
_script(UNSUPPORTED, "unnamed", "data of constants that are not among them", WEIGHT, several(), CONSTANT)
_script(CORRUPT, "cyclic", "an attribute that contains itself",
            mapped(text("x"), b"]q\x64(h\x64" + tensor() + b"e"), several())  # fmt: skip
_script(CORRUPT, "deep", "an attribute nested three hundred deep",
            mapped(text("x"), b"(" * 300 + tensor() + b"t" * 300), several())  # fmt: skip
_script(CORRUPT, "twice", "an attribute of the name of a constant",
            mapped(text("CONSTANTS.c0"), tensor()), several(tensor()), CONSTANT)  # fmt: skip
FILES.append(Case("scan_script_constants.pt", "scanners", UNSAFE, "a script archive whose constants call os.system",
                  with_members(sound_pickle, constants_pkl=evil)))  # fmt: skip
