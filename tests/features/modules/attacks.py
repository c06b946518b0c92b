"""Broken and odd modules, as torch.save(model) pickles them."""

from __future__ import annotations

from collections.abc import Callable

from attacks.assemble import called, listed, mapped, members, name, number, pickled, tensor, text, zipped
from attacks.corpus import CORRUPT, DONE, SYSTEM, UNSAFE, UNSUPPORTED, WEIGHT, Case, module, touch

FILES: list[Case] = []


def module_case(exit_code: int, file: str, why: str, made: bytes | Callable[[str], bytes], **facts: bool) -> None:
    make = made if callable(made) else lambda canary: zipped(members(pickled(made)))
    FILES.append(Case(f"module_{file}.pt", "modules", exit_code, why, make, **facts))


def doubled(levels: int) -> bytes:
    """A module that is twice in the next, and so on, with long names."""
    made = module(WEIGHT)
    for level in range(levels):
        memo = bytes([100 + level])
        made = module(None, mapped(text("a" * 5000), made + b"q" + memo, text("b" * 5000), b"h" + memo))
    return made


module_case(DONE, "sound", "a whole module", module(None, mapped(text("a"), module(WEIGHT))))
module_case(DONE, "tied", "a module at two places",
            module(None, mapped(text("a"), module(WEIGHT) + b"q\x64", text("b"), b"h\x64")))  # fmt: skip
module_case(CORRUPT, "cyclic", "a module that contains itself", module(WEIGHT, mapped(text("up"), b"h\x63")))
module_case(CORRUPT, "doubled", "modules whose names take more memory than there is", doubled(13))
module_case(CORRUPT, "list", "submodules that are a list", module(WEIGHT, listed(module(WEIGHT))))
module_case(CORRUPT, "number", "a number among the parameters", module(mapped(text("w"), number(1))))
module_case(CORRUPT, "number_as_module", "a number among the submodules", module(WEIGHT, mapped(text("a"), number(1))))
module_case(CORRUPT, "key", "a parameter whose name is a number", module(mapped(number(1), tensor())))
module_case(CORRUPT, "twice", "two parameters of one name",
            module(mapped(text("a.w"), tensor()), mapped(text("a"), module(WEIGHT))))  # fmt: skip
module_case(UNSUPPORTED, "private", "a submodule with a state of its own making",
            module(WEIGHT, mapped(text("a"), name("models", "Private") + b")\x81" + number(1) + b"b")))  # fmt: skip
module_case(CORRUPT, "beyond", "a parameter beyond its storage", module(mapped(text("w"), tensor(offset=1))))
module_case(UNSAFE, "attack", "a module with an attack among its attributes",
            lambda canary: zipped(members(pickled(
                module(WEIGHT, None, None, text("x"), called(SYSTEM, touch(canary)))))))  # fmt: skip
