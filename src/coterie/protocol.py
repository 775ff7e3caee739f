# SPDX-License-Identifier: Apache-2.0
"""The contract between algorithms and engines: read this first.

An algorithm is a generator. It yields an `Ask` (which client function, what is sent, to whom, what may come back) and is
sent `Replies`; it yields a `Save` once a round. An engine drives the generator and routes each ask to workers, which hold
clients' rows and private state. Several asks that do not wait for each other go out in one message: an algorithm yields a
tuple of them, and is sent a tuple of replies (`together` makes such tuples of whole algorithms).

A client function answers for many clients and several runs at once::

    def step(shared, each, private, data):      # tensors in: [S, ...], [S, C, ...], [S, C, ...]
        return reply, private                   # tensors out: [S, C, ...]

The run axis S comes first (1 for a single run; restarts and step sizes that advance in lockstep make it longer), then
the client axis C. What is not a tensor in `shared` (the model, a count of steps) is passed as it is. Of the reply only the
fields named in `Ask.fold` leave the worker, each as a sum over clients or, where the paper needs it, stacked. A field that
is the same for all runs may have a run axis of one. A reply that is a product over a client's rows, x^T g, may stay
unformed (`RowProduct`): the sum over clients is then one product over all rows.
"""

import itertools
import math
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from coterie.errors import RunError

__all__ = [
    "WITHIN",
    "Algorithm",
    "Ask",
    "Block",
    "ByCluster",
    "ClusterSums",
    "Fold",
    "Individual",
    "Limit",
    "Lockstep",
    "Lowest",
    "Mean",
    "Noise",
    "Replies",
    "RowProduct",
    "Save",
    "Stack",
    "Step",
    "Sum",
    "Tensors",
    "WeightedMean",
    "answers",
    "from_sums",
    "not_declared",
    "one_run_at_a_time",
    "reveals",
    "run_of",
    "slot",
    "together",
]

Tensors = dict[str, Tensor]
_AnyStep = TypeVar("_AnyStep", bound=Callable[..., Any])
_Made = TypeVar("_Made")

_AT_ONCE = 1024  # rows whose products of columns are formed at once: so they stay in the cache
_FEW = 32  # rows times clusters: up to here, multiplying zeros costs less than forming every client's value


@dataclass(frozen=True)
class Block:
    """Rows of C clients, padded with zeros to the longest.

    Attributes
    ----------
    ids : Tensor
        [C] number of each client in the federation.
    keys : Tensor
        [C] identity of each client for randomness: the same name has the same key everywhere.
    x, y : Tensor
        [C, N, ...] features, and targets (None when there are none).
    n : Tensor
        [C] real rows of each client.
    mask : Tensor or None
        [C, N] true where a row is real; None when every row is.
    fold : Tensor or None
        [C, N] number of each row's fold, where rows are dealt to folds.
    weight : Tensor or None
        [C, N] how many rows each counts as, where users say so: see `mass`.
    kept : dict
        What `once` has made.
    """

    ids: Tensor
    keys: Tensor
    x: Tensor
    y: Tensor | None
    n: Tensor
    mask: Tensor | None
    fold: Tensor | None = None
    weight: Tensor | None = None
    kept: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def once(self, name: Hashable, make: Callable[[], _Made]) -> _Made:
        """Make what follows from the rows alone, once: a worker with few rows hands out the same block every round."""
        if name not in self.kept:
            self.kept[name] = make()
        made: _Made = self.kept[name]
        return made

    @property
    def target(self) -> Tensor:
        """The targets, where an algorithm cannot do without."""
        assert self.y is not None
        return self.y

    @cached_property
    def real(self) -> Tensor:
        """[C, N] the mask, also where every row is real."""
        return torch.ones(self.x.shape[:2], dtype=torch.bool) if self.mask is None else self.mask

    @cached_property
    def folds(self) -> Tensor:
        """[C, N] the number of each row's fold: 0 where rows are not dealt to folds."""
        return torch.zeros(self.x.shape[:2], dtype=torch.int64) if self.fold is None else self.fold

    @cached_property
    def mass(self) -> Tensor:
        """[C, N] how many rows each counts as in sums over rows: 1, or its weight, and 0 on padding."""
        real = self.real.to(self.x.dtype)
        return real if self.weight is None else real * self.weight.to(self.x.dtype)

    @cached_property
    def weights(self) -> Tensor:
        """[C, N] 1/n on real rows and 0 on padding, so that a weighted sum over rows is a client's mean."""
        each = 1.0 / self.n.clamp(min=1).to(self.x.dtype)[:, None]
        return each.expand(self.x.shape[:2]) if self.mask is None else self.mask * each

    def clients(self, part: slice | Tensor) -> "Block":
        """Take some of the clients: a slice of them is a view."""
        mask = None if self.mask is None else self.mask[part]
        y, fold, weight = (None if value is None else value[part] for value in (self.y, self.fold, self.weight))
        return Block(self.ids[part], self.keys[part], self.x[part], y, self.n[part], mask, fold, weight)

    def rows(self, keep: Tensor) -> "Block":
        """Take some of the rows, [C, N]."""
        keep = keep & self.real
        n = keep.sum(1)
        order = (~keep).to(torch.int8).argsort(dim=1, stable=True)[:, : int(n.max())]
        mask = torch.arange(order.shape[1]) < n[:, None]
        x, y, fold, weight = (
            None if value is None else value[torch.arange(len(n))[:, None], order]
            for value in (self.x, self.y, self.fold, self.weight)
        )
        assert x is not None
        for value in (x, y):
            if value is not None:
                value[~mask] = 0
        return Block(self.ids, self.keys, x, y, n, mask, fold, weight)


