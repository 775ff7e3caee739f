# SPDX-License-Identifier: Apache-2.0
"""The server's way to the nodes: who is there, one message to each at a time, and answers as they come."""

import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeVar

from flwr.app import Message
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError

from coterie.engines.flower import NodeWarning
from coterie.engines.flower.identity import is_proven, new_challenge
from coterie.engines.flower.incoming import check_introduction, check_reply, printable
from coterie.engines.flower.journal import Journal
from coterie.engines.flower.messages import ASK, FROM_NODES, HELLO, Batch, Hello, Introduction, Refusal, Reply
from coterie.engines.flower.wire import from_records, to_records
from coterie.errors import CoterieError

__all__ = ["Called", "Link", "Node", "same_rows"]

T = TypeVar("T", int, str)

_AGAIN = 25  # times `poll`: until a node whose owner has not approved the run yet is greeted again

# What comes of bytes that are not what Flower's own encoding says they are.
_UNREADABLE = (ValueError, TypeError, KeyError, IndexError, AttributeError, DecodeError)


class _WaitsError(CoterieError):
    """A node waits for its owner's approval of the run."""


@dataclass
class Node:
    """A node of the federation: who it is, and under which id it is there now."""

    said: Introduction
    address: int | None  # None while it is away
    schema: str | None = None  # the federation's, where it is not its own
    waiting: str | None = None  # the message that it has not answered


