# SPDX-License-Identifier: Apache-2.0
"""One planted mixed regression and all methods on it, side by side: what the studies of moment descent share.

Su, Xu, Yang, "Global Convergence of Federated Learning for Mixed Regression", NeurIPS 2022, appendix C. Phase 1 is run once;
then its Phase 2 by FedAvg and by FedProx, IFCA from a random and a spread start, one-shot clustering, one model for all, and
oracles (Phase 2 from the planted models) advance in lockstep. Every run is compared with the oracle that trains as it does:
the same local steps, or FedProx. As in the paper, IFCA is Phase 2 from another start; random starts are drawn as the planted
models are; clients count by their rows. IFCA is not helped by reseeding. Models are averaged over their clusters; with the
paper's average over everyone (Lemma 1), on request, a model moves by its cluster's share of the rows, all are slower, and
IFCA stays on a floor more often.

Step sizes, which the paper does not give: 0.045 for all that take gradient steps (the loss is the mean of r^2, so 1 / 0.045
= 22 is the largest eigenvalue of a client for which steps are stable, and about the largest there is with 10 rows and 100
features), and eta = 0.4 for FedProx: larger ones pull a client's model further towards its own rows, smaller ones have not
settled after 200 rounds where a cluster is small. eta is the paper's, whose loss is half of ours: the proximal weight is
2 / eta.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from coterie import keys
from coterie.algorithms import moment_descent as moments
from coterie.algorithms.anchors import Anchors
from coterie.algorithms.fedavg import fedavg
from coterie.algorithms.ifca import ifca
from coterie.algorithms.moments import Estimator
from coterie.algorithms.one_shot import one_shot
from coterie.algorithms.starts import Start
from coterie.engines.in_process import InProcess
from coterie.errors import ConfigError
from coterie.local import Training
from coterie.models import linear_regression
from coterie.protocol import Lockstep, Save
from coterie.studies.common import at_least, one_of, seen
from coterie.studies.data.synthetic import Planted, normal_models
from coterie.studies.mixed_problem import Problem, worst_errors

__all__ = [
    "ESTIMATORS", "FEDAVG", "FEDPROX", "METHODS", "ORACLE", "ORACLE_FEDPROX", "PAPER", "PRESETS", "Methods", "compare",
]  # fmt: skip

ESTIMATORS = get_args(Estimator)
FEDAVG, FEDPROX = "moment-descent-fedavg", "moment-descent-fedprox"
ORACLE, ORACLE_FEDPROX = "oracle", "oracle-fedprox"
METHODS = (FEDAVG, FEDPROX, "ifca-random", "ifca-spread", "one-shot", "fedavg", ORACLE, ORACLE_FEDPROX)
_SETTLED = 1e-8  # relative change of a model in a round: there is nothing to see after that

Program = Callable[[Any], Lockstep]


@dataclass(frozen=True)
class Methods:
    """What is run, and how.

    Attributes
    ----------
    methods : tuple of str
        Of `METHODS`. Oracles are run in any case: errors are compared with theirs.
    rounds : int
        Of Phase 2 and of every baseline.
    local_steps : tuple of int
        s of FedAvg in Phase 2, one run of ours and an oracle for each. Baselines take 5 if it is among them, else the first.
    step_size, eta : float
        Of FedAvg's steps, and the paper's of FedProx.
    average_over : {"cluster", "everyone"}
        Of Phase 2, and so of IFCA and the oracle; see `ifca`.
    iterations : int
        Of Phase 1.
    anchors : int or None
        How many; None is the paper's ceil(3 K log K).
    estimator, step, descent_step, swaps, further : str, str, float, bool, bool
        Of Phase 1: see `Descent` and `Anchors`.
    subspace : {"range", "orthogonal", "svd"}
        See `Descent`; "svd" takes as many columns as there are features and so is exact, as in the paper's experiments.
    known_delta : bool
        Whether Phase 1 is told the least distance between planted models.
    noise_on_anchors : float
        Remark 2: standard deviation of what is added to the anchors' models that clients are sent.
    curves : bool
        Whether rows have the error by round.
    """

    methods: tuple[str, ...] = METHODS
    rounds: int = 200
    local_steps: tuple[int, ...] = (5,)
    step_size: float = 0.045
    eta: float = 0.4
    average_over: str = "cluster"
    iterations: int = 5
    anchors: int | None = 20
    estimator: Estimator = "pairs"
    step: Literal["curvature", "plain"] = "curvature"
    descent_step: float = 1.0
    subspace: Literal["range", "orthogonal", "svd"] = "range"
    swaps: bool = True
    further: bool = True
    known_delta: bool = False
    noise_on_anchors: float = 0.0
    curves: bool = False

    def __post_init__(self) -> None:
        one_of("--estimator", self.estimator, ESTIMATORS)
        one_of("--step", self.step, ("curvature", "plain"))
        one_of("--subspace", self.subspace, ("range", "orthogonal", "svd"))
        one_of("--average-over", self.average_over, ("cluster", "everyone"))
        for method in self.methods:
            one_of("--methods", method, METHODS)
        at_least(1, rounds=self.rounds, local_steps=min(self.local_steps, default=0), anchors=self.anchors)
        at_least(0, noise_on_anchors=self.noise_on_anchors)
        for length in (self.step_size, self.eta, self.descent_step):
            if not 0 < length < math.inf:
                raise ConfigError(f"a step size of {length} does not train", "give it above 0")

    @property
    def common_steps(self) -> int:
        """Local steps of the baselines and their oracle."""
        return 5 if 5 in self.local_steps else self.local_steps[0]

    def descent(self, truth: Tensor) -> moments.Descent:
        """Phase 1, of whose planted models [K, D] it is told the number, and the distance if that is known."""
        k, d = truth.shape
        columns: dict[str, Any] = {"subspace": self.subspace, "at_once": False}  # messages are not counted here
        if self.subspace == "svd":
            columns = {"subspace": "range", "oversampling": d, "exchanges": 2}
        number = self.anchors or max(1, math.ceil(3 * k * math.log(k)))
        return moments.Descent(
            iterations=self.iterations, estimator=self.estimator, noise=self.noise_on_anchors, step=self.step,
            step_size=self.descent_step, delta=_least_distance(truth) or 0.0 if self.known_delta else 0.0,
            anchors=Anchors(number=number, further=self.further, swaps=self.swaps), **columns,
        )  # fmt: skip

    @property
    def runs(self) -> list[tuple[str, int | None]]:
        """Method and local steps of every run, oracles last; FedProx has no steps."""
        out: list[tuple[str, int | None]] = []
        for method in (method for method in self.methods if method not in (ORACLE, ORACLE_FEDPROX)):
            steps: tuple[int | None, ...] = self.local_steps if method == FEDAVG else (self.common_steps,)
            out += [(method, s) for s in ((None,) if method == FEDPROX else steps)]
        oracles: dict[int | None, None] = dict.fromkeys(steps for _, steps in out)
        oracles |= {self.common_steps: None} if ORACLE in self.methods else {}
        oracles |= {None: None} if ORACLE_FEDPROX in self.methods else {}
        return out + [_oracle_of(steps) for steps in oracles]


def _oracle_of(steps: int | None) -> tuple[str, int | None]:
    return (ORACLE_FEDPROX if steps is None else ORACLE), steps


PAPER = "moment-descent-paper"
PRESETS = {
    "default": Methods(),
    PAPER: Methods(  # appendix C; line 13's step is alpha / (2 beta^2) = 1/2 of s, as features have unit variance
        rounds=400, average_over="everyone", anchors=None, step="plain", descent_step=0.5, subspace="svd",
        swaps=False, further=False, known_delta=True,
    ),
}  # fmt: skip


@dataclass
class _First:
    """Phase 1: its last state, the anchors' worst error after every iteration, and that after the first ones."""

    state: moments.State
    curve: list[float]
    anchor_error: float


