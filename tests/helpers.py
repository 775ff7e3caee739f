# SPDX-License-Identifier: Apache-2.0
"""What several tests share: small federations, awkward participation, and the registry of algorithms."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from coterie import keys
from coterie.algorithms import em as plain_em
from coterie.algorithms import fedavg as fed
from coterie.algorithms import fedgmm as joint
from coterie.algorithms import fedgrem as grem
from coterie.algorithms import fedrep as rep
from coterie.algorithms import ifca as clustered
from coterie.algorithms import lg_fedavg as lg
from coterie.algorithms import linear_by_fold as linear_folds
from coterie.algorithms import linear_representation as linear
from coterie.algorithms import maml as meta
from coterie.algorithms import mixed_logistic as odds
from coterie.algorithms import mixed_model as mixed
from coterie.algorithms import moment_descent as moments
from coterie.algorithms import newton_fedprox as prox
from coterie.algorithms import newton_ifca as newton
from coterie.algorithms import noise_model as noises
from coterie.algorithms import one_shot as once
from coterie.algorithms import random_effects as effects
from coterie.algorithms import row_mixture as rows_of
from coterie.algorithms import srpfl as stages
from coterie.algorithms.anchors import Anchors
from coterie.algorithms.fine_tuning import fine_tuning
from coterie.algorithms.mixture_starts import MixtureStart
from coterie.algorithms.starts import Start
from coterie.data.ragged import Layout, Ragged
from coterie.engines.checkpoint import to_record
from coterie.engines.in_process import Finished, InProcess
from coterie.engines.worker import Answer, Worker
from coterie.local import Training
from coterie.methods.mixture.fit import PRESETS
from coterie.methods.personal.plan import algorithm_of, called
from coterie.models import Dense, Model, Network, linear_regression, softmax_regression
from coterie.models.mixtures import Custom, Family, Gaussian, Regression
from coterie.option_fields import options_in
from coterie.participation import Participants
from coterie.protocol import Algorithm, Ask, Block, Save
from coterie.registry import METHODS, Method

Program = Callable[[Any], Algorithm]
COUNTS = (5, 0, 7, 12, 7, 1, 9, 7, 4, 12)  # rows by client: unequal, some alike, one client with none and one with one


# -- federations ------------------------------------------------------------------------------------------------------
def ragged(xs: Sequence[Tensor], ys: Sequence[Tensor] | None, names: Sequence[str] | None = None) -> Ragged:
    """Store clients [n_i, ...], who may have no rows at all; names must be ascending."""
    if names is None:
        names = [f"c{i:04d}" for i in range(len(xs))]
    assert list(names) == sorted(set(names))
    layout = Layout.plan(np.array(names), np.array([len(x) for x in xs]))
    x = torch.cat([xs[i] for i in layout.order])
    return Ragged(layout, x, None if ys is None else torch.cat([ys[i] for i in layout.order]))


@dataclass(frozen=True)
class Federation:
    """Clients as plain lists, to compute with by hand."""

    xs: list[Tensor]
    ys: list[Tensor]
    names: list[str]
    folds: int = 0  # that rows are dealt to

    @property
    def rows(self) -> Ragged:
        by_name = np.argsort(np.array(self.names))
        rows = ragged([self.xs[i] for i in by_name], [self.ys[i] for i in by_name], [self.names[i] for i in by_name])
        return rows.with_folds(self.folds, seed=0) if self.folds else rows

    def plus(self, name: str, x: Tensor, y: Tensor) -> "Federation":
        return Federation([*self.xs, x], [*self.ys, y], [*self.names, name], self.folds)

    def renamed(self, names: Sequence[str]) -> "Federation":
        return Federation(self.xs, self.ys, list(names), self.folds)

    def changed(self, client: int, x: Tensor, y: Tensor) -> "Federation":
        xs, ys = list(self.xs), list(self.ys)
        xs[client], ys[client] = x, y
        return Federation(xs, ys, self.names, self.folds)


TRUTHS = torch.tensor([[1.0, -2.0, 0.5], [-1.5, 1.0, 2.0]], dtype=torch.float64)


def federation(
    counts: Sequence[int] = COUNTS, *, classes: int = 0, folds: int = 0, noise: float = 0.1, seed: int = 0
) -> Federation:
    """Two planted linear models, clients alternating; with `classes` the targets are class numbers."""
    draw = torch.Generator().manual_seed(seed)
    xs, ys = [], []
    for i, n in enumerate(counts):
        x = torch.randn(n, 3, generator=draw, dtype=torch.float64)
        y = x @ TRUTHS[i % 2] + 0.3 + noise * torch.randn(n, generator=draw, dtype=torch.float64)
        xs.append(x)
        ys.append((y.abs() * 2).long() % classes if classes else y)
    return Federation(xs, ys, [f"site-{i:03d}" for i in range(len(counts))], folds)


def one_block(rows: Ragged, ids: Sequence[int] | None = None) -> Block:
    """All clients in one block, in the order of storage."""
    (block,) = rows.blocks(None if ids is None else torch.tensor(ids), budget=1 << 40)
    return block


def batches_of(how: Training, n: int, key: Tensor, client: Tensor) -> list[list[int]]:
    """Rows of every step of one client, from its own permutations."""
    if how.batch_size is None:
        return [list(range(n))] * (how.steps if how.epochs is None else how.epochs)
    out: list[list[int]] = []
    steps = how.steps if how.epochs is None else how.epochs * -(-n // how.batch_size)
    epoch = 0
    while n and len(out) < steps:
        u = keys.uniform(keys.key(key, epoch, "batch", client), n).tolist()
        order = sorted(range(n), key=lambda i: u[i])
        out += [order[i : i + how.batch_size] for i in range(0, n, how.batch_size)]
        epoch += 1
    return out[:steps]


# -- participation ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Only:
    """Ask and hear these clients only."""

    ids: tuple[int, ...]

    def choose(
        self, round_: int, clients: Tensor, seed: int, times: Tensor | None = None, enough: int | None = None
    ) -> Participants:
        return Participants(torch.tensor(self.ids, dtype=torch.int64), torch.tensor(self.ids, dtype=torch.int64))


@dataclass(frozen=True)
class Late:
    """Ask everyone; every third client is late, another third every round, and in the rounds `silent` all are."""

    silent: tuple[int, ...] = ()
    ask_late: bool = True

    def choose(
        self, round_: int, clients: Tensor, seed: int, times: Tensor | None = None, enough: int | None = None
    ) -> Participants:
        everyone = torch.arange(len(clients))
        here = (everyone + round_) % 3 != 0
        answered = everyone[:0] if round_ in self.silent else everyone[here]
        return Participants(everyone if self.ask_late else answered, answered)


# -- runs -------------------------------------------------------------------------------------------------------------
class KilledError(Exception):
    """Stands for a killed process."""


def interrupt_after(n_rounds: int) -> Callable[[Any], None]:
    """Make a `watch` that raises when it is told of its n-th round."""
    seen = []

    def watch(done: Any) -> None:
        seen.append(done)
        if len(seen) == n_rounds:
            raise KilledError

    return watch


def spying(program: Program, states: list[Any]) -> Program:
    """Note every state that a program saves."""

    def spied(state: Any) -> Any:
        generator = program(state)
        try:
            wanted = next(generator)
            while True:
                if isinstance(wanted, Save):
                    states.append(wanted.state)
                wanted = generator.send((yield wanted))
        except StopIteration as end:
            return end.value

    return spied


def overhear(patch: pytest.MonkeyPatch) -> list[tuple[Ask, Answer]]:
    """Make a list that everything goes on that is sent to clients and comes back."""
    seen: list[tuple[Ask, Answer]] = []
    original = Worker.answer

    def answer(self: Worker, asks: Any, ids: Tensor, bounds: Any = None) -> dict[int, Answer]:
        answers = original(self, asks, ids, bounds)
        seen.extend((asks[run], answers[run]) for run in asks)
        return answers

    patch.setattr(Worker, "answer", answer)
    return seen


def run_one(program: Program, rows: Ragged, **engine: Any) -> tuple[Any, Finished, InProcess]:
    """Run a program alone: its last state, all that happened, and the engine."""
    made = InProcess(rows, **engine)
    finished = made.run([program])
    return finished.states[0], finished, made


def state_tensors(state: Any) -> dict[str, Tensor]:
    """All tensors of a state, and of one inside it."""
    return to_record(state)[0]


def assert_same_state(a: Any, b: Any, *, atol: float | None = None) -> None:
    """Same fields; tensors equal bit by bit, or within atol."""
    assert type(a) is type(b)
    assert vars(a).keys() == vars(b).keys()
    for name, left in vars(a).items():
        right = vars(b)[name]
        if is_dataclass(left):
            assert_same_state(left, right, atol=atol)
        elif not isinstance(left, Tensor):
            assert left == right, name
        elif atol is None:
            assert left.dtype == right.dtype
            assert torch.equal(left, right), name
        else:
            torch.testing.assert_close(left, right, atol=atol, rtol=atol, msg=lambda m, n=name: f"{n}: {m}")


# -- the registry -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """An algorithm with options, for the contract suite.

    Attributes
    ----------
    name : str
        Of the test.
    program : callable
        seed -> program.
    state_type : type
        Of its state.
    classes : int
        Classes of the target, 0 for a real-valued one.
    folds : int
        Folds that rows are dealt to, 0 for none.
    minibatch : bool
        Whether clients draw rows, so that the seed and the clients' names matter beyond the start.
    lots : bool
        Whether clients draw lots by their names for what only some are asked, so that seed and names matter.
    weight : {"clients", "rows", "pairs", "none", "own"}
        How clients count: alike, by their rows, by pairs of their rows, not at all because nothing is averaged, or in no
        such way because everybody has a start of its own.
    draws_clients : bool
        Whether the server draws clients, or for clients, by number, so that a further client changes the draw.
    numbers : tuple of str
        Fields of the state that are clients' numbers.
    by_client : tuple of str
        Fields of the state with a row for every client.
    model : str
        Field of the state that is trained.
    descends : bool
        Whether it begins with moment descent, which counts `descents` in place of rounds.
    rounding : float
        How much more than others it makes of rounding: regressions at clients with fewer rows than parameters are singular
        but for a trace of ridge.
    """

    name: str
    program: Callable[[int], Program]
    state_type: type
    classes: int = 0
    folds: int = 0
    minibatch: bool = False
    lots: bool = False
    weight: str = "clients"
    draws_clients: bool = False
    numbers: tuple[str, ...] = ()
    by_client: tuple[str, ...] = ()
    model: str = "theta"
    descends: bool = False
    rounding: float = 1.0


LINE = linear_regression(3)
NET = Dense((3, 4, 1), "squared")  # float64, so that tolerances can be tight
MODULE = Network(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(), "squared")
SOFTMAX = softmax_regression(3, 3, l2=0.01)


def warm(model: Dense, n_clusters: int = 2) -> Start:
    return Start("warm", theta=model.initial(n_clusters, torch.Generator().manual_seed(3)))


def ifca_case(name: str, model: Dense = LINE, *, start: Start | None = None, **options: Any) -> Case:
    about = {key: options.pop(key) for key in ("classes", "minibatch", "weight", "draws_clients") if key in options}
    options = {"n_clusters": 2, "rounds": 4, "step_size": 0.05, **options}
    options["start"] = start or warm(model, options["n_clusters"])

    def program(seed: int) -> Program:
        return lambda state: clustered.ifca(state, model=model, seed=seed, **options)

    return Case(name, program, clustered.State, **about)


def fedavg_case(name: str, model: Dense = LINE, **options: Any) -> Case:
    about = {key: options.pop(key) for key in ("classes", "minibatch", "weight") if key in options}
    options = {"rounds": 4, "step_size": 0.05, **options}

    def program(seed: int) -> Program:
        return lambda state: fed.fedavg(state, model=model, seed=seed, **options)

    return Case(name, program, fed.State, **about)


def averaging_case(name: str, run: Callable[..., Algorithm], model: Model, **options: Any) -> Case:
    """FedRep and LG-FedAvg, whose clients keep a part, and MAML."""
    about = {key: options.pop(key) for key in ("classes", "minibatch", "weight") if key in options}
    options = {"rounds": 4, **options}

    def program(seed: int) -> Program:
        return lambda state: run(state, model=model, seed=seed, **options)

    return Case(name, program, fed.State, **about)


def tuning_case(name: str, model: Dense, **options: Any) -> Case:
    about = {key: options.pop(key) for key in ("classes", "minibatch") if key in options}
    theta = model.initial(1, torch.Generator().manual_seed(3))[0]

    def program(seed: int) -> Program:
        return lambda state: fine_tuning(state, model=model, theta=theta, step_size=0.05, seed=seed, **options)

    return Case(name, program, fed.LocalState, weight="none", **about)


def local_case(name: str, model: Dense, **options: Any) -> Case:
    about = {key: options.pop(key) for key in ("classes", "minibatch") if key in options}
    options = {"rounds": 4, "step_size": 0.05, **options}

    def program(seed: int) -> Program:
        return lambda state: fed.local_models(state, model=model, seed=seed, **options)

    return Case(name, program, fed.LocalState, weight="none", **about)


def descent_case(name: str, *, n_clusters: int | None = 2, draws_clients: bool = False, **options: Any) -> Case:
    """Moment descent; with `rounds`, both phases."""
    how = {"iterations": 2, "anchors": Anchors(number=4, min_rows=5), "max_clusters": 3, **options.pop("descent", {})}
    both = "rounds" in options
    options = {"n_clusters": n_clusters, "descent": moments.Descent(**how), **options}

    def program(seed: int) -> Program:
        run = moments.mixed_regression if both else moments.moment_descent
        return lambda state: run(state, model=LINE, seed=seed, secret=f"{seed}", **options)

    return Case(
        name, program, moments.State, lots=True, weight="pairs", draws_clients=draws_clients, numbers=("anchors",),
        descends=True,
    )  # fmt: skip


def one_shot_case(name: str, model: Dense = LINE, **options: Any) -> Case:
    """k-means draws its seeds among clients by number."""
    options = {"n_clusters": 2, "rounds": 4, "step_size": 0.05, "weighting": "clients", **options}

    def program(seed: int) -> Program:
        return lambda state: once.one_shot(state, model=model, seed=seed, **options)

    return Case(name, program, once.State, draws_clients=True)


def linear_case(name: str, **options: Any) -> Case:
    about = {key: options.pop(key) for key in ("minibatch", "weight") if key in options}
    options = {"n_features": 3, "rank": 2, "rounds": 4, "step_size": 0.05, **options}

    def program(seed: int) -> Program:
        return lambda state: linear.linear_representation(state, seed=seed, **options)

    return Case(name, program, linear.State, **about)


SINGULAR = 1e4  # see Case.rounding
LAPLACE = Custom(lambda x, y, theta: -(x - theta).abs().sum(), 3, lambda x, u: x + u, steps=2)
MIXTURE: dict[str, Any] = {"n_components": 2, "rounds": 4, "start": MixtureStart(restarts=2, iterations=4)}


def fedgrem_case(name: str, family: Family, **options: Any) -> Case:
    def program(seed: int) -> Program:
        return lambda state: grem.fedgrem(state, family=family, seed=seed, **MIXTURE, **options)

    return Case(
        name, program, grem.State, lots=True, weight="own", by_client=("tilde", "n", "away"), model="centre",
        rounding=SINGULAR if isinstance(family, Regression) else 1.0,
    )  # fmt: skip


def em_case(name: str, family: Family, **options: Any) -> Case:
    def program(seed: int) -> Program:
        return lambda state: plain_em.em(state, family=family, seed=seed, **MIXTURE, **options)

    trained = (
        "weights" if options["sharing"] in ("local", "tgmm") else "theta"
    )  # where components stay with the clients
    rounding = SINGULAR if isinstance(family, Regression) else 1.0
    return Case(name, program, plain_em.State, lots=True, weight="own", model=trained, rounding=rounding)


def fedgmm_case(name: str, family: Family) -> Case:
    def program(seed: int) -> Program:
        return lambda state: joint.fedgmm(state, family=family, seed=seed, **MIXTURE)

    if isinstance(family, Regression):
        return Case(name, program, joint.State, lots=True, weight="own", rounding=SINGULAR)
    return Case(name, program, plain_em.State, lots=True, weight="own")


FOLDS = 2


def folded_case(
    name: str, run: Callable[..., Algorithm], state: type, *, classes: int = 0, start: Any = None, **options: Any
) -> Case:
    """Linear models in two fits at once: without the first fold, and on all rows."""
    about = {key: options.pop(key) for key in ("draws_clients", "model") if key in options}
    problem = linear_folds.Problem(3, classes, FOLDS, (0, FOLDS))
    seeded = options.pop("seeded", False)
    options |= {} if start is None else {"start": start(problem)}

    def program(seed: int) -> Program:
        drawn = {"seed": seed} if seeded else {}
        return lambda state: run(state, problem=problem, **options, **drawn)

    return Case(name, program, state, classes=classes, folds=FOLDS, weight="own", **about)


def prior_of_two(problem: linear_folds.Problem) -> effects.Prior:
    root = 0.3 * torch.eye(4, dtype=torch.float64).expand(2, 2, 4, 4)
    return effects.Prior(torch.zeros(2, 2, 4).double(), root, torch.ones(2, 2, dtype=torch.float64))


def two_models(problem: linear_folds.Problem) -> newton.Clusters:
    none = newton.nobody_yet(problem, 1)
    return replace(none, theta=torch.randn(2, 1, 2, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64))


def mixed_case(name: str, state: type, size: int = 2, **how: Any) -> Case:
    """Random effects of the intercept, and of the first features."""
    basis = torch.eye(4, dtype=torch.float64)[[3, 0, 1][:size]]
    how |= {"basis": basis, "units": torch.eye(size, dtype=torch.float64), "order": (0, 1, 2), "rounds": 12}
    algorithm = mixed.mixed_model if state is mixed.State else odds.mixed_logistic
    classes = 0 if state is mixed.State else 2
    # Whoever takes part, variances are found to more digits than deviances tell.
    return Case(name, lambda seed: partial(algorithm, **how), state, classes=classes, weight="own", rounding=1e4)


KINDS: dict[str, Any] = {"kinds": ("diagonal", "full"), "rounds": 4, "tag": "x", "model": "root"}
FLAT: dict[str, Any] = {"base": torch.zeros(2, 4).double(), "spread": torch.ones(2).double(), "sizes": (2, 3)}

FAR = Start("warm", theta=torch.cat([warm(LINE).theta, torch.full((1, 4), 1e3, dtype=torch.float64)]))  # type: ignore[list-item]
STEPS = Training(steps=3)
EXACT = Training(exact=True, proximal=0.5)
BATCHES = Training(epochs=2, batch_size=3, momentum=0.5)

CASES: list[Case] = [
    ifca_case("ifca-model", training=STEPS),
    ifca_case("ifca-model-by-rows", training=STEPS, weighting="rows", decay=0.9, weight="rows"),
    ifca_case("ifca-gradient", averaging="gradient"),
    ifca_case("ifca-soft", soft=True, training=STEPS),
    ifca_case("ifca-soft-gradient", soft=True, averaging="gradient"),
    ifca_case("ifca-shared-layers", NET, shared_layers=("0",), training=STEPS),
    ifca_case("ifca-minibatch", training=BATCHES, minibatch=True),
    ifca_case("ifca-minibatch-gradient", averaging="gradient", training=Training(batch_size=3), minibatch=True),
    ifca_case("ifca-classes", SOFTMAX, training=STEPS, classes=3),
    ifca_case("ifca-spread", start=Start("spread", candidates=3), training=STEPS, draws_clients=True),
    ifca_case("ifca-reseeding", start=FAR, n_clusters=3, patience=2, rounds=5, training=STEPS, draws_clients=True),
    ifca_case("ifca-resample", resample=4, training=STEPS, minibatch=True),
    ifca_case("ifca-resample-gradient", resample=2, averaging="gradient", soft=True, minibatch=True),
    ifca_case("ifca-exact", training=EXACT),
    ifca_case("ifca-over-everyone", average_over="everyone", training=STEPS),
    ifca_case("ifca-exact-over-everyone", average_over="everyone", weighting="rows", training=EXACT, weight="rows"),
    ifca_case("ifca-clip", training=STEPS, robust="clip"),
    ifca_case("ifca-median", training=STEPS, robust="median"),
    ifca_case("ifca-soft-trimmed", soft=True, training=STEPS, robust="trimmed"),
    fedavg_case("fedavg-clip", training=STEPS, weight="rows", robust="clip"),
    fedavg_case("fedavg-trimmed", training=STEPS, weight="rows", robust="trimmed"),
    fedavg_case("fedavg", training=STEPS, weight="rows"),
    fedavg_case("fedavg-by-clients", NET, training=STEPS, weighting="clients"),
    fedavg_case("fedavg-minibatch", SOFTMAX, training=BATCHES, minibatch=True, weight="rows", classes=3),
    fedavg_case("fedprox", NET, training=Training(steps=3, proximal=0.5), weight="rows"),
    fedavg_case("fedprox-exact", training=EXACT, weight="rows"),
    Case("pooled-ridge", lambda _: lambda state: fed.pooled_ridge(state, model=LINE, l2=0.1), fed.State, weight="rows"),
    local_case("local-closed-form", LINE),
    local_case("local-sgd", NET, training=STEPS),
    local_case("local-minibatch", SOFTMAX, training=BATCHES, minibatch=True, classes=3),
    averaging_case("fedrep", rep.fedrep, NET, head=STEPS, body=STEPS, step_size=0.05),
    averaging_case(
        "fedrep-minibatch",
        rep.fedrep,
        NET,
        head=BATCHES,
        body=BATCHES,
        step_size=0.05,
        weighting="rows",
        minibatch=True,
    ),
    averaging_case(
        "fedrep-module",
        rep.fedrep,
        MODULE,
        personal=("2",),
        head=STEPS,
        body=STEPS,
        step_size=0.05,
        weighting="rows",
        weight="rows",
    ),
    averaging_case("lg-fedavg", lg.lg_fedavg, NET, personal=("0",), training=STEPS, step_size=0.05),
    averaging_case(
        "lg-fedavg-alternating",
        lg.lg_fedavg,
        MODULE,
        personal=("0",),
        training=STEPS,
        alternating=STEPS,
        step_size=0.05,
    ),
    averaging_case("maml", meta.maml, NET, alpha=0.05, beta=0.05, training=STEPS),
    averaging_case(
        "maml-minibatch",
        meta.maml,
        SOFTMAX,
        alpha=0.1,
        beta=0.05,
        weighting="rows",
        classes=3,
        minibatch=True,
        training=Training(epochs=2, batch_size=3),
    ),
    averaging_case("maml-first-order", meta.maml, NET, alpha=0.05, beta=0.05, hessian="first-order", training=STEPS),
    tuning_case("fine-tuning", NET, training=STEPS),
    tuning_case("fine-tuning-minibatch", SOFTMAX, training=BATCHES, minibatch=True, classes=3),
    descent_case("moment-descent-pairs"),
    descent_case("moment-descent-halves", descent={"estimator": "halves"}),
    descent_case("moment-descent-two", descent={"estimator": "two", "step": "plain", "step_size": 0.5}),
    descent_case("moment-descent-orthogonal", descent={"subspace": "orthogonal", "exchanges": 2}),
    descent_case("moment-descent-noise", descent={"noise": 0.1}),
    descent_case("moment-descent-unknown", n_clusters=None),
    descent_case("mixed-regression", rounds=2, step_size=0.05, training=STEPS),
    descent_case("mixed-regression-exact", rounds=2, step_size=0.05, training=EXACT),
    one_shot_case("one-shot", training=STEPS),
    one_shot_case("one-shot-network", NET, training=STEPS, fit=STEPS),
    fedgrem_case("fedgrem", Gaussian(3)),
    fedgrem_case("fedgrem-full", Gaussian(3, "full"), c_lambda=0.5, share_weights=30.0),
    fedgrem_case("fedgrem-minibatch", Gaussian(3), batch_size=3),
    fedgrem_case("fedgrem-sparse", Gaussian(3, "diagonal"), sparse=2.0),
    fedgrem_case("fedgrem-neighbours", Gaussian(3, "diagonal"), neighbours=2, reject=3.0),
    fedgrem_case("fedgrem-exact", Gaussian(3), **PRESETS["fedgrem-exact"]),
    fedgrem_case("fedgrem-own-family", LAPLACE, c_lambda=0.5),
    fedgrem_case("fedgrem-regression", Regression(3, intercept=True, variance="estimated"), reject=3.0),
    em_case("local-em", Gaussian(3, "full"), sharing="local"),
    em_case("local-grem", Gaussian(3), sharing="local", gradient=True),
    em_case("pooled-em", Gaussian(3, "full"), sharing="pooled"),
    em_case("pooled-grem", Regression(3), sharing="pooled", gradient=True),
    em_case("pooled-components", Regression(3), sharing="components"),
    em_case("fedem", Regression(3), sharing="fedem"),
    em_case("tgmm", Gaussian(3), sharing="tgmm"),
    em_case("tgmm-mutual", Gaussian(3), sharing="mutual"),
    fedgmm_case("fedgmm", Regression(3)),
    fedgmm_case("fedgmm-rows", Gaussian(3)),
    linear_case("linear-representation"),
    linear_case("linear-representation-by-rows", start="random", weighting="rows", weight="rows"),
    linear_case("linear-representation-minibatch", batch_size=3, minibatch=True),
    mixed_case("mixed-model", mixed.State),
    mixed_case("mixed-model-diagonal", mixed.State, diagonal=True, reml=False),
    mixed_case("mixed-logistic", odds.LaplaceState, size=1),
    folded_case("random-effects", effects.random_effects, effects.State, start=prior_of_two, **KINDS),
    folded_case(
        "random-effects-classes", effects.random_effects, effects.State, classes=2, start=prior_of_two, **KINDS
    ),
    folded_case(
        "newton-ifca", newton.newton_ifca, newton.State, start=two_models, n_clusters=2, penalties=(0.01,), rounds=5
    ),
    folded_case(
        "newton-ifca-growing",
        newton.newton_ifca,
        newton.State,
        start=lambda p: newton.nobody_yet(p, 1),
        n_clusters=2,
        penalties=(0.01,),
        rounds=5,
        starts=2,
        seeded=True,
        draws_clients=True,
    ),
    folded_case(
        "newton-ifca-classes",
        newton.newton_ifca,
        newton.State,
        classes=2,
        start=two_models,
        n_clusters=2,
        penalties=(0.01,),
        rounds=5,
    ),
    folded_case(
        "newton-fedprox",
        prox.newton_fedprox,
        prox.State,
        classes=2,
        start=lambda p: newton.nobody_yet(p, 1).theta,
        strengths=(1.0, 0.1),
    ),
    folded_case("row-mixture", rows_of.row_mixture, rows_of.State, rounds=6, starts=2, seeded=True, **FLAT),
    folded_case("noise-model", noises.noise_model, noises.State, rounds=3, model="width", **FLAT),
]


def staged(case: Case) -> Case:
    """The same with 2 clients, then 4, 8 and 10. Lots decide who is fast, so that a further client changes who is."""

    def program(seed: int) -> Program:
        return partial(stages.srpfl, case.program(seed), n0=2, n_clients=10, stages=stages.Fixed(1))

    return replace(
        case, name=f"srpfl-{case.name}", program=program, state_type=stages.State[case.state_type],  # type: ignore[name-defined]
        model=f"inner/{case.model}", weight="own", draws_clients=True, numbers=(), by_client=(),
    )  # fmt: skip


def registered_case(method: Method) -> Case:
    """A method with personal models as it is registered, with its options' defaults."""
    arguments: dict[str, Any] = {option.name: option.default for option in options_in(method.options).values()}
    arguments |= {"model": NET, "rounds": 4, "training": STEPS, "body": STEPS, "head": STEPS, "weighting": "clients"}
    arguments |= dict.fromkeys(("step_size", "alpha", "beta"), 0.05) | {"personal": ("1",)}

    def program(seed: int) -> Program:
        return called(algorithm_of(method.name)[0], arguments | {"seed": seed})

    return Case(method.name, program, fed.State)


_KNOWN = {case.name for case in CASES}
CASES += [registered_case(one) for one in METHODS.values() if one.family == "personal" and one.name not in _KNOWN]
_STAGED = {"fedavg-minibatch", "ifca-model", "ifca-spread", "fedgrem", "fedrep"}
CASES += [staged(case) for case in CASES if case.name in _STAGED]
