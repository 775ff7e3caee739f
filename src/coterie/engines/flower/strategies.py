# SPDX-License-Identifier: Apache-2.0
"""All methods as one Flower strategy, that drops into any ServerApp."""

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from logging import INFO
from pathlib import Path
from typing import Any, NoReturn

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import nn

import coterie.engines.flower.catalogue  # noqa: F401  registers all steps
from coterie import selection
from coterie.config import FitOptions, options
from coterie.data.clients import Clients
from coterie.data.remote import RemoteRows
from coterie.engines.flower.connect import connect
from coterie.engines.flower.messages import Introduction
from coterie.engines.flower.registry import register_value
from coterie.engines.flower.wire import from_text, to_text
from coterie.errors import ConfigError, RunError
from coterie.files import replace_file
from coterie.methods.base import Fitted
from coterie.methods.fit import fit
from coterie.methods.linear.structures import Effort
from coterie.methods.session import Watch
from coterie.outcome_names import OutcomeName
from coterie.registry import method_of
from coterie.runs.auto import advised, settled_run
from coterie.runs.comparison import Compared, answers_of, check_free, compare_run, holding_place
from coterie.runs.fit import fit_run
from coterie.runs.holding import RUN_NAME, holding
from coterie.selection.result import Comparison
from coterie.selection.run import FEW, NEW_CLIENTS

__all__ = ["CoterieStrategy", "compare"]


class CoterieStrategy(Strategy):
    """Fit by one of coterie's methods, over nodes whose ClientApp was given to `coterie.flower.register`.

    Parameters
    ----------
    method : str
        As `coterie fit --method`.
    module : mapping, optional
        The user's own network: one entry, its name (the nodes register the same) and the module.
    **settings
        All other options, by group, as in a configuration file: ``clusters={"n_clusters": 4}``, ``training={"rounds": 20}``.

    Attributes
    ----------
    options : FitOptions
        What is fitted, and how.
    fitted_ : Fitted
        All that came of it: models, labels, scores, rounds.
    more_ : dict
        What only a demo can know.

    Examples
    --------
    >>> strategy = CoterieStrategy("ifca", clusters={"n_clusters": 3}, training={"rounds": 10})
    >>> result = strategy.start(grid, nodes=4)  # doctest: +SKIP
    """

    def __init__(self, method: str = "ifca", *, module: Mapping[str, nn.Module] | None = None, **settings: Any) -> None:
        self.options: FitOptions = options({"method": method, **settings})
        self.modules = dict(module or {})
        if len(self.modules) > 1:
            raise ConfigError(f"{len(self.modules)} modules are given, but only one can be fitted", "give one module")
        self.fitted_: Fitted | None = None
        self.more_: dict[str, Any] = {}

    def summary(self) -> None:
        """Say what is going to be done."""
        chosen = self.options
        log(INFO, "\t├──> method: %s, seed %s", chosen.method, chosen.seed)
        log(INFO, "\t└──> rounds: %s", getattr(chosen, _group(chosen)).rounds)

    def start(  # type: ignore[override]  # models begin as the method says, so there are no initial arrays
        self,
        grid: Grid,
        *,
        num_rounds: int | None = None,
        timeout: float = 600.0,
        nodes: int = 1,
        folder: Path | None = None,
        command: str = "coterie.flower.CoterieStrategy",
        every: float = 2.0,
        watch: Watch | None = None,
        begun: Callable[[list[str]], None] = lambda left_out: None,
        told: Callable[[str], None] = lambda asked: None,
    ) -> Result:
        """Fit, and hand over models in the manner of Flower: ``"0/..."``, ``"1/..."`` are those of the clusters.

        Parameters
        ----------
        grid : Grid
            What leads to the nodes.
        num_rounds : int, optional
            In place of what the options say.
        timeout : float
            Seconds that a round waits for answers.
        nodes : int
            How many nodes to wait for before beginning.
        folder : Path, optional
            A run folder, as `coterie fit` writes; a run that was interrupted is continued from it.
        command : str
            What the run folder says was asked for.
        every : float
            Seconds between checkpoints.
        watch : callable, optional
            Told of every round: (phase, what happened, rounds of the phase).
        begun : callable
            Told that the run has begun, and what is not used of the data.
        told : callable
            Given what is asked, whenever the nodes are asked.
        """
        with nullcontext() if folder is None else holding(folder):
            chosen = self.options if num_rounds is None else _with_rounds(self.options, num_rounds)
            how: dict[str, Any] = {"nodes": nodes, "timeout": timeout, "told": told}
            return self._fit(grid, chosen, folder, command, every, watch, begun, how)

    def _fit(
        self, grid: Grid, chosen: FitOptions, folder: Path | None, command: str, every: float, watch: Watch | None,
        begun: Callable[[list[str]], None], how: dict[str, Any],
    ) -> Result:  # fmt: skip
        """Meet the nodes, and fit; see `start`."""
        begun_with = _begun_with(folder)
        name = begun_with.run
        how["waits"] = partial(_keep_name, folder, name, folder)
        clients = _clients(grid, chosen, begun_with, modules=self.modules, **how)
        module = next(iter(self.modules.values()), None)
        if folder is None:
            if chosen.method == "auto":
                found = selection.compare(
                    clients, hidden=chosen.model.hidden, seed=chosen.seed, secure=chosen.secure, watch=watch
                )
                chosen = advised(found.document()).into(chosen)
            self.fitted_ = fit(clients, chosen, watch=watch, module=module)
            return _result(self.fitted_)

        def note() -> None:
            _keep(folder, name, clients)

        def noted(left_out: list[str]) -> None:
            note()
            begun(left_out)

        if chosen.method == "auto":
            chosen = settled_run(folder, chosen, clients, command, watch=watch, begun=note)
        self.fitted_, self.more_ = fit_run(
            folder, chosen, clients, command, every=every, watch=watch, begun=noted, module=module
        )
        return _result(self.fitted_)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Refuse: see `start`."""
        _refuse()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Refuse: see `start`."""
        _refuse()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Refuse: see `start`."""
        _refuse()

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Refuse: see `start`."""
        _refuse()


