"""Databases of OCDBT, the key-value store of tensorstore, which several processes may write.

In: the files of a database. Out: its keys, each with the place of its value, or the value itself if the database holds
it. `wire` reads the frames of its files, and `database` follows its tree. No value in a data file is read.
"""

from __future__ import annotations

PAGES = ()
# Features that this one builds on: without them, it is gone too.
NEEDS = ("compressed", "joining")
