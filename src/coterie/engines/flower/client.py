# SPDX-License-Identifier: Apache-2.0
"""The node's side: answer the server's questions for the node's clients, with the worker that every engine has."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from coterie.data.clients import Clients
from coterie.data.ragged import Ragged
from coterie.data.remote import seen_by
from coterie.data.schema import Schema
from coterie.engines.flower import registry
from coterie.engines.flower.approvals import Asking, WaitsError, check_approved
from coterie.engines.flower.divisions import seen
from coterie.engines.flower.identity import Identity, hide_names
from coterie.engines.flower.incoming import check_batch, check_hello, check_room
from coterie.engines.flower.log_lines import lines_of
from coterie.engines.flower.messages import PROTOCOL, Answers, Batch, Hello, Introduction, Question, Refusal, Reply
from coterie.engines.flower.policy import charge, check_asks, check_method, check_rows
from coterie.engines.flower.policy_file import Policy, SecureSums
from coterie.engines.flower.question_log import Entry, write
from coterie.engines.flower.secure_node import check_keys, exchanged, masked, question_of, threshold_of
from coterie.engines.flower.state import Private, PrivateFiles, run_word, same
from coterie.engines.flower.wire import fingerprint, from_records, to_records
from coterie.engines.secure import arrays_of, shaped
from coterie.engines.worker import Worker
from coterie.errors import ConfigError, CoterieError, RunError
from coterie.protocol import Tensors

__all__ = ["Asker", "NodeData", "answer", "answered", "refuse_mods"]

_LOADED = 16  # nodes' rows that a process keeps: in a simulation one process stands for several nodes
_WORKERS = 64  # sets of rows, scaled and split, that a process keeps ready
_BYTES = 1 << 30  # of either, beside what was asked for last: a node's process lives long
_MASKING = {"LocalDpMod", "adaptiveclipping_mod", "fixedclipping_mod", "secagg_mod", "secaggplus_mod"}

_loaded: OrderedDict[str, Clients] = OrderedDict()
_workers: OrderedDict[str, Worker] = OrderedDict()


@dataclass(frozen=True)
class Asker:
    """Who asks: Flower's number of the run, and what the run says of itself: the submitter's key, and its method."""

    flower: int = 0
    submitter: str = ""
    method: str = ""


@dataclass(frozen=True)
class NodeData:
    """What a node has.

    Attributes
    ----------
    name : str
        Of the node: no other has it, and it is the same after a restart.
    load : callable
        Gives all rows of the node's clients. It is given None, or the schema of the federation: the columns with the levels
        and classes of all nodes together.
    folder : Path
        Where private state is kept. It must survive a restart.
    modules : mapping
        Networks of one's own by the names that the server has for them.
    opaque : bool
        Whether clients' names are hidden from the server.
    secret : bytes
        What names are hidden with: a secret of the federation's nodes. By default the node's own.
    version : str
        What else decides which rows `load` gives: with another one a process reads them anew.
    policy : Policy
        What the server may ask.
    asker : Asker
        Who asks.
    """

    name: str
    load: Callable[[Schema | None], Clients]
    folder: Path
    modules: Mapping[str, Callable[[], nn.Module]] = field(default_factory=dict)
    opaque: bool = False
    version: str = ""
    secret: bytes = field(default=b"", repr=False)
    policy: Policy = field(default_factory=Policy)
    asker: Asker = field(default_factory=Asker)


def answer(message: Message, holding: NodeData) -> Message:
    """Answer a message of the server."""
    return Message(answered(message.content, holding, message.metadata.dst_node_id), reply_to=message)


def answered(records: RecordDict, holding: NodeData, address: int = 0) -> RecordDict:
    """Answer what a message to this address holds; what cannot be answered is refused with a reason."""
    for name, make in holding.modules.items():
        if name not in registry.named_names():
            registry.register_named(name, make())
    asked: Hello | Batch | None = None
    reply: Introduction | Reply | Refusal
    try:
        asked = _checked(from_records(records))
        reply = _replied(asked, holding, address)
    except CoterieError as error:
        reply = Refusal(holding.name, error.message, error.hint, isinstance(error, WaitsError))
    except Exception as error:  # Flower tells the server, and the log the owner
        _note(asked, Refusal(holding.name, f"it failed: {type(error).__name__}: {error}"), RecordDict(), holding)
        raise
    for worker in _workers.values():
        worker.private = {}  # from one message to the next it is in files only
    told = to_records(reply)
    try:
        _note(asked, reply, told, holding)
    except OSError as error:  # what is not in the log does not leave
        why = f"this node cannot write its log: {error.strerror}"
        return to_records(Refusal(holding.name, why, "its owner must make room, or see to the permissions"))
    return told


def _checked(asked: object) -> Hello | Batch:
    """A request that is within bounds."""
    if isinstance(asked, Hello):
        _check_protocol(asked)
        check_hello(asked)
    elif isinstance(asked, Batch):
        check_batch(asked)
    else:
        raise RunError(f"a {type(asked).__name__} is not a request", "use the same version of coterie everywhere")
    return asked


def _replied(asked: Hello | Batch, holding: NodeData, address: int) -> Introduction | Reply:
    if isinstance(asked, Batch):
        exchanges = asked.secure is not None and asked.secure.step != "mask"
        return _exchanged(asked, holding) if exchanges else _reply(asked, holding)
    _admit(asked.run, holding)
    return Identity.of(holding.folder).introduced(_introduce(holding), asked, address)


def _admit(run: str, holding: NodeData) -> None:
    """Refuse a run that is of another method than the node's owner allows, or waits for approval."""
    check_method(holding.asker.method, holding.policy)
    if holding.policy.run.approval:
        check_approved(holding.folder, Asking(run_word(run), **vars(holding.asker)))


