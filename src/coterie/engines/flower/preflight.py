# SPDX-License-Identifier: Apache-2.0
"""Before a run: do all nodes have the same software and the same columns, and whose clients are whose?"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version

import numpy as np
import torch

from coterie.data.ragged import Layout
from coterie.data.remote import Part, RemoteRows
from coterie.data.schema import Schema, disagreement, joined
from coterie.engines.flower import registry
from coterie.engines.flower.incoming import printable
from coterie.engines.flower.messages import PROTOCOL, Introduction
from coterie.errors import RunError
from coterie.limits import MOST_LEVELS
from coterie.protocol import Tensors

__all__ = ["left_out", "rows_of", "schema_of"]

_SHOWN = 3
_PACKAGES = ("coterie", "torch")  # whose versions must be the same everywhere


def left_out(nodes: Sequence[Introduction]) -> dict[int, str]:
    """Find nodes that do not go with the others.  -> why, by their places

    Where nodes differ, those stay whom most agree with; of equally many nobody knows who is right, and the run is refused.
    """
    schemas = [Schema.model_validate_json(node.schema) for node in nodes]
    out = {place: why for place, node in enumerate(nodes) if (why := _other_software(node))}
    out |= _who_share_names(_without(nodes, out))
    out |= _who_differ(_without(nodes, out), schemas)
    out |= _who_bring_too_much(_without(nodes, out), schemas)
    return out


def schema_of(nodes: Sequence[Introduction]) -> Schema:
    """The schema with the levels and classes of all nodes, which go together."""
    return joined([Schema.model_validate_json(node.schema) for node in nodes])


def _without(nodes: Sequence[Introduction], out: Mapping[int, str]) -> dict[int, Introduction]:
    """Those who are left, by their places."""
    return {place: node for place, node in enumerate(nodes) if place not in out}


def _other_software(node: Introduction) -> str | None:
    if node.protocol != PROTOCOL:
        return f"node '{node.node}' speaks protocol {node.protocol} and the server {PROTOCOL}"
    for package in _PACKAGES:
        theirs, ours = (said.split("+")[0] for said in (node.versions.get(package, "none"), version(package)))
        if theirs != ours:  # builds of torch for other processors are the same version
            return f"node '{node.node}' has {package} {printable(theirs)} and the server {ours}"
    lacking = sorted(set(registry.steps()) - set(node.steps))
    if lacking:
        some = ", ".join(lacking[:_SHOWN]) + (", ..." if len(lacking) > _SHOWN else "")
        return f"node '{node.node}' does not know {some}: register the same client functions everywhere"
    return None


def _who_share_names(nodes: Mapping[int, Introduction]) -> dict[int, str]:
    """Leave out nodes that claim what others claim, those first who do so to most: one that claims everything goes alone."""
    out: dict[int, str] = {}
    while True:
        owner: dict[tuple[str, str], int] = {}
        against: dict[int, dict[int, str]] = {}
        for place, node in nodes.items():
            for claim in (("node", node.node), *(("client", name) for name in node.names)) if place not in out else ():
                other = owner.setdefault(claim, place)
                if other != place:
                    why = _claimed(*claim, nodes[other].node, node.node)
                    against.setdefault(other, {}).setdefault(place, why)
                    against.setdefault(place, {}).setdefault(other, why)
        if not against:
            return out
        most = max(map(len, against.values()))
        for place, others in against.items():
            if len(others) == most:
                out[place] = f"node '{nodes[place].node}' is left out: {next(iter(others.values()))}"


def _claimed(what: str, name: str, one: str, other: str) -> str:
    if what == "node":
        return f"two nodes are called '{name}'"
    return f"client '{name}' is on node '{one}' and on node '{other}'"


def _who_differ(nodes: Mapping[int, Introduction], schemas: Sequence[Schema]) -> dict[int, str]:
    """Leave out nodes whose columns, target, held-out rows or precision are not those of most."""
    groups: dict[object, list[int]] = {}
    for place, node in nodes.items():
        groups.setdefault(_form(node, schemas[place]), []).append(place)
    by_size = sorted(groups.values(), key=lambda places: (-len(places), places[0]))
    if len(by_size) < 2:
        return {}
    first, others = by_size[0], [place for group in by_size[1:] for place in group]
    out = {place: _difference(nodes[first[0]], nodes[place], schemas[first[0]], schemas[place]) for place in others}
    if len(by_size[1]) == len(first):
        raise RunError(out[by_size[1][0]], "make the nodes agree: as many say the one as the other")
    return out


def _form(node: Introduction, schema: Schema) -> object:
    """What must be the same everywhere."""
    columns = tuple((column.name, column.kind) for column in schema.columns)
    x, y = node.row["x"], node.row.get("y")
    rows = (x.dtype, x.shape[2:], x.shape[1] if x.dim() > 2 else None, None if y is None else (y.dtype, y.shape))
    return schema.target, schema.task, schema.missing, columns, tuple(sorted(node.counts)), rows


def _difference(first: Introduction, node: Introduction, ours: Schema, theirs: Schema) -> str:
    if said := disagreement((f"node '{first.node}'", ours), (f"node '{node.node}'", theirs)):
        return printable(said[0])
    if set(node.counts) != set(first.counts):
        return f"node '{node.node}' and node '{first.node}' differ: one has test rows of its own"
    for name in ("x", "y"):
        a, b = first.row.get(name), node.row.get(name)
        if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
            said_ = "none" if b is None else f"{b.dtype} {tuple(b.shape[1:])}"
            return f"node '{node.node}' has {name} of {said_}, and node '{first.node}' has others"
    return f"node '{node.node}' has other rows than node '{first.node}'"


def _who_bring_too_much(nodes: Mapping[int, Introduction], schemas: Sequence[Schema]) -> dict[int, str]:
    """Leave out nodes whose levels make everybody's rows long, those first who bring most.

    A node may bring as many levels, or classes, that nobody else has as the others have together; a few it may in any case.
    """
    out: dict[int, str] = {}
    while True:
        left = [place for place in nodes if place not in out]
        too_much = {}
        for what in ("levels", "classes") if len(left) > 1 else ():
            owners: dict[object, set[int]] = {}
            for place in left:
                for word in _words(schemas[place], what):
                    owners.setdefault(word, set()).add(place)
            alone = Counter(place for own in owners.values() if len(own) == 1 for place in own)
            for place, brought in alone.items():
                if brought > max(MOST_LEVELS, len(owners) - brought):
                    too_much[place] = (brought, what, max(MOST_LEVELS, len(owners) - brought))
        if not too_much:
            return out
        worst = max(too_much, key=lambda place: too_much[place])
        brought, what, most = too_much[worst]
        out[worst] = f"node '{nodes[worst].node}' brings {brought:,} {what} that no other node has; at most {most:,}"


def _words(schema: Schema, what: str) -> Iterator[object]:
    """What rows become numbers by: columns and levels, or classes."""
    if what == "classes":
        yield from schema.classes
    else:
        yield from ((column.name, level) for column in schema.columns for level in column.levels or ("",))


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
        federation=federation, part=Part(part),
    )  # fmt: skip


def _row(nodes: Sequence[Introduction], schema: Schema) -> Tensors:
    """A row as it is under the federation's schema: more levels make it longer."""
    for node in nodes:
        if Schema.model_validate_json(node.schema) == schema:
            return node.row
    x = nodes[0].row["x"]
    return {**nodes[0].row, "x": x.new_zeros(0, schema.n_features)}
