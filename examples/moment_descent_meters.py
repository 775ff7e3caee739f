# SPDX-License-Identifier: Apache-2.0
"""Mixed regression from any start: heat meters that follow one of three laws, most with fewer readings than features.

Moment descent (Su, Xu, Yang, NeurIPS 2022). Nobody is told the laws, their number, or who follows which.

Run it: `python examples/moment_descent_meters.py`
"""

import numpy as np

import coterie
from coterie.evaluate import adjusted_rand

N_FEATURES, N_METERS, N_LAWS = 12, 300, 3
N_LARGE = 40  # meters with many readings: anchors are drawn among them

draw = np.random.default_rng(0)
readings = np.where(np.arange(N_METERS) < N_LARGE, 80, 8)  # the others have fewer than there are features
law = draw.integers(N_LAWS, size=N_METERS)
laws = draw.normal(size=(N_LAWS, N_FEATURES))
meter = np.repeat(np.arange(N_METERS), readings)
x = draw.normal(size=(len(meter), N_FEATURES))
y = (x * laws[law[meter]]).sum(1) + 0.3 * draw.normal(size=len(meter))

clients = coterie.from_arrays(x, y, meter, test_size=0.25, task="regression")
found = coterie.MixedRegression(random_state=0, baselines=True).fit(clients)
print(f"{found.n_clusters_} laws found among {clients.n_clients} meters, {len(found.anchors_)} of them anchors")
for score in found.scores_.values():
    print(f"{score.label:28} error on held-out readings {score.test:.3f}")
true = law[np.asarray(found.client_names_, dtype=int)]
print(f"adjusted Rand index against the truth: {adjusted_rand(found.labels_, true):.3f}")
