# SPDX-License-Identifier: Apache-2.0
"""Before a run: do all nodes have the same software and the same columns, and whose clients are whose?"""

from collections.abc import Sequence
from importlib.metadata import version

import numpy as np
import torch

from coterie.data.ragged import Layout
from coterie.data.remote import Part, RemoteRows
from coterie.data.schema import Schema, disagreement, joined
from coterie.engines.flower import registry
from coterie.engines.flower.messages import PROTOCOL, Introduction
from coterie.errors import RunError
from coterie.protocol import Tensors

__all__ = ["agreed", "rows_of"]

_SHOWN = 3


def agreed(nodes: Sequence[Introduction]) -> Schema:
    """Refuse nodes that do not go together, by name; give the schema with the levels and classes of all of them."""
    for node in nodes:
        _check_software(node)
    _check_names(nodes)
    schemas = [Schema.model_validate_json(node.schema) for node in nodes]
    for node, schema in zip(nodes, schemas, strict=True):
        if said := disagreement((f"node '{nodes[0].node}'", schemas[0]), (f"node '{node.node}'", schema)):
            raise RunError(*said)
        if ("test" in node.counts) != ("test" in nodes[0].counts):
            raise RunError(
                f"node '{node.node}' and node '{nodes[0].node}' differ: one has test rows of its own",
                "let the server hold rows out everywhere, or give all nodes test rows",
            )
    merged = joined(schemas)
    _check_rows(nodes, schemas, merged)
    return merged


def _check_software(node: Introduction) -> None:
    if node.protocol != PROTOCOL:
        raise RunError(
            f"node '{node.node}' speaks protocol {node.protocol} and the server {PROTOCOL}",
            "install the same version of coterie everywhere",
        )
    for package, theirs in node.versions.items():
        ours = version(package).split("+")[0]  # builds of torch for other processors are the same version
        if theirs.split("+")[0] != ours:
            raise RunError(
                f"node '{node.node}' has {package} {theirs} and the server {ours}",
                "install the same version everywhere",
            )
    lacking = sorted(set(registry.steps()) - set(node.steps))
    if lacking:
        some = ", ".join(lacking[:_SHOWN]) + (", ..." if len(lacking) > _SHOWN else "")
        raise RunError(
            f"node '{node.node}' does not know {some}",
            "register the same client functions on the server and on all nodes",
        )


def _check_names(nodes: Sequence[Introduction]) -> None:
    seen: dict[str, str] = {}
    names: set[str] = set()
    for node in nodes:
        if node.node in names:
            raise RunError(f"two nodes are called '{node.node}'", "give each its own name")
        names.add(node.node)
        for client in node.names:
            if client in seen:
                raise RunError(
                    f"client '{client}' is on node '{seen[client]}' and on node '{node.node}'",
                    "give clients distinct names; a client's rows lie on one node",
                )
            seen[client] = node.node


def _check_rows(nodes: Sequence[Introduction], schemas: Sequence[Schema], merged: Schema) -> None:
    """Rows of nodes whose schema is the federation's look alike; those of others will be read anew."""
    alike = [node for node, schema in zip(nodes, schemas, strict=True) if schema == merged]
    for node in alike[1:]:
        for name, value in node.row.items():
            first = alike[0].row.get(name)
            if first is None or first.shape != value.shape or first.dtype != value.dtype:
                raise RunError(
                    f"node '{node.node}' has {name} of {value.dtype} {tuple(value.shape[1:])}, and "
                    f"node '{alike[0].node}' has others",
                    "give all nodes rows of the same shape and precision",
                )


def rows_of(nodes: Sequence[Introduction], schema: Schema, federation: object, part: str) -> RemoteRows:
    """All nodes' clients, ascending by name."""
    names = np.array([name for node in nodes for name in node.names])
    order = np.argsort(names)
    place = np.repeat(np.arange(len(nodes)), [len(node.names) for node in nodes])[order]
    number = np.concatenate([np.arange(len(node.names)) for node in nodes])[order]
    counts = torch.cat([node.counts[part] for node in nodes]).numpy()[order]
    row = _row(nodes, schema)
    return RemoteRows(
        Layout.plan(names[order], counts), row["x"], row.get("y"), place=place, number=number,
        key=torch.cat([node.keys for node in nodes])[torch.from_numpy(order)], federation=federation, part=Part(part),
    )  # fmt: skip


def _row(nodes: Sequence[Introduction], schema: Schema) -> Tensors:
    """A row as it is under the federation's schema: more levels make it longer."""
    for node in nodes:
        if Schema.model_validate_json(node.schema) == schema:
            return node.row
    x = nodes[0].row["x"]
    return {**nodes[0].row, "x": x.new_zeros(0, schema.n_features)}
