# SPDX-License-Identifier: Apache-2.0
"""Networks: the same structures as for linear models, fitted fold by fold and judged by rows that a fit has not seen.

How long networks train is chosen by the same held-out rows as everything else: it is to them what a penalty is to a linear
model. Folds cannot share passes over the rows here, so that each costs a fit: three are the default, not five.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.score_sums import ERRORS, PLAIN, keep_judged
from coterie.data.ragged import Ragged
from coterie.evaluate import Measured
from coterie.methods.linear.choice import Evidence, means
from coterie.methods.linear.scores import Judged, Table, joined, judged, with_noise
from coterie.methods.linear.sources import Here, Source, finished
from coterie.methods.linear.structures import Found, Setting
from coterie.methods.linear.task import Task
from coterie.models import Model
from coterie.protocol import Replies, Tensors
from coterie.selection.networks_fit import ALONE, MOMENTUM, STEPS, TUNED, Served, Shared, Trainer
from coterie.selection.result import FitAdvice
from coterie.selection.told import NewTold, new_told

__all__ = ["FOLDS", "Networks"]

FOLDS = 3

_STRUCTURES = ("global", "clusters", "representation", "local", "shrunk")
_ROWS = 2000  # of a client that networks are trained on, at most
_LARGEST = 1e6  # mean loss of a row: more is said of no network, also when it diverged

Every = list[Sequence[Served]]  # [F] one fit for each setting: without each fold, and to all training rows


@dataclass(frozen=True)
class Networks:
    """How networks are compared.

    Attributes
    ----------
    task : Task
        Rows, folds and seed.
    model : Model
        What is trained.
    hidden : tuple of int
        Its hidden layers.
    rounds, starts, max_clusters
        After how many rounds training may end; starts and largest number of groups.
    kept : dict
        What clients would keep of how networks serve them.
    """

    task: Task
    model: Model
    hidden: tuple[int, ...]
    rounds: tuple[int, ...]
    starts: int
    max_clusters: int
    kept: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def source(self) -> Source:
        """Who answers what networks are worth to clients: their values are here."""
        return Here(self.kept, self.task.train.keys)

    @cached_property
    def trainer(self) -> Trainer:
        """How all of them are trained; not on more rows of a client than networks need."""
        rows = self.task.train.thinned(_ROWS, seed=self.task.seed).to(self.model.dtype)
        return Trainer(self.task.session, self.model, rows, self.rounds, self.starts, self.task.seed, self.task.scaling)

    @cached_property
    def sides(self) -> list[tuple[Ragged, Ragged | None]]:
        """[F] what is trained on, and what judges: every fold in turn, and test rows."""
        every, dtype = self.trainer.rows, self.model.dtype
        folds = every.fold_by_fold(self.task.problem.n_folds, seed=self.task.seed)
        return [*folds, (every, None if self.task.test is None else self.task.test.to(dtype))]

    def notes(self, chosen: str) -> tuple[str, ...]:
        """What a reader should know."""
        said = [f"Models are networks with hidden layers of {', '.join(map(str, self.hidden))}; mixtures are left out."]
        if int(self.task.train.counts.max()) > _ROWS:
            said.append(f"Networks were trained on at most {_ROWS:,} rows of a client.")
        if chosen == "shrunk":
            said.append(
                "The next command uses MAML, which trains for fine-tuning: no method fine-tunes FedAvg's model."
            )
        return tuple(said)

    def fitted(self, wanted: Sequence[str]) -> tuple[dict[str, Found], dict[str, Sequence[Served]]]:
        """Fit and judge structures; and hand over what all training rows gave, one for each setting."""
        found, final = dict[str, Found](), dict[str, Sequence[Served]]()
        common = [self.trainer.common(rows) for rows, _ in self.sides]
        found["global"], final["global"] = self._found("global", [*common], "rounds", self.rounds)
        for name in (one for one in _STRUCTURES[1:] if one in wanted):
            found[name], final[name] = self._structure(name, common, found["global"])
        return found, final

    def _structure(self, name: str, common: list[list[Shared]], plain: Found) -> tuple[Found, Sequence[Served]]:
        if name == "clusters":
            return self._clusters()
        if name == "representation":
            return self._found(name, [self.trainer.heads(*side) for side in self.sides], "rounds", self.rounds)
        if name == "local":
            return self._found(name, [self.trainer.alone(*side) for side in self.sides], "steps", ALONE)
        best = self._best(plain)
        sides = zip(common, self.sides, strict=True)
        tuned: Every = [self.trainer.tuned(fits[best], *side) for fits, side in sides]
        return self._found(name, tuned, "steps", TUNED, free=False)

    def _found(
        self, name: str, every: Every, what: str, values: Sequence[int], *, free: bool = True
    ) -> tuple[Found, Sequence[Served]]:
        settings: tuple[Setting, ...] = tuple({what: value} for value in values)
        return Found(name, settings, self._judged(self._values(every), name), (), free), every[-1]

    def _clusters(self) -> tuple[Found, Sequence[Served]]:
        """Two groups and more, until more are no better."""
        every, settings, fits, sizes = list[Judged](), list[Setting](), list[Shared](), list[tuple[int, ...]]()
        for k in range(2, max(2, min(self.max_clusters, self.task.n_clients // 2)) + 1):
            runs = [self.trainer.groups(rows, k) for rows, _ in self.sides]
            tried: tuple[Setting, ...] = tuple({"n_clusters": k, "rounds": n} for n in self.rounds)
            values = self._values([*runs])
            at = self._best(Found("clusters", tried, self._judged(values, f"{k} clusters, all rounds"), ()))
            values = {name: value if value.shape[2] == 1 else value[..., at : at + 1] for name, value in values.items()}
            fits.append(runs[-1][at])
            label = torch.stack([run[at].placed.label for run in runs], 1)  # [M, F]
            margin = self._nats(fits[-1].placed.margin, values)
            beside = {"label": label[..., None], "margin": margin[:, None, None]}
            every.append(self._judged({**values, **beside}, f"{k} clusters"))
            settings.append(tried[at])
            sizes.append(tuple(torch.bincount(label[:, -1], minlength=k).tolist()))
            if self._best(Found("clusters", tuple(settings), joined(every), ())) < len(every) - 1:
                break
        least = max(2, -(-self.task.n_clients // 30))
        eligible = tuple(min(own) >= least for own in sizes)
        found = Found("clusters", tuple(settings), joined(every), (), False, eligible, sizes=tuple(sizes))
        return found, fits

    def _nats(self, margin: Tensor, values: Tensors) -> Tensor:
        """Differences of squared errors as differences of log-likelihoods."""
        margin = margin.to(torch.float64)
        if not self.task.problem.is_regression:
            return margin
        one = self._judged(values, "margin")
        noise: Tensor = finished(with_noise(self.source, Table.of({"margin": one}, self.task.problem))).noise[0, -1, 0]
        return margin / (2 * noise)

    def _values(self, every: Every) -> Tensors:
        """How fits serve clients that they were not trained on.  [M, F, J] each"""
        sides = zip(every, self.sides, strict=True)
        measured = [[self._measured(fit, held) for fit in fits] for fits, (_, held) in sides]
        return _values(measured, self.task.problem.is_regression)

    def _judged(self, values: Tensors, tag: str) -> Judged:
        """Keep it as clients would."""
        problem = self.task.problem
        self.kept.update(keep_judged(problem, tag, values))
        return judged(_sums(values), problem, tag, ERRORS if problem.is_regression else PLAIN)

    def _measured(self, fit: Served, rows: Ragged | None) -> Measured:
        nothing = torch.zeros(self.task.n_clients, dtype=torch.float64)
        return Measured(nothing, nothing, nothing) if rows is None else fit.on(rows)

    def _best(self, found: Found) -> int:
        return int(finished(means(self.source, found, self.task)).argmax())

    def on_newcomers(self, fits: dict[str, Sequence[Served]], evidence: Evidence) -> NewTold:
        """Judge the fits with the chosen settings by new clients, who show a few labelled rows."""
        assert self.task.newcomers is not None
        support, query = (part.to(self.model.dtype) for part in self.task.newcomers)
        problem, kept, every = (
            replace(self.task.problem, n_folds=1, held=(1,)),
            dict[str, Tensor](),
            dict[str, Judged](),
        )
        for name in evidence.found:
            fit = fits[name][evidence.settings[name]]
            values = _values([[fit.on_new(support, query)]], problem.is_regression)
            kept |= keep_judged(problem, f"new {name}", values)
            got = Replies(
                {"loss": values["loss"].sum(0), "rows": values["rows"].sum(0)}, torch.arange(1), torch.arange(0)
            )
            every[name] = judged(got, problem, f"new {name}", ERRORS if problem.is_regression else PLAIN)
        noise = torch.stack([evidence.table.noise[0, -1, evidence.column(name)] for name in every])
        told: NewTold = finished(new_told(Here(kept, query.keys), self.task, every, noise))
        return told

    def label(self, name: str, setting: Setting) -> str:
        """A setting in words."""
        return {
            "global": "one model for all", "local": "one model each", "representation": "personal heads",
            "clusters": f"{setting.get('n_clusters')} clusters", "shrunk": f"fine-tuned, {setting.get('steps')} steps",
        }[name]  # fmt: skip

    def advice(self, name: str, setting: Setting) -> FitAdvice:
        """How `coterie fit` fits it: no method trains networks alone, and MAML is nearest to fine-tuning."""
        said: dict[str, Any] = {"model.hidden": list(self.hidden), "training.step_size": self.trainer.step_size}
        # Personal methods count passes in small batches; with batches of all rows, a pass is a step.
        passes = {"training.batch_size": int(self.trainer.rows.counts.max()), "personal.body_epochs": STEPS}
        if name == "shrunk":
            tune = {"personal.alpha": self.trainer.step_size, "personal.tune_steps": setting["steps"]}
            return FitAdvice("maml", said | passes | tune)
        if name == "local":
            return FitAdvice(None, {"model.hidden": list(self.hidden)})
        said |= {"training.rounds": setting["rounds"], "training.momentum": MOMENTUM}
        if name == "representation":
            return FitAdvice("fedrep", said | passes)
        if name == "clusters":
            return FitAdvice("ifca", said | {"clusters.n_clusters": setting["n_clusters"], "clusters.n_init": 5})
        return FitAdvice("fedavg", said)


def _sums(values: Tensors) -> Replies:
    """What clients would tell of it."""
    return Replies({name: values[name].sum(0) for name in ("loss", "rows")}, torch.arange(1), torch.arange(0))


def _values(measured: list[list[Measured]], regression: bool) -> Tensors:
    """What clients would keep of F fits with J settings, as linear models' clients do: sums over rows.  [M, F, J] each"""
    rows = torch.stack([fits[0].rows for fits in measured], 1)[..., None].to(torch.float64)  # [M, F, 1]

    def summed(name: str) -> Tensor:
        each = torch.stack([torch.stack([getattr(one, name) for one in fits], 1) for fits in measured], 1)
        return each.to(torch.float64).nan_to_num(nan=_LARGEST).clamp(max=_LARGEST) * rows

    right = summed("metric")
    return {"loss": 0.5 * right if regression else summed("loss"), "metric": right, "rows": rows}
