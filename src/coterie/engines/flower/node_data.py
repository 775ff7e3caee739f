# SPDX-License-Identifier: Apache-2.0
"""What a node holds, as its configuration and the run's options say: whose rows, in which files, and where state is kept."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from flwr.app import Context
from torch import nn

from coterie.config import FitOptions
from coterie.data.clients import Clients
from coterie.data.readers import read, read_with
from coterie.data.schema import Schema
from coterie.engines.flower.client import NodeData
from coterie.engines.flower.identity import read_secret
from coterie.engines.flower.node_config import node_name, state_folder
from coterie.errors import ConfigError

__all__ = ["LoadData", "node_data"]

LoadData = Callable[[Context], Clients | str | Path]


def node_data(
    context: Context,
    load_data: LoadData | None = None,
    *,
    modules: Mapping[str, Callable[[], nn.Module]] | None = None,
    opaque: bool = False,
) -> NodeData:
    """Say what this node holds.

    Node configuration (``--node-config``): `data`, a file or folder, unless there is a `load_data`; `client` and `target`,
    its columns, where the run does not name them; `name`, distinct in the federation and the same after a restart; `state`,
    the folder in which clients keep what is theirs, under the node's name; `secret`, a file with what names are hidden with.
    """
    name, folder = node_name(context), state_folder(context)
    reading = str(context.run_config.get("options", ""))
    secret = (
        read_secret(Path(str(context.node_config["secret"]))) if opaque and "secret" in context.node_config else b""
    )
    return NodeData(
        name, partial(_load, context, load_data), folder, dict(modules or {}), opaque, reading, secret=secret
    )


def _load(context: Context, load_data: LoadData | None, schema: Schema | None) -> Clients:
    found = _path(context) if load_data is None else load_data(context)
    if isinstance(found, Clients):
        return found
    chosen = _options(context)
    data = chosen.data
    if schema is not None:
        return read_with(schema, found, min_rows=data.min_rows)
    return read(
        found, client=data.client, target=data.target, features=data.features, exclude=data.exclude,
        categorical=data.categorical, missing=data.missing, task=chosen.task, min_rows=data.min_rows, test_size=0.0,
    )  # fmt: skip


def _path(context: Context) -> str:
    if "data" not in context.node_config:
        raise ConfigError(
            f"{node_name(context)} has no data path",
            'start the SuperNode with --node-config \'data="/path/rows.parquet" client="site"\', or register load_data',
        )
    return str(context.node_config["data"])


def _options(context: Context) -> FitOptions:
    """What the run says, with the node's own word for columns where it says nothing."""
    chosen = FitOptions.model_validate_json(str(context.run_config.get("options", "{}")))
    config = context.node_config
    silent = [key for key in ("client", "target") if getattr(chosen.data, key) is None]
    own = {str(key): str(config[key]) for key in silent if key in config}
    return chosen.model_copy(update={"data": chosen.data.model_copy(update=own)})