@dataclass
class _Trace:
    """The models of a run after every round."""

    theta: list[Tensor] = field(default_factory=list)

    def see(self, save: Save) -> tuple[Save, bool]:
        """Note the models; go on as long as they are finite."""
        theta = save.state.theta
        self.theta.append(theta if theta.dim() == 2 else theta[None])
        return save, bool(theta.isfinite().all())


def compare(problem: Problem, how: Methods, seed: int) -> list[dict[str, Any]]:
    """Run every method on one planted problem: a row for each.

    Parameters
    ----------
    problem : Problem
        What is planted, given the seed.
    how : Methods
        What is run.
    seed : int
        Of the planted clients, and of everything that methods draw.

    Returns
    -------
    list of dict
        method, local_steps, seed, final_error, oracle_error, ratio, rounds_to_2x_oracle, anchor_error, n_anchors, delta,
        seconds (of all methods together), and curve if it was asked for.
    """
    begin = time.perf_counter()
    planted = problem.plant(seed)
    first = _first_phase(planted, how, seed) if {FEDAVG, FEDPROX} & set(how.methods) else None
    traces = [_Trace() for _ in how.runs]
    InProcess(planted.rows).run(list(_programs(planted, how, seed, first, traces)))
    errors = [worst_errors(torch.stack(trace.theta), planted.theta).tolist() for trace in traces]
    seconds = round(time.perf_counter() - begin, 3)
    last = {run: curve[-1] for run, curve in zip(how.runs, errors, strict=True)}
    rows = [
        _row(run, seed, curve, last[_oracle_of(run[1])], first, how)
        for run, curve in zip(how.runs, errors, strict=True)
    ]
    delta = _least_distance(planted.theta)
    return [row | {"delta": delta, "seconds": seconds} for row in rows if row["method"] in how.methods]


