# SPDX-License-Identifier: Apache-2.0
"""What a node holds, as its configuration and the run's options say: whose rows, in which files, and where state is kept."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from torch import nn

from coterie.config import FitOptions
from coterie.data.clients import Clients
from coterie.data.readers import read, read_with
from coterie.data.schema import Schema
from coterie.engines.flower.client import Asker, NodeData
from coterie.engines.flower.identity import read_secret
from coterie.engines.flower.incoming import printable
from coterie.engines.flower.node_config import node_name, policy_file, state_folder
from coterie.engines.flower.policy_file import Data, read_policy
from coterie.errors import ConfigError, RunError
from coterie.outcome_names import CLASSES

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
    its columns; `name`, distinct in the federation and the same after a restart; `state`, the folder in which clients keep
    what is theirs, under the node's name; `policy`, a file that says what a server may ask; `secret`, a file with what names
    are hidden with.
    """
    name, folder, policy = node_name(context), state_folder(context), read_policy(policy_file(context))
    reading = str(context.run_config.get("options", ""))
    load, hidden = partial(_load, context, load_data, policy.data), opaque and "secret" in context.node_config
    secret = read_secret(Path(str(context.node_config["secret"]))) if hidden else b""
    return NodeData(name, load, folder, dict(modules or {}), opaque, reading, secret, policy, _asker(context))


def _asker(context: Context) -> Asker:
    """Who asks, as far as Flower and the run say."""
    said = context.run_config
    method = "compare" if said.get("task") == "compare" else ""
    if not method and "options" in said:
        with suppress(ValueError):  # it is said where rows are read
            method = FitOptions.model_validate_json(str(said["options"])).method
    return Asker(context.run_id, printable(said.get("submitter", "")), method)


def _load(context: Context, load_data: LoadData | None, allowed: Data, schema: Schema | None) -> Clients:
    found = _path(context) if load_data is None else load_data(context)
    if isinstance(found, Clients):
        return found
    chosen = _options(context, allowed)
    data = chosen.data
    if schema is not None:
        return read_with(schema, found, min_rows=data.min_rows, split=data.split, **data.written)
    said: dict[str, Any] = {"client": data.client, "target": data.target, "features": data.features}
    said |= {"exclude": data.exclude, "categorical": data.categorical, "missing": data.missing}
    said |= {"split": data.split, **data.written}
    clients = read(
        found, **said, task=chosen.task, outcome=data.outcome, event=data.event, min_rows=data.min_rows, test_size=0.0
    )
    classes = chosen.task == "classification" or data.outcome in CLASSES
    if classes and not allowed.classes and _guessed(found, said) != "classification":
        raise RunError(
            f"the run takes '{data.target}' as classes, whose names nodes tell, and here it is a number",
            "set data.classes = true in this node's policy to allow it",
        )
    return clients


def _guessed(found: str | Path, said: Mapping[str, Any]) -> str:
    """What the target would be taken for."""
    return read(found, **said, test_size=0.0).schema.task


def _path(context: Context) -> str:
    if "data" not in context.node_config:
        raise ConfigError(
            f"{node_name(context)} has no data path",
            'start the SuperNode with --node-config \'data="/path/rows.parquet" client="site"\', or register load_data',
        )
    return str(context.node_config["data"])


def _options(context: Context, allowed: Data) -> FitOptions:
    """What the run says of columns; the client column and the target are the node's own."""
    chosen = FitOptions.model_validate_json(str(context.run_config.get("options", "{}")))
    own: dict[str, str | None] = {}
    for key in ("client", "target"):
        own[key] = str(context.node_config[key]) if key in context.node_config else None
        said = getattr(chosen.data, key)
        if said not in (None, own[key]):
            named = f"'{own[key]}'" if own[key] else "none"
            raise RunError(
                f"the run takes '{said}' as its {key} column, and this node says {named}",
                f"a node names its {key} column itself: --node-config '{key}=\"...\"'",
            )
    if secret := sorted(set(chosen.data.categorical) - set(allowed.categorical)):
        raise RunError(
            f"the run takes '{secret[0]}' as a category, whose values nodes tell",
            "name the column in data.categorical of this node's policy to allow it",
        )
    return chosen.model_copy(update={"data": chosen.data.model_copy(update=own)})
