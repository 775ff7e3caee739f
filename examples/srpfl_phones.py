# SPDX-License-Identifier: Apache-2.0
"""Personal models with slow phones: begin with the fastest and double their number, and compare virtual times.

SRPFL (Tziotis et al., 2022) around FedRep (Collins et al., ICML 2021). All phones' owners share what matters in a picture;
what they call it is each one's own.

Run it: `python examples/srpfl_phones.py`
"""

import numpy as np

import coterie

N_PHONES, N_PICTURES, N_FEATURES, N_SHARED, N_CLASSES = 40, 60, 20, 3, 4

draw = np.random.default_rng(0)
phone = np.repeat(np.arange(N_PHONES), N_PICTURES)
shared = np.linalg.qr(draw.normal(size=(N_FEATURES, N_SHARED)))[0]
own = 3 * draw.normal(size=(N_PHONES, N_SHARED, N_CLASSES))
x = draw.normal(size=(len(phone), N_FEATURES))
y = np.einsum("nk,nkc->nc", x @ shared, own[phone]).argmax(1)
clients = coterie.from_arrays(x, y, phone, test_size=0.25, task="classification")

how = {"hidden": (16,), "rounds": 40, "clock": "exponential", "random_state": 0}
for name, more in (
    ("FedRep, everybody in every round", {}),
    ("SRPFL", {"stragglers": "srpfl", "n0": 5, "stage_rounds": 5}),
):
    model = coterie.FedRep(**how, **more).fit(clients)
    took = next((r.time for r in model.history_ if r.info.get("test_metric", 0) > 0.7), None)
    reached = "never" if took is None else f"after {took:.1f} virtual seconds"
    print(f"{name}: accuracy {model.score(clients.test):.1%} in the end, 70 % {reached}")
    print("  phones in a round:", " ".join(str(r.participants) for r in model.history_ if r.participants)[:60], "...")
