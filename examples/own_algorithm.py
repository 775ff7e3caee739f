# SPDX-License-Identifier: Apache-2.0
"""An algorithm of your own: k-means over rows that stay with their clients. Explained in docs/engine.md.

Run it: `python examples/own_algorithm.py`
"""

from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from coterie import keys
from coterie.data.ragged import Ragged
from coterie.engines.in_process import InProcess
from coterie.protocol import Ask, Block, Replies, Save, Sum, Tensors, WeightedMean


@dataclass(frozen=True)
class State:
    """What the next round needs."""

    centres: Tensor  # [K, D]
    round: int = 0


def k_means(
    state: State | None, *, n_clusters: int, n_features: int, rounds: int, seed: int
) -> Generator[Ask | Save, Replies | None, State]:
    """Lloyd's algorithm: the server."""
    if state is None:
        draw = keys.generator(seed, "start")
        state = State(torch.randn(n_clusters, n_features, generator=draw, dtype=torch.float64))
        yield Save(state)
    while state.round < rounds:
        got = yield Ask(
            nearest,
            {"centres": state.centres},
            fold={"sum": Sum(), "count": Sum(), "distance": WeightedMean("rows"), "changed": Sum()},
            fresh={"count": torch.zeros(n_clusters, dtype=torch.float64)},
            scratch=2 * n_clusters,
        )
        if got is None or got.n == 0:  # nobody answered
            state = replace(state, round=state.round + 1)
            yield Save(state, {"events": ["nobody answered"]})
            continue
        count = got["count"][:, None]  # [K, 1]
        centres = torch.where(count > 0, got["sum"] / count.clamp(min=1), state.centres)
        state = replace(state, centres=centres, round=state.round + 1)
        yield Save(state, {"distance": float(got["distance"]), "changed": int(got["changed"])})
    return state


def nearest(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
    """Sum each client's rows by the centre that they are nearest to: the clients, all at once."""
    centres = shared["centres"]  # [S, K, D]
    gap = torch.cdist(data.x.flatten(0, 1), centres.flatten(0, 1))  # [C N, S K]
    gap = gap.view(*data.x.shape[:2], *centres.shape[:2]).permute(2, 0, 1, 3)  # [S, C, N, K]
    best, label = gap.min(-1)  # [S, C, N]
    member = one_hot(label, centres.shape[1]).to(data.x.dtype) * data.real[..., None]  # padding belongs to nobody
    count = member.sum(2)  # [S, C, K]
    reply = {
        "sum": torch.einsum("scnk,cnd->sckd", member, data.x),
        "count": count,
        "distance": (best * data.weights).sum(-1),
        "rows": data.n.expand(len(centres), -1),
        "changed": (count != private["count"]).any(-1),  # since this client was last asked
    }
    return reply, {"count": count}


def main() -> None:
    """Run eight starts side by side and show the best."""
    draw = torch.Generator().manual_seed(0)
    truth = torch.tensor([[0, 0], [6, 0], [0, 6], [6, 6], [12, 3]], dtype=torch.float64)
    label = torch.randint(5, (40, 25), generator=draw)  # 40 clients with 25 rows of any kind
    x = truth[label] + torch.randn(40, 25, 2, generator=draw, dtype=torch.float64)

    engine = InProcess(Ragged.from_blocks(x, None))
    starts = [partial(k_means, n_clusters=5, n_features=2, rounds=20, seed=seed) for seed in range(8)]
    done = engine.run(starts)  # one pass over the rows for all eight

    last = [r for r in done.rounds if r.round == 20]
    best = min(last, key=lambda r: r.info["distance"])
    print("mean distance by start:", *(f"{r.info['distance']:.2f}" for r in last))
    print(f"best start: {best.run}; bytes up in its last round: {best.bytes_up}")
    for centre in done.states[best.run].centres.tolist():
        print("centre", [round(value, 2) for value in centre])


if __name__ == "__main__":
    main()
