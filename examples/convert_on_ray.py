"""Convert with the workers of a Ray cluster, which must access inputs and outputs under the same names.

python examples/convert_on_ray.py CHECKPOINT OUTPUT
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import ray

import ckptconv


class RayExecutor(Executor):
    """Runs submitted functions as Ray tasks."""

    def __init__(self) -> None:
        self._run = ray.remote(lambda function, args, kwargs: function(*args, **kwargs))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._run.remote(fn, args, kwargs).future()  # type: ignore[no-any-return]


def main() -> None:
    ray.init()
    report = ckptconv.convert(sys.argv[1], sys.argv[2], executor=RayExecutor(), max_shard_size="5GB")
    print(f"wrote {report.bytes_written} bytes in {len(report.outputs)} files")


if __name__ == "__main__":
    main()