def _least_distance(truth: Tensor) -> float | None:
    return float(torch.pdist(truth).min()) if len(truth) > 1 else None


def _row(
    run: tuple[str, int | None], seed: int, errors: list[float], oracle: float, first: _First | None, how: Methods
) -> dict[str, Any]:
    """Say what a run has reached; rounds of Phase 1 are counted."""
    method, steps = run
    ours = first if method in (FEDAVG, FEDPROX) else None
    before = ours.curve if ours else []
    at = next((t for t, error in enumerate(errors) if error <= 2 * oracle < math.inf), None)
    row = {
        "method": method,
        "local_steps": steps,
        "seed": seed,
        "final_error": errors[-1],
        "oracle_error": oracle,
        "ratio": errors[-1] / oracle if 0 < oracle < math.inf else None,
        "rounds_to_2x_oracle": None if at is None else len(before) + at,
        "anchor_error": ours.anchor_error if ours else None,
        "n_anchors": len(ours.state.anchors) if ours else None,
    }
    rest = [errors[-1]] * (how.rounds + 1 - len(errors))  # it settled, or diverged
    return row | ({"curve": [*before, *errors, *rest]} if how.curves else {})


# -- the programs -----------------------------------------------------------------------------------------------------
def _first_phase(planted: Planted, how: Methods, seed: int) -> _First:
    states: list[moments.State] = []

    def see(save: Save) -> tuple[Save, bool]:
        states.append(save.state)
        return save, True

    model = linear_regression(planted.theta.shape[1], intercept=False)
    start = normal_models(1, model.n_parameters, keys.generator(seed, "theta 0"))[0]

    def program(state: moments.State | None) -> Lockstep:
        phase = moments.moment_descent(
            state,
            model=model,
            n_clusters=len(planted.theta),
            seed=seed,
            descent=how.descent(planted.theta),
            start=start,
            secret=f"{seed}",  # nobody else takes part in a simulation, which must be repeatable
        )
        return seen(phase, see)

    (last,) = InProcess(planted.rows).run([program]).states
    drawn = states[0].anchors  # the first iteration may be saved with them
    after = {0: _anchor_error(start.expand(len(drawn), -1), drawn, planted)}
    for state in states:  # at the same iteration, further anchors may have been added, at the start: not yet
        after.setdefault(state.descents, _anchor_error(state.local, state.anchors, planted))
    return _First(last, [after[t] for t in range(last.descents)], after[how.iterations])


def _anchor_error(local: Tensor, anchors: Tensor, planted: Planted) -> float:
    """Largest distance of an anchor's model to that of its cluster."""
    return float((local - planted.theta[planted.truth[anchors]]).norm(dim=1).max())


def _programs(
    planted: Planted, how: Methods, seed: int, first: _First | None, traces: list[_Trace]
) -> Iterator[Program]:
    """Give every run of `how` a program that notes its models."""
    truth = planted.theta  # [K, D]
    model = linear_regression(truth.shape[1], intercept=False)
    anywhere = normal_models(len(truth), truth.shape[1], keys.generator(seed, "random start"))
    common: dict[str, Any] = {"model": model, "rounds": how.rounds, "step_size": how.step_size, "seed": seed}
    common |= {"tol": _SETTLED}
    starts = {"ifca-random": Start("warm", anywhere), "ifca-spread": Start("spread"), ORACLE: Start("warm", truth)}
    starts[ORACLE_FEDPROX] = starts[ORACLE]
    prox = Training(exact=True, proximal=2 / how.eta)  # L/2 + |.|^2 / (2 eta), times two

    def make(method: str, training: Training) -> Lockstep:
        if method == "fedavg":
            return fedavg(None, training=training, **common)
        options = {"n_clusters": len(truth), "training": training, **common}
        if method == "one-shot":
            return one_shot(None, **options)
        options |= {"weighting": "rows", "average_over": how.average_over}
        if method in starts:
            return ifca(None, start=starts[method], patience=0, **options)
        assert first is not None
        return moments.mixed_regression(first.state, **options)

    def program(state: None, method: str, training: Training, trace: _Trace) -> Lockstep:
        if method in (FEDAVG, FEDPROX):
            assert first is not None
            trace.theta.append(first.state.theta)  # others save where they begin
        return seen(make(method, training), trace.see)

    for (method, steps), trace in zip(how.runs, traces, strict=True):
        training = prox if steps is None else Training(steps=steps)
        yield partial(program, method=method, training=training, trace=trace)
