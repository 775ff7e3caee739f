# SPDX-License-Identifier: Apache-2.0
"""Kinds of patients at every clinic: a federated mixture that names the clinics which do not fit in.

FedGrEM (Tian, Weng, Feng, ICML 2024). Clinics see the same three kinds of patients, each in its own proportions and with its
own way of measuring. Three clinics count one column from another zero.

Run it: `python examples/fedgrem_clinics.py`
"""

import numpy as np

import coterie

N_CLINICS, N_PATIENTS = 40, 50
WRONG = (3, 17, 31)

draw = np.random.default_rng(0)
clinic = np.repeat(np.arange(N_CLINICS), N_PATIENTS)
share = draw.dirichlet([2.0, 2.0, 2.0], N_CLINICS)
kind = (draw.random(len(clinic))[:, None] > share[clinic].cumsum(1)).sum(1)
usual = np.array([[0.0, 0.0, 0.0], [3.0, 0.0, 2.0], [0.0, 3.0, -2.0]])
habit = 0.2 * draw.normal(size=(N_CLINICS, 3, 3))
x = usual[kind] + habit[clinic, kind] + draw.normal(size=(len(clinic), 3))
wrong = np.isin(clinic, WRONG)
x[wrong, 2] += 8

names = np.array([f"clinic-{i:02d}" for i in clinic])
clients = coterie.from_arrays(x, None, names, test_size=0.2)
model = coterie.FederatedMixture(n_components=3, baselines=True, random_state=0).fit(clients)
for score in model.scores_.values():
    print(f"{score.label:28} mean log-likelihood of a held-out patient {score.test:.3f}")
print("clinics that do not fit in:", sorted(model.outliers_))
for weights in model.weights_[:3]:
    print("kinds at one clinic:", " ".join(f"{100 * w:.0f} %" for w in weights))
