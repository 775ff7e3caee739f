# SPDX-License-Identifier: Apache-2.0
"""Beside what statisticians use: largest differences from glmer, statsmodels, scikit-learn and lifelines, and coverage.

``python -m benchmarks.references [FOLDER]`` prints a table; `benchmarks.lme4` has that of lmer. The folder holds the data
sets; else COTERIE_DATA names it, or it is ../shared/data.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv as pc

import coterie
from coterie.config import options
from coterie.methods.fit import fit

Line = tuple[str, str, str]  # what, against what, how far apart
GLMER = {
    "fixed effects": [-3.05640788299, -0.617837500775, -0.129456819685, 0.612979241758],
    "their errors": [0.0866966850424, 0.0560369512062, 0.0648798453164, 0.0302905482039],
    "SD of intercepts": [0.400387691606],
    "log-likelihood": [-3089.26599781],
}
SEEDS = range(5)


def apart(ours: Any, theirs: Any) -> float:
    """Largest relative difference."""
    a, b = np.asarray(ours, dtype=float), np.asarray(theirs, dtype=float)
    return float(np.max(np.abs(a - b) / np.abs(b)))


def glmer(folder: Path) -> Iterator[Line]:
    """mine ~ f1 + f2 + f3 + (1 | field) by Laplace, with standardised features."""
    table = pc.read_csv(folder / "landmine_29fields.csv.gz")
    x = np.stack([table[name].to_numpy() for name in ("f1", "f2", "f3")], 1)
    x = (x - x.mean(0)) / x.std(0, ddof=1)
    said = coterie.MixedModel().fit(x, table["mine"].to_numpy(), table["field"].to_numpy()).summary_
    ours = {
        "fixed effects": [one["estimate"] for one in said["fixed"]],
        "their errors": [one["error"] for one in said["fixed"]],
        "SD of intercepts": [said["random"][0]["sd"]],
        "log-likelihood": [said["log_likelihood"]],
    }
    for name, theirs in GLMER.items():
        yield f"landmine, {name}", "lme4::glmer", f"{apart(ours[name], theirs):.0e}"


def mixed(_: Path) -> Iterator[Line]:
    """Simulated clients with random intercepts and slopes."""
    from statsmodels.regression.mixed_linear_model import MixedLM

    for slopes in ((), ("x0",)):
        for reml in (True, False):
            worst: dict[str, float] = {}
            for seed in SEEDS:
                x, who, draw = _rows(seed)
                y = 1 + x @ [0.5, -0.3, 0.2] + draw.normal(0, 0.8, 40)[who] + draw.normal(0, 0.5, 40)[who] * x[:, 0]
                y = y + draw.normal(size=len(y))
                random = np.column_stack([np.ones(len(y)), *(x[:, 0] for _ in slopes)])
                model = MixedLM(y, np.column_stack([np.ones(len(y)), x]), who, random)
                theirs = model.fit(reml=reml)
                ours = coterie.MixedModel(slopes=slopes, reml=reml).fit(x, y, who)
                found = {
                    "log-likelihood": apart(ours.summary_["log_likelihood"], theirs.llf),
                    "fixed effects": apart([one["estimate"] for one in ours.summary_["fixed"]], theirs.fe_params),
                    "their errors": apart([one["error"] for one in ours.summary_["fixed"]], theirs.bse_fe),
                    "variances": apart(list(ours.variance_.values()), np.diag(theirs.cov_re)),
                }
                worst = {name: max(value, worst.get(name, 0.0)) for name, value in found.items()}
            said = ", ".join(f"{name} {value:.0e}" for name, value in worst.items())
            what = f"simulated, random {'slopes' if slopes else 'intercepts'}, {'REML' if reml else 'ML'}"
            yield what, "statsmodels MixedLM", said


def probabilities(folder: Path) -> Iterator[Line]:
    """Held-out rows of the landmine data."""
    from sklearn.metrics import average_precision_score, brier_score_loss, log_loss, roc_auc_score

    clients = coterie.read(folder / "landmine_29fields.csv.gz", client="field", target="mine", task="classification")
    assert clients.test is not None
    y = np.asarray(clients.test.y)
    for model in (coterie.FedAvg(), coterie.IFCA(n_clusters=2)):
        p = model.fit(clients).predict_proba(clients)[:, 1]
        said = model.fitted_.extra["probabilities"]["test"]
        theirs: dict[str, Callable[..., float]] = {
            "auroc": roc_auc_score, "average_precision": average_precision_score, "log_loss": log_loss,
            "brier": brier_score_loss,
        }  # fmt: skip
        gaps = [f"{name} {abs(said[name]['value'] - measure(y, p)):.0e}" for name, measure in theirs.items()]
        yield f"landmine, {model.method}", "scikit-learn (absolute)", ", ".join(gaps)


def outcomes(_: Path) -> Iterator[Line]:
    """Counts, skewed numbers and ordered classes: one model for all."""
    from statsmodels import api
    from statsmodels.miscmodels.ordinal_model import OrderedModel

    x, who, draw = _rows(0)
    eta = 0.7 + x @ [0.4, -0.3, 0.1]
    mean, full = np.exp(eta), api.add_constant(x)
    targets = {
        "poisson": draw.poisson(mean), "negative-binomial": draw.negative_binomial(2, 2 / (2 + mean)),
        "gamma": draw.gamma(3.0, mean / 3), "log-normal": np.exp(eta + 0.6 * draw.normal(size=len(eta))),
        "ordinal": np.digitize(eta + draw.logistic(size=len(eta)), (-0.5, 0.8, 2.0)),
    }  # fmt: skip
    family = api.families.Gamma(api.families.links.Log())
    theirs = {
        "poisson": lambda y: api.Poisson(y, full).fit(disp=0, tol=1e-12).params[1:4],
        "negative-binomial": lambda y: (
            api.NegativeBinomial(y, full).fit(disp=0, method="bfgs", maxiter=500, gtol=1e-8).params[1:4]
        ),
        "gamma": lambda y: api.GLM(y, full, family=family).fit(tol=1e-12).params[1:4],
        "log-normal": lambda y: api.OLS(np.log(y), full).fit().params[1:4],
        "ordinal": lambda y: OrderedModel(y, x, distr="logit").fit(disp=0, method="bfgs", gtol=1e-9).params[:3],
    }
    for outcome, y in targets.items():
        clients = coterie.from_arrays(x, y.astype(float), who, outcome=outcome, test_size=0.0)
        found = fit(clients, options({"method": "fedavg", "baselines": False, "data": {"standardise": False}}))
        weight, _ = found.models.model.unpack(found.models.theta[0])[0]
        yield f"{outcome}, coefficients", "statsmodels", f"{apart(weight[0], theirs[outcome](y)):.0e}"


def cox(_: Path) -> Iterator[Line]:
    """Times to an event, stratified by client, with ties."""
    import lifelines
    import pandas

    x, who, draw = _rows(0)
    base = np.exp(draw.normal(size=40))[who]
    event, censored = draw.exponential(size=len(x)) / (base * np.exp(x @ [0.9, -0.5, 0.1])), draw.exponential(2 / base)
    times, seen = np.ceil(np.minimum(event, censored) * 8) / 8, (event <= censored).astype(float)
    table = pandas.DataFrame(x, columns=["a", "b", "c"]).assign(time=times, event=seen, client=who)
    theirs = lifelines.CoxPHFitter().fit(table, "time", "event", strata=["client"], fit_options={"precision": 1e-10})
    clients = coterie.from_arrays(x, np.column_stack([times, seen]), who, outcome="cox", test_size=0.0)
    found = fit(clients, options({"method": "fedavg", "baselines": False, "data": {"standardise": False}}))
    loss = float((found.per_client["train_loss"] * found.per_client["rows_train"]).sum())
    gap = apart(found.models.theta[0, :3], theirs.params_.to_numpy())
    yield "Cox, coefficients", "lifelines", f"{gap:.0e}"
    yield "Cox, log-likelihood", "lifelines", f"{apart(-loss, theirs.log_likelihood_):.0e}"


def coverage(folder: Path) -> Iterator[Line]:
    """Of 90 % prediction intervals: held-out rows, new clients, and these without labelled rows."""
    for name, file, client, target, without in (
        ("school", "school_exam_139schools.csv.gz", "school", "score", ["x27"]),
        ("radon", "radon_85counties.csv.gz", "county.name", "log.radon", ["county"]),
    ):
        clients = coterie.read(
            folder / file, client=client, target=target, exclude=without, task="regression", new_clients=0.2
        )
        chosen = {"method": "shrunk", "prior": {"spread": "intercept"}, "predictions": {"coverage": 0.9}}
        said = fit(clients, options({**chosen, "baselines": False})).extra["coverage"]
        for how in ("conformal", "model"):
            sides = {"test": "held-out rows", "new": "new clients", "unlabelled": "without labels"}
            shares = [f"{words} {said[how][side]['value']:.3f}" for side, words in sides.items() if side in said[how]]
            yield f"{name}, own intercepts, {how} intervals", "0.9", ", ".join(shares)


def _rows(seed: int) -> tuple[np.ndarray, np.ndarray, np.random.Generator]:
    """Features [N, 3] of 40 clients with 5 to 30 rows."""
    draw = np.random.default_rng(seed)
    who = np.repeat(np.arange(40), draw.integers(5, 31, 40))
    return draw.normal(size=(len(who), 3)), who, draw


def main() -> None:
    given = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("COTERIE_DATA")
    folder = Path(given) if given else Path(__file__).resolve().parents[2] / "shared" / "data"
    warnings.simplefilter("ignore")  # others warn of their own minima
    print("| what | against | largest relative difference, or share |\n|---|---|---|")
    for part in (glmer, mixed, probabilities, outcomes, cox, coverage):
        for line in part(folder):
            print("| " + " | ".join(line) + " |", flush=True)


if __name__ == "__main__":
    main()