@dataclass(frozen=True)
class RowProduct:
    """A client's reply as a product over its rows, x^T g, not formed: see the folds.

    Attributes
    ----------
    x : Tensor
        [C, N, P], zero where a row is padding.
    g : Tensor
        [S, C, N, ...]
    pairs : bool
        Whether the products of x's columns stand in their place, P = Q (Q + 1) / 2 in the order of `triu_indices`: they
        are formed of some rows at a time, and never kept.
    """

    x: Tensor
    g: Tensor
    pairs: bool = False

    def formed(self) -> Tensor:
        """Every client's own value.  [S, C, P, ...]"""
        runs, clients, rows, *rest = self.g.shape
        width = math.prod(rest)
        g = self.g.reshape(runs, clients, rows, width).permute(1, 2, 0, 3).reshape(clients, rows, runs * width)
        x = self.x.transpose(1, 2)
        x = _pairs(x, x.new_empty(clients, self._width, rows)) if self.pairs else x
        made = torch.bmm(x, g).view(clients, self._width, runs, width)
        return made.permute(2, 0, 1, 3).reshape(runs, clients, self._width, *rest)

    def total(self) -> Tensor:
        """The sum over clients, in one product over all rows.  [S, P, ...]"""
        runs, clients, rows, *rest = self.g.shape
        width = math.prod(rest)
        g = self.g.reshape(runs, clients, rows, width).permute(0, 3, 1, 2)  # who lays g so saves a copy
        g, x = g.reshape(runs * width, -1), self.x.flatten(0, 1)
        made = _times_pairs(g, x) if self.pairs else g @ x  # this way round a thin g takes a third of the time
        return made.view(runs, width, self._width).transpose(1, 2).reshape(runs, self._width, *rest)

    def times(self, weight: Tensor) -> "RowProduct":
        """Every client's value times its weight.  weight [S, C]"""
        return replace(self, g=self.g * weight.to(self.g.dtype).view(*weight.shape, *(1,) * (self.g.dim() - 2)))

    def expand(self, runs: int) -> "RowProduct":
        """Repeat one run's value for several."""
        return replace(self, g=self.g.expand(runs, *self.g.shape[1:]))

    @property
    def bytes_per_run(self) -> int:
        """What all clients' own values would take."""
        return self.x.shape[0] * self._width * math.prod(self.g.shape[3:]) * self.g.element_size()

    @property
    def _width(self) -> int:
        """P."""
        size = self.x.shape[2]
        return size * (size + 1) // 2 if self.pairs else size