@dataclass
class Called:
    """What came of a call: answers, and why others did not answer, by the names of the nodes."""

    answers: dict[str, Reply] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class Link:
    """A Flower grid with the nodes behind it.

    Parameters
    ----------
    grid : Grid
        Flower's.
    run : str
        The run's identity, which nodes keep private state under.
    timeout : float
        Seconds that a question may take.
    poll : float
        Seconds between two looks at what has come.
    told : callable
        Given what is asked, whenever something is asked.
    """

    def __init__(
        self, grid: Grid, run: str, *, timeout: float, poll: float, told: Callable[[str], None] = lambda asked: None
    ) -> None:
        self.grid, self.run, self.timeout, self.poll, self.told = grid, run, timeout, poll, told
        self.nodes: dict[str, Node] = {}  # by name
        self.sums: Any = None  # how nodes add up securely: a `FlowerSums`
        self.journal: Journal | None = None  # where answers are kept, and found again
        self.refusals: dict[int, str] = {}  # id -> why it could not introduce itself
        self.waiting: dict[int, str] = {}  # id -> that its owner has not approved the run yet
        self._later: dict[int, float] = {}  # id -> when to ask it again
        self._greeted: dict[int, str] = {}  # id -> the message that asks who it is
        self._hellos: dict[int, Hello] = {}  # id -> what it was asked
        self._strangers: dict[int, Introduction] = {}
        self._one_by_one = False  # whether replies are pulled alone
        self._came: dict[str, Message] = {}  # replies that nobody has taken yet, by what they reply to

    # -- who is there -------------------------------------------------------------------------------------------------
    def greet(self) -> dict[int, Introduction]:
        """Ask those who they are who have not been asked, and give what is known so far of those who are new."""
        there = set(self.grid.get_node_ids())
        for address in [one for one, when in self._later.items() if time.monotonic() >= when]:
            del self._later[address], self._greeted[address]
        known = {node.address for node in self.nodes.values()} | self._greeted.keys()
        new = {address: Hello(self.run, new_challenge()) for address in sorted(there - known)}
        self._hellos |= new
        self._greeted |= self._push(HELLO, {address: (hello, address) for address, hello in new.items()})
        self._look()
        for node in self.nodes.values():
            if node.address is not None and node.address not in there:
                self._greeted.pop(node.address, None)  # it may come back under its id, and is asked again who it is
                node.address = None
        for address, said in list(self._strangers.items()):
            known_by_name = self.nodes.get(said.node)
            if known_by_name is not None and known_by_name.address is None:
                del self._strangers[address]
                self._take_back(known_by_name, said, address)
        return {address: said for address, said in self._strangers.items() if address in there}

    def _take_back(self, node: Node, said: Introduction, address: int) -> None:
        """Let a node that was away be there again, under another id perhaps; another one of its name is not let in."""
        if said.public != node.said.public:
            why = "it does not have the key that the node of this name has shown before"
        elif not same_rows(node.said, said):
            why = "it has other clients or rows than before"
        else:
            node.address, node.waiting = address, None
            return
        warnings.warn(f"node '{said.node}' is not taken back: {why}", NodeWarning, stacklevel=2)

    def settle(self, nodes: Mapping[str, Node]) -> None:
        """Take in those who are to be asked from now on."""
        self.nodes = dict(nodes)
        self._strangers = {}

    # -- questions ----------------------------------------------------------------------------------------------------
    def call(
        self,
        questions: Mapping[str, Batch],
        sizes: Mapping[str, int],
        enough: int,
        check: Callable[[Reply], None],
        patience: float,
    ) -> Called:
        """Ask nodes, and wait until enough clients have answered, all have who could be asked, or the time is over.

        Parameters
        ----------
        questions, sizes : mapping
            By the names of nodes: what each is asked, and for how many clients. Who is away, or still busy with an earlier
            question, is not asked; but who is busy is waited for where some will do and those who are free are too few.
        enough : int
            Clients that will do.
        check : callable
            Raises `CoterieError` if an answer cannot be used.
        patience : float
            Seconds that it may take.
        """
        self.told(_asked(questions))
        if self.journal is not None and (before := self.journal.recalled()) is not None:
            return Called(*before)
        deadline = time.monotonic() + patience
        called, asked, some = Called(), dict[str, str](), enough < sum(sizes.values())
        self._came = {}  # what comes late is ignored
        while True:
            asked |= self._ask({name: question for name, question in questions.items() if name not in asked})
            self._look()
            for name, number in asked.items():
                if number in self._came:
                    self._take(name, self._came.pop(number), check, called)
            done = sum(sizes[name] for name in called.answers) >= enough
            pending = asked.keys() - called.answers.keys() - called.failed.keys()
            busy = {name for name in questions.keys() - asked.keys() if self.nodes[name].address is not None}
            waiting = pending or (some and busy) or not asked
            if done or not waiting or time.monotonic() >= deadline:
                break
            time.sleep(self.poll)
        if not done:
            called.failed |= dict.fromkeys(pending, "has not answered in time")
            called.failed |= dict.fromkeys(busy, "is still busy with an earlier question")
        called.failed |= dict.fromkeys(questions.keys() - asked.keys() - busy, "is away")
        if self.journal is not None:
            self.journal.note(called.answers, called.failed)
        return called

    def _ask(self, questions: Mapping[str, Batch]) -> dict[str, str]:
        """Push questions to who is there and free.  -> the messages, by the names of these nodes"""
        if not questions:
            return {}
        self.greet()
        there = {name: self.nodes[name].address for name in sorted(questions) if not self.nodes[name].waiting}
        to = {name: address for name, address in there.items() if address is not None}
        pushed = self._push(ASK, {name: (questions[name], address) for name, address in to.items()})
        for name, number in pushed.items():
            self.nodes[name].waiting = number
        return pushed

    def _take(self, name: str, reply: Message, check: Callable[[Reply], None], called: Called) -> None:
        """Note an answer that can be used, or why it cannot."""
        try:
            said = _content(reply)
            if not isinstance(said, Reply) or said.node != name:
                raise CoterieError("answers another request")
            check_reply(said)
            check(said)
            called.answers[name] = said
        except CoterieError as error:
            called.failed[name] = f"is refused: {printable(error.message)}"
        except Exception as error:  # a check that did not expect what came must not end the run
            called.failed[name] = f"is refused: its answer is malformed: {printable(error)}"

    def _push(self, kind: str, sent: Mapping[T, tuple[Any, int]]) -> dict[T, str]:
        """Push values to their addresses, all at once.  -> the numbers of the messages; "" where one could not be pushed"""
        ttl = max(2 * self.timeout, 60.0)
        messages = [Message(to_records(value), address, kind, ttl=ttl) for value, address in sent.values()]
        numbers = list(self.grid.push_messages(messages)) if messages else []
        return {key: number or "" for key, number in zip_longest(sent, numbers)}

    def _look(self) -> None:
        """Pull what has come: nodes become free, replies are kept, and introductions are noted."""
        by_node = {node.waiting: name for name, node in self.nodes.items() if node.waiting}
        by_address = {message: address for address, message in self._greeted.items() if message}
        for reply in self._pulled([*by_node, *by_address]):
            number = reply.metadata.reply_to_message_id
            if number in by_node:
                self.nodes[by_node[number]].waiting = None
                self._came[number] = reply
            elif number in by_address:
                self._meet(by_address[number], reply)

    def _pulled(self, numbers: list[str]) -> list[Message]:
        """Pull replies. One that Flower itself cannot read takes all others with it: from then on each is pulled alone.

        What was lost with it is asked again where that is a greeting; a question ends without those answers.
        """
        if not self._one_by_one:
            try:
                return list(self.grid.pull_messages(numbers))
            except _UNREADABLE:
                self._one_by_one = True
                self._greeted = {address: message for address, message in self._greeted.items() if not message}
        found: list[Message] = []
        for number in numbers:
            with suppress(*_UNREADABLE):
                found += self.grid.pull_messages([number])
        return found

    def _meet(self, address: int, reply: Message) -> None:
        self._greeted[address] = ""
        try:
            said = _content(reply)
            if not isinstance(said, Introduction):
                raise CoterieError("did not say who it is")
            check_introduction(said)
            if not is_proven(said, self._hellos[address], address):
                raise CoterieError(f"calls itself '{said.node}', and does not prove that it has the key that it shows")
            self._strangers[address] = said
            self.waiting.pop(address, None)
        except _WaitsError as error:
            if address not in self.waiting:
                self.waiting[address] = printable(error.message)
                warnings.warn(self.waiting[address], NodeWarning, stacklevel=2)
            self._later[address] = time.monotonic() + _AGAIN * self.poll
        except CoterieError as error:
            self.waiting.pop(address, None)
            self.refusals[address] = printable(error.message)
        except Exception as error:  # likewise
            self.refusals[address] = f"its introduction is malformed: {printable(error)}"


def _content(reply: Message) -> Any:
    """What a reply says; Flower's own errors, and the node's, are raised."""
    if reply.has_error():
        raise CoterieError(f"Flower says: {reply.error.reason or 'an error'} (code {reply.error.code})")
    said = from_records(reply.content, FROM_NODES)
    if isinstance(said, Refusal) and said.waits is True:
        raise _WaitsError(f"node '{printable(said.node)}': {printable(said.why)}", said.hint)
    if isinstance(said, Refusal):
        raise CoterieError(said.why, said.hint)
    return said


def _asked(batches: Mapping[str, Batch]) -> str:
    """The client functions that are to be run, in words."""
    questions = [question for batch in batches.values() for question in batch.questions]
    steps = {ask.step.__name__: None for question in questions for ask in question.asks.values()}
    if not steps:
        steps = {f"{batch.secure.step} of a secure sum": None for batch in batches.values() if batch.secure is not None}
    return ", ".join(steps).replace("_", " ")


def same_rows(a: Introduction, b: Introduction) -> bool:
    """Whether a node has the clients and rows that it had; both were checked."""
    return (a.names, a.fingerprint) == (b.names, b.fingerprint)
