"""Read the descriptions in several files of a store at once: each takes several requests, one after the other."""

from __future__ import annotations

import contextvars
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_remote
from ckptconv.storage.reading import Entry

# Files that are read at once: as many as there are concurrent requests elsewhere.
_FILES = 8

Found = TypeVar("Found")


def entries_of(directory: Location, names: Sequence[str]) -> dict[str, Entry]:
    """Return the entry of each name in a directory. The directory need not be listed."""
    places = [directory.join(name) for name in names]
    return dict(zip(names, ahead(lambda place: place.entry, places), strict=True))


def ahead(read: Callable[[Location], Found], places: Sequence[Location]) -> Iterator[Found]:
    """Yield what `read` returns for each place, in order; of remote ones, the next few are read meanwhile.

    The first error in this order is raised.
    """
    if len(places) < 2 or not is_remote(places[0].path):
        yield from map(read, places)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(_FILES) as requests:
        # Context variables decide what is refused; a thread does not inherit them.
        begun = (requests.submit(contextvars.copy_context().run, read, place) for place in places)
        waiting = deque(itertools.islice(begun, _FILES))
        try:
            while waiting:
                value = waiting.popleft().result()
                waiting.extend(itertools.islice(begun, 1))
                yield value
        finally:
            for request in waiting:
                request.cancel()