def _pairs(columns: Tensor, out: Tensor) -> Tensor:
    """Products of columns.  [..., Q, N] -> [..., Q (Q + 1) / 2, N]"""
    size = columns.shape[-2]
    for q, part in enumerate(torch.split(out, list(range(size, 0, -1)), -2)):
        torch.mul(columns[..., q:, :], columns[..., q : q + 1, :], out=part)
    return out


def _times_pairs(g: Tensor, x: Tensor) -> Tensor:
    """Of [K, N] and the products of columns of [N, Q].  -> [K, Q (Q + 1) / 2]"""
    columns, size = x.T.contiguous(), x.shape[1]
    total = g.new_zeros(len(g), size * (size + 1) // 2)
    room = g.new_empty(total.shape[1], _AT_ONCE)
    for some, weight in zip(torch.split(columns, _AT_ONCE, 1), torch.split(g, _AT_ONCE, 1), strict=True):
        total.addmm_(weight, _pairs(some, room[:, : some.shape[1]]).T)
    return total


class Step(Protocol):
    """A client function: module-level, importable, batched over runs and clients."""

    __name__: str
    __module__: str

    def __call__(
        self, shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /
    ) -> tuple[dict[str, Any], Tensors]: ...


class Fold(Protocol):
    """How one field of the reply leaves a worker."""

    individual: ClassVar[bool]  # whether values of single clients leave, and not only sums over clients

    @property
    def needs(self) -> tuple[str, ...]:
        """Further fields of the reply that the fold reads."""

    def part(self, value: Tensor, reply: Tensors) -> Tensors:
        """Reduce a block's replies [S, C, ...] to what travels."""

    def merge(self, a: Tensors, b: Tensors) -> Tensors:
        """Combine the parts of two blocks or two workers."""

    def finish(self, part: Tensors) -> Any:
        """Make of one run's merged part (no run axis any more) what the algorithm sees."""


class _Additive:
    """A fold whose parts are sums: it may be streamed, tree-reduced, securely aggregated."""

    individual: ClassVar[bool] = False

    def merge(self, a: Tensors, b: Tensors) -> Tensors:
        return {name: a[name] + b[name] for name in a}


@dataclass(frozen=True)
class Sum(_Additive):
    """Sum over clients."""

    needs: tuple[str, ...] = ()

    def part(self, value: "Tensor | RowProduct", reply: Tensors) -> Tensors:
        """Sum the block."""
        return {"sum": value.total() if isinstance(value, RowProduct) else value.sum(1)}

    def finish(self, part: Tensors) -> Tensor:
        """Hand over the sum."""
        return part["sum"]


@dataclass(frozen=True)
class Mean(_Additive):
    """Plain mean over the clients that answered."""

    needs: tuple[str, ...] = ()

    def part(self, value: Tensor, reply: Tensors) -> Tensors:
        """Sum and count."""
        return {"sum": value.sum(1), "count": torch.full(value.shape[:1], float(value.shape[1]), dtype=torch.float64)}

    def finish(self, part: Tensors) -> Tensor:
        """Divide; with nobody, zero."""
        return part["sum"] / part["count"].clamp(min=1).to(part["sum"].dtype)


@dataclass(frozen=True)
class WeightedMean(_Additive):
    """Mean over clients, weighted by another field of the reply."""

    by: str

    @property
    def needs(self) -> tuple[str, ...]:
        """The weights."""
        return (self.by,)

    def part(self, value: "Tensor | RowProduct", reply: Tensors) -> Tensors:
        """Weighted sum and sum of weights."""
        w = reply[self.by]  # [S, C]
        if isinstance(value, RowProduct):
            return {"sum": value.times(w).total(), "weight": w.sum(1, dtype=torch.float64)}
        total = torch.einsum("sc,sc...->s...", w.to(value.dtype), value)
        return {"sum": total, "weight": w.sum(1, dtype=torch.float64)}

    def finish(self, part: Tensors) -> Tensor:
        """Divide; with no weight at all, zero."""
        weight = part["weight"]
        return part["sum"] / torch.where(weight > 0, weight, 1.0).to(part["sum"].dtype)


@dataclass(frozen=True)
class ClusterSums:
    """What `ByCluster` hands to the algorithm."""

    sum: Tensor  # [K, ...]
    weight: Tensor  # [K] total share of each cluster

    def mean_or(self, otherwise: Tensor) -> Tensor:
        """The mean of each cluster; a cluster that nobody chose keeps `otherwise`.  [K, ...]"""
        shape = (-1,) + (1,) * (self.sum.dim() - 1)
        weight = self.weight.to(self.sum.dtype).view(shape)
        return torch.where(weight > 0, self.sum / torch.where(weight > 0, weight, 1.0), otherwise)


@dataclass(frozen=True)
class ByCluster(_Additive):
    """Sums per cluster, each client counted with its share [S, C, K] (one-hot for hard labels).

    The value is one per client [S, C, ...], or one per client and cluster [S, C, K, ...] with `per_cluster`.
    """

    share: str
    per_cluster: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        """The shares."""
        return (self.share,)

    def part(self, value: "Tensor | RowProduct", reply: Tensors) -> Tensors:
        """Share-weighted sums, and the sums of the shares."""
        share = reply[self.share]
        if isinstance(value, RowProduct):
            if not self.per_cluster and value.x.shape[1] * share.shape[2] <= _FEW:
                every = share.view(*share.shape[:2], *(1,) * (value.g.dim() - 2), share.shape[2])
                spread = RowProduct(value.x, value.g[..., None] * every.to(value.g.dtype))
                total = spread.total().movedim(-1, 1)  # [S, K, P, ...]: who is not in a cluster counts with zeros
                if bool(total.isfinite().all()):
                    return {"sum": total, "weight": share.sum(1, dtype=torch.float64)}
            value = value.formed()
        flat = value.reshape(*value.shape[: 2 + self.per_cluster], -1)
        w = share.to(value.dtype)
        if self.per_cluster:
            total = torch.einsum("sck,sckp->skp", w, flat)
        else:
            total = w.transpose(1, 2) @ flat  # [S, K, P]: one product, each reply read once
        diverged = ~total.isfinite().flatten(1).all(1)  # [S]
        for s, k in itertools.product(diverged.nonzero()[:, 0].tolist(), range(w.shape[2])):
            there = w[s, :, k] > 0  # 0 times infinity is not 0: who diverged spoils its own clusters only
            total[s, k] = w[s, there, k] @ (flat[s, there, k] if self.per_cluster else flat[s, there])
        shape = (*total.shape[:2], *value.shape[2 + self.per_cluster :])
        return {"sum": total.reshape(shape), "weight": share.sum(1, dtype=torch.float64)}

    def finish(self, part: Tensors) -> ClusterSums:
        """Hand over sums and shares."""
        return ClusterSums(part["sum"], part["weight"])


class Individual:
    """A fold whose parts are every client's own values, with the client axis second, in the order of `Replies.ids`."""

    individual: ClassVar[bool] = True

    def merge(self, a: Tensors, b: Tensors) -> Tensors:
        """Append."""
        return {name: torch.cat([a[name], b[name]], 1) for name in a}


@dataclass(frozen=True)
class Stack(Individual):
    """Every client's own value, in the order of `Replies.ids`: only where the paper needs individual replies."""

    needs: tuple[str, ...] = ()

    def part(self, value: Tensor, reply: Tensors) -> Tensors:
        """Keep everything."""
        return {"stack": value}

    def finish(self, part: Tensors) -> Tensor:
        """Hand over [C, ...]."""
        return part["stack"]


NOBODY = torch.finfo(torch.float64).max  # the score of who is not in the running: finite, since it is sent


@dataclass(frozen=True)
class Lowest:
    """The values of the n clients with the lowest scores, the lowest first: no other value goes beyond its worker.

    Attributes
    ----------
    by : str
        Field of the reply with the scores [S, C]; who has `NOBODY` is left out, so that there may be fewer than n.
    tie : str
        Field [S, C] that decides between equal scores, such as the clients' keys.
    n : int
        How many.
    """

    individual: ClassVar[bool] = True
    by: str
    tie: str
    n: int

    @property
    def needs(self) -> tuple[str, ...]:
        """Scores and ties."""
        return (self.by, self.tie)

    def part(self, value: Tensor, reply: Tensors) -> Tensors:
        """Keep the block's n best; who is lacking is nobody."""
        score, tie = reply[self.by].to(torch.float64), reply[self.tie]  # [S, C]
        lacking = max(0, self.n - score.shape[1])
        score = torch.cat([score, score.new_full((len(score), lacking), NOBODY)], 1)
        tie = torch.cat([tie, tie.new_zeros(len(tie), lacking)], 1)
        value = torch.cat([value, value.new_zeros(len(value), lacking, *value.shape[2:])], 1)
        return self._best({"score": score, "tie": tie, "value": value})

    def merge(self, a: Tensors, b: Tensors) -> Tensors:
        """Keep the best of both."""
        return self._best({name: torch.cat([a[name], b[name]], 1) for name in a})

    def finish(self, part: Tensors) -> Tensor:
        """Hand over [at most n, ...]."""
        return part["value"][part["score"] < NOBODY]

    def _best(self, part: Tensors) -> Tensors:
        order = part["tie"].argsort(dim=1, stable=True)
        order = order.gather(1, part["score"].gather(1, order).argsort(dim=1, stable=True))[:, : self.n]
        runs = torch.arange(len(order))[:, None]
        return {name: value[runs, order] for name, value in part.items()}


@dataclass(frozen=True)
class Limit:
    """What one client's value of a field may be beside others': long ones are shortened, or the client is left out.

    Engines learn the usual length, which two thirds of all clients' values do not exceed, in the same round, from counts of
    clients by length.

    Attributes
    ----------
    clip, out : float
        Times the usual length: what is longer than the first is shortened to it; who is beyond the second is left out.
    floor : float
        Up to this length nothing is touched, whatever others' is.
    per_row : bool
        Whether the length is taken for each of the client's rows: of sums over rows.
    kind : {"any", "positive", "definite"}
        Who has a negative value (on the diagonal, for matrices) is left out.
    finite : bool
        Whether who has a value that is not finite is left out.
    """

    clip: float = math.inf
    out: float = math.inf
    floor: float = 0.0
    per_row: bool = False
    kind: Literal["any", "positive", "definite"] = "any"
    finite: bool = True


WITHIN = "within"  # a field of answers with noise: how many clients' first field was not shortened, less the others


@dataclass(frozen=True)
class Noise:
    """How an answer is made differentially private for clients: each client's part is bounded, and the sum has noise.

    A field, or a share by which clients are weighed, has a bound of its own; noise is normal, with the standard deviation
    `multiplier` times the bound over the root of the field's weight. As weights add up to 1, all fields together cost what
    one sum with noise of `multiplier` bounds does.

    Attributes
    ----------
    multiplier : float
        Of the answer.
    bounds : mapping
        Field -> Euclidean length to which a client's value is shortened; of shares, 1. What is not finite counts as zero.
    weights : mapping
        Field -> its part of the cost.
    sampling : float
        With what probability each client is asked, by lots that nobody knows; 1: all are.
    purpose : str
        What is asked for, in words for a person.
    """

    multiplier: float
    bounds: Mapping[str, float]
    weights: Mapping[str, float]
    sampling: float = 1.0
    purpose: str = ""

    def deviation(self, name: str) -> float:
        """Standard deviation of the noise of a field's sum."""
        return self.multiplier * self.bounds[name] / math.sqrt(self.weights[name])


EVERYBODY = 1 << 62  # enough answers are those of all whom the participation policy chooses, in any stage


@dataclass(frozen=True)
class Ask:
    """A question to clients.

    Attributes
    ----------
    step : Step
        The client function.
    shared : mapping
        What every asked client is sent: tensors (a run axis is added by the worker) and plain values.
    fold : mapping
        Field of the reply -> how it leaves the worker. Other fields do not leave.
    each : mapping
        Tensors with one row for each client in `to`.
    to : Tensor, optional
        Client numbers, ascending. None: whoever the participation policy chooses.
    fresh : mapping
        Private state of a client that was never asked before.
    work : float
        Local work, in gradient steps, for clocks.
    scratch : int
        Numbers that the step holds for every row and run besides the row itself, so that workers can size their blocks.
    enough : int, optional
        How many answers will do: the engine goes on with the fastest, of those whom the participation policy chooses. Whom
        `to` names is waited for. None leaves it to what is around the algorithm, such as stages; `EVERYBODY` does not.
    limits : mapping
        Field -> what its values may be; numbers are finite in any case, and weights not negative: `engines/screening.py`.
    epsilon : float, optional
        What the answer costs each client of its privacy, by the noise in it (differential privacy); None: there is no noise.
    noise : Noise, optional
        How workers bound what a client adds, and the noise that they add.
    """

    step: Step
    shared: Mapping[str, Any]
    fold: Mapping[str, Fold]
    each: Mapping[str, Tensor] = field(default_factory=dict)
    to: Tensor | None = None
    fresh: Mapping[str, Tensor] = field(default_factory=dict)
    work: float = 1.0
    scratch: int = 1
    enough: int | None = None
    limits: Mapping[str, Limit] = field(default_factory=dict)
    epsilon: float | None = None
    noise: Noise | None = None


@dataclass(frozen=True)
class Save:
    """The state after a round, all that is needed to go on, and what a person would like to see of the round.

    What was asked beside the algorithm is told as `traffic` (messages, bytes_up, bytes_down), and counts for the whole run.
    """

    state: Any
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Replies:
    """What came back: `replies["field"]` is the finished fold.

    Attributes
    ----------
    ids : Tensor
        Clients that answered; the order of stacked fields.
    missing : Tensor
        Clients that were asked and were late or failed, or whose answer was left out.
    elapsed : float
        Seconds that it took, by the engine's clock; 0 without one.
    bytes_up, bytes_down : int
        What the answers took, and what was sent, as a federation would send it.
    left_out : mapping
        Client -> why its answer does not count.
    """

    values: Mapping[str, Any]
    ids: Tensor
    missing: Tensor
    elapsed: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    left_out: Mapping[int, str] = field(default_factory=dict)

    @property
    def n(self) -> int:
        """How many clients answered."""
        return len(self.ids)

    def __getitem__(self, name: str) -> Any:
        if not self.values and not self.n:
            raise RunError(
                f"no client has answered: there is no '{name}' to go on with", "see the warnings for why nodes did not"
            )
        return self.values[name]


Algorithm = Generator[Ask | Save, Replies | None, Any]
Lockstep = Generator[Ask | tuple[Ask, ...] | Save, Any, Any]  # of several algorithms: it asks several things at once

_RUNS = 1 << 20  # more than there will ever be in lockstep


def slot(run: int, part: int) -> int:
    """Number of one of the asks that a run puts in one message; that of the first is the run's own."""
    return run + part * _RUNS


def run_of(slot: int) -> int:
    """Whose ask it is: clients keep private state by run."""
    return slot % _RUNS


def together(programs: Mapping[str, Lockstep], *, tell: bool = True) -> Lockstep:
    """Advance algorithms in lockstep, as one run: what they ask at the same time goes out in one message.  -> name: result

    Clients keep what all of them leave with them, so names of private state must differ where it is not the same. What
    single algorithms save is dropped; once a message it is told which of them are at work, unless `tell` is False.
    """
    members = {name: _Member(program) for name, program in programs.items()}
    while running := {name: member for name, member in members.items() if member.asks}:
        replies = iter((yield tuple(ask for member in running.values() for ask in member.asks)))
        for member in running.values():
            member.take(tuple(itertools.islice(replies, len(member.asks))))
        if tell:
            yield Save(None, {"running": list(running)})
    return {name: member.result for name, member in members.items()}


class _Member:
    """An algorithm that advances with others: what it asks now, or what came of it."""

    def __init__(self, program: Lockstep) -> None:
        self.program = program
        self.result: Any = None
        self.asks: tuple[Ask, ...] = ()
        self._next(None)

    def take(self, replies: tuple[Replies, ...]) -> None:
        """Go on with the answers."""
        self._next(replies if self._several else replies[0])

    def _next(self, answer: Any) -> None:
        try:
            wanted = self.program.send(answer)
            while isinstance(wanted, Save):
                wanted = self.program.send(None)
        except StopIteration as end:
            self.result, self.asks = end.value, ()
            return
        self._several = isinstance(wanted, tuple)
        self.asks = wanted if isinstance(wanted, tuple) else (wanted,)


Declared = Fold | type[Fold]  # a fold as it is asked, or of this kind with whatever it is given


def answers(**fields: Declared | tuple[Declared, ...]) -> Callable[[_AnyStep], _AnyStep]:
    """Say which fields of a client function's reply may leave a client, and by which folds; nothing else may be asked.

    >>> @answers(loss=WeightedMean("n"), label=Stack())
    ... def judge(shared, each, private, data): ...
    """

    def declared(step: _AnyStep) -> _AnyStep:
        step.answers = {name: how if isinstance(how, tuple) else (how,) for name, how in fields.items()}  # type: ignore[attr-defined]
        return step

    return declared


def reveals(*names: str) -> Callable[[_AnyStep], _AnyStep]:
    """Say which of the private fields that a client function keeps the server may ask for after a fit; no other."""

    def declared(step: _AnyStep) -> _AnyStep:
        step.reveals = frozenset(names)  # type: ignore[attr-defined]
        return step

    return declared


def not_declared(ask: Ask) -> str | None:
    """Why an ask wants more than its client function lets leave, in words; None if it does not."""
    name, said = ask.step.__name__, getattr(ask.step, "answers", None)
    if said is None:
        return f"'{name}' does not say what may leave a client"
    for field_, how in ask.fold.items():
        if ask.noise is not None and (field_ == WITHIN or _is_less(how, said.get(field_, ()))):
            continue
        if field_ not in said:
            return f"'{field_}' of '{name}' does not leave a client"
        if not any(how == one or (isinstance(one, type) and isinstance(how, one)) for one in said[field_]):
            allowed = " or ".join(one.__name__ if isinstance(one, type) else repr(one) for one in said[field_])
            return f"'{field_}' of '{name}' leaves a client as {allowed} and not as {how!r}"
    return None


def _is_less(how: Fold, said: Sequence[Declared]) -> bool:
    """Whether this is a sum with noise of what may leave as a mean."""
    return isinstance(how, Sum) and any(isinstance(one, Mean | WeightedMean) for one in said)


def from_sums(step: _AnyStep) -> _AnyStep:
    """Mark a client function that needs no more of rows, for linear regression, than counts, means and sums of products.

    It may also be asked of rows that stand in for others with the same sums; what is not marked is refused there.
    """
    step.from_sums = True  # type: ignore[attr-defined]
    return step


def one_run_at_a_time(step: Callable[..., tuple[Tensors, Tensors]]) -> Step:
    """Turn a client function without a run axis into one with: for functions whose runs share no arithmetic."""

    def looped(shared: dict[str, Any], each: Tensors, private: Tensors, data: Block, /) -> tuple[Tensors, Tensors]:
        runs = next(len(v) for v in [*shared.values(), *each.values(), *private.values()] if isinstance(v, Tensor))
        answers = []
        for s in range(runs):
            own = {name: v[s] if isinstance(v, Tensor) else v for name, v in shared.items()}
            answers.append(step(own, {k: v[s] for k, v in each.items()}, {k: v[s] for k, v in private.items()}, data))
        reply = {name: _stacked([a[0][name] for a in answers]) for name in answers[0][0]}
        named = {name for _, own in answers for name in own}  # what a run does not mention stays as it is
        kept = {
            name: _stacked([own[name] if name in own else private[name][s] for s, (_, own) in enumerate(answers)])
            for name in named
        }
        return reply, kept

    looped.__name__, looped.__module__, looped.__doc__ = step.__name__, step.__module__, step.__doc__
    looped.__qualname__ = step.__qualname__
    return looped


def _stacked(values: Sequence[Any]) -> Any:
    """Stack runs; one alone is not copied."""
    if isinstance(values[0], RowProduct):
        return replace(values[0], g=_stacked([value.g for value in values]))
    return values[0][None] if len(values) == 1 else torch.stack(list(values))
