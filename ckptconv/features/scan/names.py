"""Judges the names that a pickle calls and that the machine does not know as data.

The feature `attacks` knows which calls are attacks. Most others are classes of the user or of a framework, which show
nothing about a file. Two kinds do: functions that take code, and functions of the standard library that no program
pickles. As with attacks, safety does not depend on these tables: nothing that a pickle names is ever called here.
"""

from __future__ import annotations

import sys

from ckptconv.features.attacks.tables import makes_functions
from ckptconv.pickles.nodes import Global, today

# Functions that compile code in the pickle when it is loaded, besides those that `attacks` knows.
_COMPILERS = frozenset(
    f"{module}.{name}"
    for module in ("torch.fx.graph_module", "torch.fx._lazy_graph_module")
    for name in (
        "reduce_graph_module", "reduce_package_graph_module", "reduce_deploy_graph_module",
        "_deserialize_graph_module", "_make_graph_module",
    )
)  # fmt: skip
# Functions that load bytes from their arguments as pickles. These bytes are judged by themselves.
LOADERS = frozenset({"torch.storage._load_from_bytes", "spacy.vocab.unpickle_vocab", "spacy.tokens.doc.unpickle_doc"})
# Modules of the standard library whose classes are data that honest checkpoints contain.
_DATA = frozenset(
    """
    __builtin__ _codecs _collections _collections_abc _decimal _io _operator _random _struct abc argparse array ast
    builtins calendar codecs collections contextlib contextvars copy copy_reg copyreg dataclasses datetime decimal enum
    fractions functools io ipaddress inspect itertools locale logging math numbers operator optparse pathlib queue
    random re sre_compile statistics string struct threading time types typing uuid weakref zoneinfo
    """.split()  # noqa: SIM905
)
# Packages of the standard library. A dotted name in another of its modules is in a user's own package of that name.
_PACKAGES = frozenset(
    """
    asyncio collections compression concurrent ctypes curses dbm distutils email encodings html http idlelib importlib
    json lib2to3 logging multiprocessing pathlib re sqlite3 string sysconfig tkinter tomllib unittest urllib venv
    wsgiref xml xmlrpc zipfile zoneinfo
    """.split()  # noqa: SIM905
)
# Functions of `builtins` that no program pickles: those of `attacks`, and those that call others or only act.
_ACTS = frozenset(
    """
    ascii bin callable chr dir filter format hash hex id isinstance issubclass map next oct ord print property repr
    staticmethod super vars
    """.split()  # noqa: SIM905
)
# Prefixes of names that every installation with torch has, and that show nothing about a file.
_ALWAYS = ("torch.", "numpy.", "__torch__.")


def carries_code(named: Global) -> bool:
    """Return whether a call of `named` makes a function from code in the pickle."""
    return str(named) in _COMPILERS or makes_functions(named)


def is_unusual(named: Global) -> bool:
    """Return whether `named` is in the standard library, and no checkpoint calls it."""
    module, name = today((named.module, named.name))
    top = module.partition(".")[0]
    if top == "builtins":
        return name in _ACTS
    return _is_of_python(module) and top not in _DATA


def is_needed(named: Global) -> bool:
    """Return whether `named` is a class or function of a package other than Python, torch and numpy."""
    return not f"{named.module}.".startswith(_ALWAYS) and not _is_of_python(today((named.module, ""))[0])


def _is_of_python(module: str) -> bool:
    top, dot, _ = module.partition(".")
    # A user may have a package called `test`.
    return top in _MODULES and (not dot or top in _PACKAGES)


_MODULES = frozenset({*sys.stdlib_module_names, "__builtin__", "copy_reg"}) - {"test", "code"}