def _note(
    asked: Hello | Batch | None, reply: Introduction | Reply | Refusal, told: RecordDict, holding: NodeData
) -> None:
    """Write to the node's log what was asked, and what became of it."""
    who = Entry(**vars(holding.asker))
    write(holding.folder, lines_of(asked, reply, told, who), holding.policy.log.megabytes)


def refuse_mods(app: ClientApp) -> None:
    """Refuse an app with secure aggregation or differential privacy: they would leave our messages as they are, silently."""
    for mod in getattr(app, "_mods", []):
        name = getattr(mod, "__name__", type(mod).__name__)
        if name in _MASKING:
            raise ConfigError(
                f"the app has Flower's '{name}', which does not mask coterie's messages",
                "remove it from this app, and run with --secure: see docs/secure-sums.md",
            )


# -- who are you? -----------------------------------------------------------------------------------------------------
def _check_protocol(asked: Hello) -> None:
    if asked.protocol != PROTOCOL:
        raise RunError(
            f"the server speaks protocol {asked.protocol} and this node {PROTOCOL}",
            "install the same version of coterie",
        )


def _introduce(holding: NodeData) -> Introduction:
    clients, _ = _data(holding, None)
    rows = clients.train
    counts = {"train": rows.counts}
    for part, there in (("test", clients.test), ("newcomers", clients.newcomers)):
        if there is not None:
            counts[part] = _counts_of(there.names, there.counts, rows.names, part)
    return Introduction(
        holding.name, {name: version(name) for name in ("coterie", "torch")}, tuple(registry.steps()),
        clients.schema.model_dump_json(), tuple(rows.names.tolist()), counts, _empty_row(clients), clients.fingerprint(),
    )  # fmt: skip


def _counts_of(names: np.ndarray, counts: Tensor, known: np.ndarray, part: str) -> Tensor:
    if not np.array_equal(names, known):
        raise RunError(
            f"the {part} rows and the training rows belong to different clients",
            "hold rows out on the server: --test-size",
        )
    return counts


def _empty_row(clients: Clients) -> Tensors:
    """Shape and precision of rows: tensors without any."""
    block = next(iter(clients.train.blocks(torch.arange(min(1, clients.train.n_clients)))), None)
    if block is None:
        raise RunError("this node has no clients", "give it rows, or leave it out of the federation")
    row = {"x": block.x[0, :0].clone()}
    return row if block.y is None else {**row, "y": block.y[0, :0].clone()}


