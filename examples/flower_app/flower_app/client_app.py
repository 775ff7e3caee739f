# SPDX-License-Identifier: Apache-2.0
"""A ClientApp with a function of its own, which also answers coterie's strategies.

Every node holds three sites. On some of them the target rises with the second column, on others it falls; nobody is told.
"""

import numpy as np
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import coterie
from coterie.flower import register

app = ClientApp()


def load_data(context: Context) -> coterie.Clients:
    """Rows of this node's sites; in life, from its database."""
    node = int(context.node_config["partition-id"])
    draw = np.random.default_rng(node)
    sites = np.repeat([f"site-{node}-{i}" for i in range(3)], 30)
    x = draw.normal(size=(len(sites), 2))
    slope = np.repeat([1.0 if (node + i) % 2 else -1.0 for i in range(3)], 30)
    y = 2.0 * x[:, 0] + slope * x[:, 1] + 0.1 * draw.normal(size=len(sites))
    return coterie.from_arrays(x, y, groups=sites, task="regression", test_size=0)


register(app, load_data)


@app.query()
def count(message: Message, context: Context) -> Message:
    """Say how many rows there are: what this app did before, it still does."""
    rows = load_data(context).train.layout.n_rows
    return Message(RecordDict({"counted": MetricRecord({"rows": rows})}), reply_to=message)
