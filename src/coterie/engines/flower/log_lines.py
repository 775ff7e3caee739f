# SPDX-License-Identifier: Apache-2.0
"""What a node's log says of a message: a line for every client function that it asked for."""

from collections.abc import Iterator
from dataclasses import replace

from flwr.app import RecordDict

from coterie.engines.flower.incoming import MOST_WORD, printable
from coterie.engines.flower.messages import Answers, Batch, Hello, Introduction, Question, Refusal, Reply, Secure
from coterie.engines.flower.protections import epsilon_of, is_masked
from coterie.engines.flower.question_log import Entry
from coterie.protocol import Ask, Fold
from coterie.secure.fixed_point import Layout

__all__ = ["lines_of"]

_INTRODUCED = {"names": "individual", "rows": "individual", "columns": "individual"}  # of clients, and the node's own
_FIELDS = 100  # that a line names; no client function of coterie's has as many


def lines_of(asked: object, reply: Introduction | Reply | Refusal, told: RecordDict, who: Entry) -> list[Entry]:
    """Make the lines.

    Parameters
    ----------
    asked : object
        What the message held, within bounds; None if it could not be read.
    reply : Introduction, Reply or Refusal
        The answer.
    told : RecordDict
        The same, as it leaves.
    who : Entry
        Who asked.
    """
    refused = printable(reply.why) if isinstance(reply, Refusal) else ""
    if isinstance(asked, Hello):
        size = 0 if refused else sum(record.count_bytes() for record in told.values())
        clients = len(reply.names) if isinstance(reply, Introduction) else 0
        fields = _INTRODUCED if not refused else {}
        line = replace(who, run=_word(asked.run), function="introduction", asks=1, clients=clients, bytes=size)
        return [replace(line, fields=fields, refused=refused)]
    secure = asked.secure if isinstance(asked, Batch) else None
    if secure is not None and secure.step != "mask":
        size = 0 if refused else sum(record.count_bytes() for record in told.values())
        line = replace(who, run=_word(secure.run), function=f"secure-{secure.step}", asks=1, bytes=size)
        return [replace(line, refused=refused)]
    hidden = _masked(reply)
    answers = reply.answers if isinstance(reply, Reply) else ()
    lines: dict[tuple[str, str], Entry] = {}
    for number, question, slot, ask in _asks(asked):
        key = (_word(question.run), ask.step.__name__)
        line = lines.get(key) or replace(who, run=key[0], function=key[1], refused=refused)
        left = _left(answers[number], slot) + hidden.get((number, slot), 0) if answers else 0
        cost = 0.0 if refused else epsilon_of(ask)
        fields = line.fields | {_word(name): _how(how, secure) for name, how in list(ask.fold.items())[:_FIELDS]}
        lines[key] = replace(
            line, asks=line.asks + 1, clients=max(line.clients, len(question.ids)), bytes=line.bytes + left,
            epsilon=line.epsilon + cost, fields=dict(list(fields.items())[:_FIELDS]),
        )  # fmt: skip
    return list(lines.values()) or [replace(who, refused=refused or "nothing was asked")]


def _asks(asked: object) -> Iterator[tuple[int, Question, int, Ask]]:
    """All asks of a batch."""
    if not isinstance(asked, Batch):
        return
    for number, question in enumerate(asked.questions):
        for slot, ask in question.asks.items():
            yield number, question, slot, ask


def _left(answers: Answers, slot: int) -> int:
    """Bytes of an answer: what was folded, and counts of lengths."""
    parts = [*answers.parts.get(slot, {}).values(), answers.lengths.get(slot, {})]
    return sum(value.nbytes for part in parts for value in part.values())


def _masked(reply: object) -> dict[tuple[int, int], int]:
    """Bytes of a masked part, by question and run."""
    sizes: dict[tuple[int, int], int] = {}
    if isinstance(reply, Reply) and reply.sealed is not None:
        for one in Layout.read(reply.sealed.layout).fields:
            number, slot = one.name.split("/", 1)[0].split(":")
            key = (int(number), int(slot))
            sizes[key] = sizes.get(key, 0) + 8 * one.n_words
    return sizes


def _how(how: Fold, secure: Secure | None) -> str:
    return "individual" if how.individual else "masked" if is_masked(how, secure) else "sum"


def _word(name: object) -> str:
    return printable(name)[:MOST_WORD]