def _data(holding: NodeData, schema: str | None) -> tuple[Clients, str]:
    """The node's rows, and what tells them from others; read once by a process."""
    least = holding.policy.clients.rows
    key = f"{holding.folder}/{holding.name} {holding.version} {holding.opaque} {least} {schema or ''}"
    if key not in _loaded:
        theirs = None if schema is None else Schema.model_validate_json(schema)
        own = None if theirs is None else _data(holding, None)[0].schema
        if theirs is not None and own is not None and not _may_be_read_as(own, theirs):
            raise RunError(
                "the server names other columns than this node has introduced itself with",
                "only levels and classes of other nodes can be added",
            )
        clients = holding.load(theirs)
        if theirs is not None and clients.schema != theirs:
            raise RunError(
                "this node's columns, levels or classes differ from those of the federation",
                "give all nodes the same columns and classes",
            )
        if least > 1:
            clients = _without_small(clients, least)
        if holding.opaque:
            clients = hide_names(clients, holding.secret or Identity.of(holding.folder).key("names"))
        _loaded[key] = clients
    _loaded.move_to_end(key)
    sizes = {known: sum(map(_memory, (c.train, c.test, c.newcomers))) for known, c in _loaded.items()}
    for old in _too_many(sizes, _LOADED):
        del _loaded[old]
    return _loaded[key], key


def _without_small(clients: Clients, least: int) -> Clients:
    """Leave out clients with fewer rows than the policy wants: nobody hears of them."""
    large = np.flatnonzero(clients.train.layout.counts >= least)
    names = clients.train.names[large]
    parts = {"train": clients.train, "test": clients.test, "newcomers": clients.newcomers}
    kept = {
        part: None if rows is None else rows.only(np.flatnonzero(np.isin(rows.names, names)))
        for part, rows in parts.items()
    }
    if not len(large):
        raise RunError(
            f"no client of this node has {least} rows, which its policy wants", "see clients.rows in docs/policy.md"
        )
    return replace(clients, **kept)  # type: ignore[arg-type]


def _may_be_read_as(own: Schema, theirs: Schema) -> bool:
    """Whether a schema is the node's own, but for levels and classes that other nodes have besides."""
    plain = [
        one.model_copy(
            update={"classes": (), "columns": tuple(c.model_copy(update={"levels": ()}) for c in one.columns)}
        )
        for one in (own, theirs)
    ]
    both = [(own.classes, theirs.classes)]
    both += [(a.levels, b.levels) for a, b in zip(own.columns, theirs.columns, strict=False)]
    return plain[0] == plain[1] and all(set(a) <= set(b) for a, b in both)


def _too_many(sizes: Mapping[str, int], most: int) -> list[str]:
    """Which of the things that are kept, oldest first, have to go; never the last."""
    left, bytes_left = len(sizes), sum(sizes.values())
    old = []
    for name, size in sizes.items():
        if left == 1 or (left <= most and bytes_left <= _BYTES):
            break
        old.append(name)
        left, bytes_left = left - 1, bytes_left - size
    return old


def _memory(rows: Ragged | None) -> int:
    """Bytes that rows take; those on disk take none."""
    stored = () if rows is None else (rows.x, rows.y)
    return sum(values.nbytes for values in stored if isinstance(values, Tensor))


# -- questions --------------------------------------------------------------------------------------------------------
def _reply(asked: Batch, holding: NodeData) -> Reply:
    """Answer one question after the other; what clients keep may be passed on from one to the next."""
    secure, arrays = asked.secure, dict[str, Any]()
    _refuse(asked, holding)
    for question in asked.questions:
        _files(holding, question.run).tidy(question.state)
    share = 1.0 if secure is None else 1.0 / threshold_of(secure, *_keys(holding, secure.run))
    answers, left = list[Answers](), list[Private]()
    for question in asked.questions:
        files = _files(holding, question.run)
        private, lost = files.load(question.state)
        if question.after is not None:
            private = _beside(private, left[question.after])
        answer, kept, adds = _answer(question, holding, private, secure=secure is not None, share=share)
        arrays |= {f"{len(answers)}:{name}": value for name, value in adds.items()}
        if answer.kept:
            files.keep(question.state, kept)
        answers.append(replace(answer, lost=lost))
        left.append(kept)
    if secure is None:
        return Reply(holding.name, tuple(answers))
    word = question_of(asked.questions)
    return Reply(holding.name, tuple(answers), masked(secure, word, arrays, *_keys(holding, secure.run)))