def compare(
    grid: Grid,
    *,
    folder: Path | None = None,
    nodes: int = 1,
    timeout: float = 600.0,
    hidden: Sequence[int] = (),
    quick: bool = False,
    effort: Effort | None = None,
    seed: int = 0,
    secure: bool = False,
    test_size: float = 0.2,
    new_clients: float | None = None,
    outcome: OutcomeName | None = None,
    event: str | None = None,
    command: str = "coterie.flower.compare",
    watch: Watch | None = None,
    told: Callable[[str], None] = lambda asked: None,
    **read: Any,
) -> Compared | Comparison:
    """Find how the clients of a federation differ, as `coterie.compare` does where all rows are at hand.

    Parameters
    ----------
    grid : Grid
        What leads to the nodes.
    folder : Path, optional
        Where to write what was found, as `coterie compare` does; one that was interrupted is continued.
    nodes, timeout
        How many nodes to wait for before beginning, and seconds that a message waits for answers.
    hidden, quick, effort, seed, secure
        As for `coterie.compare`.
    test_size, new_clients
        Shares of rows and of clients that are held out; a fifth of the clients by default if there are at least ten.
    outcome, event
        As for `coterie.read`; nodes read their rows so, as the run's options say.
    command : str
        What the folder says was asked for.
    watch, told
        As for `CoterieStrategy.start`.
    **read
        What else the run's options tell nodes of how rows are read (`exclude`, `task`, `split` and so on): it is written
        down here, and the next command says it.

    Returns
    -------
    Comparison, or Compared with a folder
        What was found, and how it was written.
    """
    chosen = options(
        {
            "seed": seed, "secure": secure, "model": {"hidden": list(hidden)},
            "data": {
                "test_size": test_size, "new_clients": NEW_CLIENTS if new_clients is None else new_clients,
                "outcome": outcome, "event": event, **read,
            },
        }
    )  # fmt: skip
    asked: dict[str, Any] = {"nodes": nodes, "timeout": timeout, "told": told}
    how: dict[str, Any] = {"quick": quick, "effort": effort, "watch": watch}
    with nullcontext() if folder is None else holding_place(folder):
        return _compared(grid, chosen, folder, new_clients, command, asked, how)


