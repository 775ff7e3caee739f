# SPDX-License-Identifier: Apache-2.0
"""Cluster clients with your own torch network: digits that half of the clients hold turned by 90 degrees.

Run it: `python examples/own_network.py`
"""

import numpy as np
from sklearn.datasets import load_digits
from torch import nn

import coterie

images, digits = load_digits(return_X_y=True)
images = (images.reshape(-1, 8, 8) / 16).astype("float32")
client = np.random.default_rng(0).permutation(len(images)) % 40  # 40 clients, about 45 images each
turned = client % 2 == 1  # told to nobody
x = np.where(turned[:, None, None], np.rot90(images, axes=(1, 2)), images)
clients = coterie.from_arrays(x, digits, client, test_size=0.2)

# Any module that takes rows [R, ...] and gives outputs [R, O]. Its own weights are only the pattern.
net = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))
how = {"model": net, "rounds": 20, "local_steps": 5, "step_size": 0.5, "standardise": False, "random_state": 0}

everyone = coterie.FedAvg(**how).fit(clients)
grouped = coterie.IFCA(n_clusters=2, **how).fit(clients)
partly = coterie.IFCA(n_clusters=2, shared_layers=("3",), **how).fit(clients)  # the last layer is common to all

print("accuracy on held-out rows")
print(f"  one network for all          {everyone.score(clients.test):.3f}")
print(f"  two networks                 {grouped.score(clients.test):.3f}")
print(f"  two networks, last layer one {partly.score(clients.test):.3f}")
print("clients per cluster:", np.bincount(grouped.labels_).tolist())
