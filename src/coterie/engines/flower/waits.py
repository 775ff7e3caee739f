# SPDX-License-Identifier: Apache-2.0
"""How long Flower's own code waits, where coterie runs it: short while messages come, and as Flower has it otherwise.

A message is announced before all its parts have come, and who fetches a part too early waits a second before it tries again,
then two; a SuperNode that has found no message waits three. Between machines that is little; in a run of a hundred small
messages it is most of the time. Where a version of Flower has none of the names below, nothing is changed.
"""

import inspect
import time
from functools import partial
from types import ModuleType

__all__ = ["Soon", "retry_soon"]

_RETRY = {
    "initial_backoff": 0.05,
    "backoff_cap": 0.1,
    "max_tries_per_object": 50_000,
}  # seconds, seconds, and for over an hour
_LOOK, _REPLY = 0.3, 0.1  # seconds between two looks for a message, and for the reply that an app has made
_ACTIVE = 20.0  # seconds after a message in which the next one is likely


def retry_soon(*modules: ModuleType | None) -> None:
    """Let these modules of Flower, as far as there are such, fetch parts of messages again soon after a failure."""
    for module in modules:
        for name in ("pull_objects", "pull_and_inflate_object_from_tree"):
            fetch = getattr(module, name, None)
            if fetch is None or isinstance(fetch, partial):
                continue
            if _RETRY.keys() <= set(inspect.signature(fetch).parameters):
                setattr(module, name, partial(fetch, **_RETRY))


class Soon:
    """Time as the SuperNode's loop sees it."""

    def __init__(self) -> None:
        self._active = -_ACTIVE

    def sleep(self, seconds: float) -> None:
        """Wait: Flower says 0.5 while it waits for an app's reply, and 3 when it has found no message."""
        now = time.monotonic()
        if seconds < 1:
            self._active = now
            time.sleep(min(seconds, _REPLY))
        else:
            time.sleep(min(seconds, _LOOK) if now - self._active < _ACTIVE else seconds)