def _compared(
    grid: Grid, chosen: FitOptions, folder: Path | None, new_clients: float | None, command: str, asked: dict[str, Any],
    how: dict[str, Any],
) -> Compared | Comparison:  # fmt: skip
    """Meet the nodes, and compare; see `compare`."""
    kept = None
    if folder is not None:
        check_free(folder)
        kept = answers_of(folder)
        kept.mkdir(parents=True, exist_ok=True)
    few, begun_with = FEW if new_clients is None else 0, _begun_with(kept)
    asked["waits"] = partial(_keep_name, kept, begun_with.run, folder)
    clients = _clients(grid, chosen, begun_with, few=few, **asked)
    if kept is not None:
        _keep(kept, begun_with.run, clients)
    if folder is None:
        return selection.compare(clients, hidden=chosen.model.hidden, seed=chosen.seed, secure=chosen.secure, **how)
    share = chosen.data.new_clients if clients.newcomers is not None else 0.0
    named = chosen.data.model_copy(update={"new_clients": share})
    return compare_run(folder, clients, chosen, command, named=named, on_flower=True, **how)


def _refuse() -> NoReturn:
    raise ConfigError(
        "coterie's strategies send their own messages, which Flower's wrappers (such as differential privacy) do not change",
        "call start of the strategy itself",
    )


@register_value
@dataclass(frozen=True)
class _Begun:
    """The run's name at the nodes, and who they are: the same when it is continued."""

    run: str
    nodes: tuple[Introduction, ...] = ()


def _begun_with(folder: Path | None) -> _Begun:
    kept = None if folder is None else folder / RUN_NAME
    if kept is None or not kept.exists():
        return _Begun(uuid.uuid4().hex)
    text = kept.read_text(encoding="utf-8").strip()
    if text.isalnum():  # earlier versions kept the run's identity only
        return _Begun(text)
    found = from_text(text)
    if not isinstance(found, _Begun):
        raise RunError(f"{kept} does not say who takes part in the run", "start a new run with another --out")
    return found


def _keep_name(kept: Path | None, run: str, folder: Path | None) -> str:
    """Keep the name of a run that nodes' owners have to approve, before it begins.  -> how to repeat it under this name"""
    if kept is None:
        return "run it again, with a folder: its name is kept there"
    if not (kept / RUN_NAME).exists():
        kept.mkdir(parents=True, exist_ok=True)
        replace_file(kept / RUN_NAME, to_text(_Begun(run)).encode())
    return f"repeat the command with --out {folder}"


def _keep(folder: Path, run: str, clients: Clients) -> None:
    assert isinstance(clients.train, RemoteRows)
    nodes = tuple(node.said for node in clients.train.federation.link.nodes.values())
    replace_file(folder / RUN_NAME, to_text(_Begun(run, nodes)).encode())


def _clients(grid: Grid, chosen: FitOptions, begun: _Begun, **how: Any) -> Clients:
    data = chosen.data
    how |= {"test_size": data.test_size, "new_clients": data.new_clients, "seed": chosen.seed}
    clients = connect(grid, run=begun.run, known=begun.nodes, **how)
    if data.outcome not in (None, clients.schema.outcome):
        raise RunError(
            f"the outcome is {data.outcome}, and nodes read the target as {clients.schema.outcome or clients.schema.task}",
            "nodes that load clients themselves give them the outcome: coterie.from_arrays(..., outcome=...)",
        )
    return clients


def _group(chosen: FitOptions) -> str:
    """The options that count a method's rounds."""
    return method_of(chosen.method).rounds or "training"


def _with_rounds(chosen: FitOptions, rounds: int) -> FitOptions:
    group = _group(chosen)
    return options({**chosen.model_dump(), group: {**getattr(chosen, group).model_dump(), "rounds": rounds}})


def _result(fitted: Fitted) -> Result:
    told = [done for done in fitted.rounds if isinstance(done.info.get("loss"), float)]
    metrics = {
        i + 1: MetricRecord({"loss": done.info["loss"], "clients": done.participants}) for i, done in enumerate(told)
    }
    return Result(ArrayRecord(fitted.models.arrays()), metrics)
