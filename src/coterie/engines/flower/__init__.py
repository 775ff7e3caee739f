# SPDX-License-Identifier: Apache-2.0
"""Flower as an engine: the same algorithms on clients that are on other machines.

The server side is `connect` (who is there) and `server` (the engine), the node side is `client` and `state`; `registry` and
`wire` say what may be sent. Nothing else in coterie needs flwr, but for `coterie.flower`.
"""

import os

__all__ = ["NodeWarning"]

for _name, _value in (
    ("FLWR_TELEMETRY_ENABLED", "0"),
    ("FLWR_DISABLE_UPDATE_CHECK", "1"),
    ("RAY_USAGE_STATS_ENABLED", "0"),
):
    os.environ.setdefault(_name, _value)


class NodeWarning(UserWarning):
    """A node was late, lost or refused; the run goes on without it."""
