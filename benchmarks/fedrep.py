# SPDX-License-Identifier: Apache-2.0
"""A round of FedRep with minibatches (MLP 784-512-256-64-10), against a plain loop over clients with autograd."""

import itertools

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.timing import best
from coterie import keys
from coterie.algorithms.fedrep import fedrep
from coterie.data.ragged import Ragged
from coterie.engines.in_process import InProcess
from coterie.local import Training
from coterie.models import Dense, mlp

CLIENTS, ROWS, FEATURES, CLASSES = 100, 150, 784, 10
BATCH, HEAD_EPOCHS, BODY_EPOCHS, STEP_SIZE, SEED = 10, 10, 5, 0.01, 0


def run() -> list[dict]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(CLIENTS, ROWS, FEATURES, generator=draw)
    y = torch.randint(CLASSES, (CLIENTS, ROWS), generator=draw)
    rows = Ragged.from_blocks(x, y)
    model = mlp(FEATURES, 512, 256, 64, n_outputs=CLASSES)
    start = model.initial(1, draw)[0]
    results: dict[str, Tensor] = {}

    def ours() -> None:
        head, body = (Training(epochs=epochs, batch_size=BATCH) for epochs in (HEAD_EPOCHS, BODY_EPOCHS))
        how = {"rounds": 1, "step_size": STEP_SIZE, "seed": SEED, "head": head, "body": body, "start": start}
        results["ours"] = InProcess(rows).run([lambda state: fedrep(state, model=model, **how)]).states[0].theta

    def loop() -> None:
        results["loop"] = _plain_round(model, start, x, y, rows.keys)

    seconds = best(1, ours=ours, loop=loop)
    apart = float((results["ours"] - results["loop"]).abs().max())
    assert apart < 1e-4, "the bench must train the same models"
    return [
        {
            "bench": f"a FedRep round, {CLIENTS} clients x {ROWS} rows",
            "seconds": seconds["ours"],
            "plain loop": seconds["loop"],
            "times faster": seconds["loop"] / seconds["ours"],
            "limit": 3.0,
        }
    ]


def _plain_round(model: Dense, start: Tensor, x: Tensor, y: Tensor, clients: Tensor) -> Tensor:
    """One client after the other, head epochs and then representation epochs; the mean of the representations."""
    sizes = model.sizes
    layers = [part for i, o in itertools.pairwise(sizes) for part in (nn.Linear(i, o), nn.ReLU())]
    module = nn.Sequential(*layers[:-1])
    parameters = list(module.parameters())
    body, head = parameters[:-2], parameters[-2:]
    total = torch.zeros(sum(p.numel() for p in body))
    key = keys.key(SEED, 0, "partly shared")
    for c in range(len(x)):
        nn.utils.vector_to_parameters(start.clone(), module.parameters())
        for turn, (moving, fixed, epochs) in enumerate([(head, body, HEAD_EPOCHS), (body, head, BODY_EPOCHS)]):
            for p in parameters:
                p.requires_grad_(not any(p is other for other in fixed))
            optimiser = torch.optim.SGD(moving, lr=STEP_SIZE)
            for epoch in range(epochs):
                order = keys.uniform(keys.key(keys.key(key, turn), epoch, "batch", clients[c]), ROWS).argsort()
                for rows in order.split(BATCH):
                    optimiser.zero_grad()
                    cross_entropy(module(x[c, rows]), y[c, rows]).backward()
                    optimiser.step()
        total += nn.utils.parameters_to_vector(body).detach()
    return total / len(x)
