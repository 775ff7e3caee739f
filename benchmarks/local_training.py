# SPDX-License-Identifier: Apache-2.0
"""Local training of many clients at once (MLP 784-200-10), against the bare products and a per-client autograd loop."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.timing import best
from coterie.data.ragged import Ragged
from coterie.local import Training, train
from coterie.models import Network, mlp

STEPS, STEP_SIZE = 10, 0.1


def run() -> list[dict]:
    return [_row(120, 200, 1.2), _row(480, 50, 1.35)]


def _row(clients: int, rows: int, limit: float) -> dict:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(clients, rows, 784, generator=draw)
    y = torch.randint(10, (clients, rows), generator=draw)
    data = next(Ragged.from_blocks(x, y).blocks(budget=1 << 40))
    model = mlp(784, 200, n_outputs=10)
    theta = model.initial(1, draw)[0]
    module = nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))
    every = theta.expand(1, clients, -1)
    size, key, how = torch.tensor([STEP_SIZE]), torch.zeros(1, dtype=torch.int64), Training(STEPS)
    shapes = _Products(x)
    results: dict[str, Tensor] = {}

    def ours() -> None:
        results["ours"] = train(model, every, data, size, how, key)[0]

    def vmapped() -> None:
        train(Network(module, "cross_entropy"), every, data, size, how, key)

    def loop() -> None:
        results["loop"] = _autograd_loop(module, theta, x, y)

    seconds = best(3, bmm=shapes.bmm, mm=shapes.mm, ours=ours, vmapped=vmapped, loop=loop)
    apart = float((results["ours"] - results["loop"]).abs().mean())  # the mean: a rounding may flip a unit at its kink
    assert apart < 1e-6, "the bench must train the same models"
    bare = min(seconds["bmm"], seconds["mm"])
    return {
        "bench": f"local training, {clients} clients x {rows} rows",
        "seconds": seconds["ours"],
        "bare": bare,
        "ratio": seconds["ours"] / bare,
        "limit": limit,
        "any module (vmap)": seconds["vmapped"],
        "autograd loop": seconds["loop"],
    }


class _Products:
    """The five products of a step, and nothing else."""

    def __init__(self, x: Tensor) -> None:
        c, n, d = x.shape
        self.x, self.steps = x, STEPS
        self.w1, self.w2 = torch.randn(c, 200, d), torch.randn(c, 10, 200)
        self.h, self.z = torch.empty(c, n, 200), torch.empty(c, n, 10)
        self.d2, self.d1 = torch.randn(c, n, 10), torch.empty(c, n, 200)
        self.g1, self.g2 = torch.empty(c, 200, d), torch.empty(c, 10, 200)

    def bmm(self) -> None:
        for _ in range(self.steps):
            torch.bmm(self.x, self.w1.mT, out=self.h)
            torch.bmm(self.h, self.w2.mT, out=self.z)
            torch.bmm(self.d2, self.w2, out=self.d1)
            torch.bmm(self.d2.mT, self.h, out=self.g2)
            torch.bmm(self.d1.mT, self.x, out=self.g1)

    def mm(self) -> None:
        for x, w1, w2, h, z, d2, d1, g1, g2 in zip(
            self.x, self.w1, self.w2, self.h, self.z, self.d2, self.d1, self.g1, self.g2, strict=True
        ):
            for _ in range(self.steps):
                torch.mm(x, w1.mT, out=h)
                torch.mm(h, w2.mT, out=z)
                torch.mm(d2, w2, out=d1)
                torch.mm(d2.mT, h, out=g2)
                torch.mm(d1.mT, x, out=g1)


def _autograd_loop(module: nn.Sequential, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    out = []
    for rows, labels in zip(x, y, strict=True):
        nn.utils.vector_to_parameters(theta.clone(), module.parameters())
        optimiser = torch.optim.SGD(module.parameters(), lr=STEP_SIZE)
        for _ in range(STEPS):
            optimiser.zero_grad()
            cross_entropy(module(rows), labels).backward()
            optimiser.step()
        out.append(nn.utils.parameters_to_vector(module.parameters()).detach())
    return torch.stack(out)
