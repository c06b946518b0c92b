"""Apply renaming rules that come from a file, with limits: a regular expression can take exponential time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence

from ckptconv.errors import UsageError
from ckptconv.outputs import selection

# CPU seconds, bytes of memory, and characters of a name.
_MOST_SECONDS, _MOST_MEMORY, _LONGEST = 5, 1 << 30, 1 << 16
# Applies the rules as `selection.renaming` does. Only ending the process stops a regular expression.
_CHILD = """
import json, re, resource, sys
seconds, memory, longest = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
names, prefix, rules = json.load(sys.stdin)
names = [name.removeprefix(prefix) for name in names]
for rule in rules:
    pattern, _, replacement = rule.rpartition("=")
    change = re.compile(pattern).sub
    names = [change(replacement, name) for name in names]
    if any(len(name) > longest for name in names):
        sys.exit(1)
json.dump(names, sys.stdout)
"""


def renamed(names: Iterable[str], prefix: str, rules: Sequence[str], where: str) -> dict[str, str]:
    """Rename as `selection.renamed` does, by `rules` that come from the file `where`.

    Raise UsageError if the rules cannot be applied, or not in time.
    """
    old = list(names)
    limits = map(str, (_MOST_SECONDS, _MOST_MEMORY, _LONGEST))
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD, *limits],
            input=json.dumps([old, prefix, list(rules)]).encode(),
            capture_output=True,
            timeout=4 * _MOST_SECONDS,
            check=True,
        )
        new = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UsageError(
            f"{where} says that the conversion had --rename {' --rename '.join(map(repr, rules))[:200]}, which cannot "
            "be applied, or not in reasonable time.",
            "Give the options of the conversion yourself.",
        ) from error
    return selection.collected(zip(old, new, strict=True))
