"""Hostile and odd safetensors files whose names are pickles, as OLMo writes them."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from attacks.assemble import DATA, called, listed, name, number, pickled, raw, several, text
from attacks.corpus import CORRUPT, DONE, UNSAFE, Case
from attacks.headers import case_of, entry, held
from attacks.live import PAYLOADS, SYSTEM, touch

FILES: dict[str, Case] = {}


def _add(exit_code: int, file: str, *told: Any, **more: Any) -> None:
    FILES[file] = case_of(exit_code, file, *told, **more)


def olmo_name(pickle: bytes) -> str:
    return base64.urlsafe_b64encode(pickle).decode()


def olmo_path(*keys: bytes, pickled_value: bool = False) -> bytes:
    return several(several(*keys), b"\x88" if pickled_value else b"\x89")


def _olmo(exit_code: int, file: str, why: str, pickles: Callable[[str], list[bytes]], whole: bool = False) -> None:
    """Tensors "w" and others of a byte each, named by pickles."""

    def make(canary: str) -> bytes:
        names = [olmo_name(pickled(value, 4)) for value in pickles(canary)]
        bytes_each = {name: entry("U8", [1], [24 + index, 25 + index]) for index, name in enumerate(names)}
        return held({olmo_name(pickled(olmo_path(text("w")))): entry(), **bytes_each}, DATA + b"." * len(names))

    _add(exit_code, f"olmo_{file}", why, make, whole)


def _olmo_value(exit_code: int, file: str, why: str, value: Callable[[str], bytes]) -> None:
    """A pickle that is the value of "x"."""

    def make(canary: str) -> bytes:
        data = pickled(value(canary), 4)
        names = [olmo_name(pickled(olmo_path(text("w")))), olmo_name(pickled(olmo_path(text("x"), pickled_value=True)))]
        return held({names[0]: entry(), names[1]: entry("U8", [len(data)], [24, 24 + len(data)])}, DATA + data)

    _add(exit_code, f"olmo_value_{file}", why, make)


_olmo(DONE, "sound", "names that are pickles of paths", lambda canary: [olmo_path(text("a"), number(0))], whole=True)
for _name in ("os_system", "eval", "partial", "inst", "rebuild_from_type", "inner_pickle", "then_an_unknown_opcode",
              "name_by_parts"):  # fmt: skip
    _olmo(
        UNSAFE, f"live_{_name}", f"a name that is a pickle, {PAYLOADS[_name][0]}",
        lambda canary, make=PAYLOADS[_name][1]: [make(canary)],
    )  # fmt: skip
_olmo(UNSAFE, "load_from_bytes", "a name that has torch read another pickle", lambda canary: [
    PAYLOADS["load_from_bytes"][1](canary)
])  # fmt: skip
_olmo(UNSAFE, "live_key", "os.system as a key", lambda canary: [olmo_path(called(SYSTEM, touch(canary)))])
_olmo(UNSAFE, "live_dropped", "os.system before a path", lambda canary: [
    called(SYSTEM, touch(canary)) + b"0" + olmo_path(text("a"))
])  # fmt: skip
_olmo(UNSAFE, "unknown_class", "an object as a key", lambda canary: [olmo_path(called(name("my", "Key")))])
_olmo(CORRUPT, "number", "a name that is a pickle of a number", lambda canary: [number(7)])
_olmo(CORRUPT, "no_path", "a name that is a path of nothing", lambda canary: [olmo_path()])
_olmo(CORRUPT, "key_list", "a list as a key", lambda canary: [olmo_path(listed())])
_olmo(CORRUPT, "key_twice", "two values in one place", lambda canary: [olmo_path(number(1)), olmo_path(b"\x88")])
_olmo(CORRUPT, "inside", "a value inside another", lambda canary: [olmo_path(text("w"), text("a"))])
_olmo(CORRUPT, "hash_bomb", "a key of 2^60 tuples", lambda canary: [
    several(several(b")" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(60))), b"\x89")
])  # fmt: skip
_olmo(CORRUPT, "broken", "a name that is half of a pickle", lambda canary: [b"X\xff\xff\xff\x7f"])
_olmo_value(DONE, "sound", "a value that is a pickle", lambda canary: listed(number(1), text("a")))
for _name in ("os_system", "eval", "then_an_unknown_opcode"):
    _olmo_value(UNSAFE, f"live_{_name}", f"a value that is a pickle, {PAYLOADS[_name][0]}", PAYLOADS[_name][1])
_olmo_value(UNSAFE, "live_load_from_bytes", "a value that honest files have, and that runs",
            PAYLOADS["load_from_bytes"][1])  # fmt: skip
_olmo_value(UNSAFE, "object", "an object of the user's", lambda canary: called(name("my", "Thing"), raw(b"x")))
_olmo_value(CORRUPT, "persistent", "a value with a persistent id", lambda canary: several(text("storage")) + b"Q")
_add(
    DONE, "olmo_half", "a pickle for a name among other names: a name",
    lambda canary: held(
        {"w": entry(), olmo_name(pickled(called(SYSTEM, touch(canary)))): entry("U8", [1], [24, 25])}, DATA + b"x"
    ),
    whole=True,
)  # fmt: skip