def _beside(kept: Private, left: Private) -> Private:
    """What clients keep of these rows, and what a question on others has left with them."""
    return {run: {**kept.get(run, {}), **left.get(run, {})} for run in {**kept, **left}}


def _exchanged(asked: Batch, holding: NodeData) -> Reply:
    """Do what a secure sum needs beside answers."""
    assert asked.secure is not None
    _admit(asked.secure.run, holding)
    _files(holding, asked.secure.run).begin()
    return Reply(holding.name, (), exchanged(asked.secure, *_keys(holding, asked.secure.run)))


def _keys(holding: NodeData, run: str) -> tuple[str, Path, Identity, SecureSums]:
    """Where a node has the keys of a run's secure sums, and what these must be."""
    return holding.name, _files(holding, run).folder, Identity.of(holding.folder), holding.policy.secure


def _refuse(asked: Batch, holding: NodeData) -> None:
    """Refuse a message with a question that the node's policy does not allow, before anything is done."""
    runs = {question.run: None for question in asked.questions}
    for run in runs:
        _admit(run, holding)
    for question in asked.questions:
        check_asks(question, holding.policy, asked.secure)
        if asked.secure is not None and not len(question.ids):
            raise RunError("a secure sum is of no client of this node", "see docs/secure-sums.md")
    for question in asked.questions:
        about = seen(_data(holding, question.schema)[0], question.part, question.views)
        check_rows(question, about, holding.policy)
    if asked.secure is not None:
        check_keys(asked.secure, *_keys(holding, asked.secure.run))
    for run in runs:
        _files(holding, run).begin()
    charge(holding.folder, asked.questions, holding.policy)


def _files(holding: NodeData, run: str) -> PrivateFiles:
    return PrivateFiles(holding.folder, run, runs=holding.policy.state.runs, days=holding.policy.state.days)


def _answer(
    asked: Question, holding: NodeData, private: Private, *, secure: bool = False, share: float = 1.0
) -> tuple[Answers, Private, dict[str, Any]]:
    """Answer a question.  -> the answer, what clients keep, and, for a secure sum, what this node adds to it

    `share` is how much of the variance of noise this node adds, where there is noise.
    """
    worker = _worker(asked, holding)
    check_room(asked, worker.rows.n_clients)
    worker.least_clients, worker.noise_share = holding.policy.sums.clients, share
    worker.private = {run: {name: value.clone() for name, value in kept.items()} for run, kept in private.items()}
    told = {at: ask for at, ask in asked.asks.items() if ask.fold}
    answers = worker.answer(asked.asks, asked.ids, asked.bounds)
    if secure:
        answers = shaped(worker, asked.asks, answers, asked.ids)
        keeps = any(ask.fresh for ask in asked.asks.values())  # whether something has changed would tell of clients
        silent = Answers(asked.state.number, {run: {} for run in answers}, asked.ids, keeps, False)
        return silent, worker.private, arrays_of(told, answers)
    parts = {run: found.parts for run, found in answers.items()}
    if all(not ask.fold or ask.noise is not None for ask in asked.asks.values()):
        changed = any(ask.fresh for ask in asked.asks.values())  # whether something has changed would tell of clients
    else:
        changed = not same(private, worker.private)
    left_out = {run: found.left_out for run, found in answers.items() if found.left_out}
    lengths = {run: found.lengths for run, found in answers.items() if found.lengths}
    return Answers(asked.state.number, parts, asked.ids, changed, False, left_out, lengths), worker.private, {}


def _worker(asked: Question, holding: NodeData) -> Worker:
    """A worker with the rows that are meant; those of late are kept, with what their clients keep of them."""
    clients, whose = _data(holding, asked.schema)
    key = f"{whose} {fingerprint((asked.part, asked.views))}"
    if key not in _workers:
        _workers[key] = Worker(seen_by(clients, asked.part, asked.views))
    _workers.move_to_end(key)
    for old in _too_many({known: _memory(worker.rows) for known, worker in _workers.items()}, _WORKERS):
        del _workers[old]
    return _workers[key]
