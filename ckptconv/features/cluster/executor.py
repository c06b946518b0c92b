"""Runs a conversion's tasks on a dask.distributed cluster. dask is imported only if the user asks for it."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any

from ckptconv.errors import FailedError, UsageError
from ckptconv.text import install

# The retries of a task that did not end. A retry takes over nothing: it writes the file anew.
RETRIES = 3
# The seconds in which a scheduler must answer.
PATIENCE = 30
_ADDRESS = "Give the address that the scheduler prints when it starts, such as tcp://10.0.0.1:8786."


@contextlib.contextmanager
def executor(address: str) -> Iterator[Executor]:
    """Yield an executor of the cluster whose scheduler is at `address`, such as tcp://10.0.0.1:8786.

    Raises UsageError if distributed is not installed or `address` is not an address, FailedError if no scheduler
    answers.
    """
    try:
        from distributed import Client
        from distributed.comm.registry import backends
    except ImportError as error:
        raise UsageError("--dask needs the package distributed, which is not installed.", install("dask")) from error
    scheme, separator, _ = address.partition("://")
    if scheme not in backends if separator else not re.fullmatch(r".+:\d+", address):
        raise UsageError(f"--dask {address!r} is not the address of a scheduler.", _ADDRESS)
    try:
        client: Any = Client(address, timeout=PATIENCE, set_as_default=False)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise FailedError(
            f"The dask scheduler at {address} does not answer: {' '.join(str(error).split()) or type(error).__name__}.",
            _ADDRESS,
        ) from error
    # Errors are reported in one paragraph, not in dask's log too.
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    with client:
        yield client.get_executor(retries=RETRIES, pure=False)
