# SPDX-License-Identifier: Apache-2.0
"""What comes in is held against bounds before anything is made of it: what nodes say, and what a node is asked.

Whatever is wrong is a `CoterieError` that says what was said and what the bound is; who said it, the caller knows.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from coterie.data.remote import AtLeast, Cast, Divided, Folded, Newcomers, Part, Scaled
from coterie.data.schema import Schema
from coterie.engines.flower.messages import (
    Answers,
    Batch,
    Hello,
    Introduction,
    PublicKeys,
    Question,
    Reply,
    Sealed,
    Secure,
    State,
)
from coterie.errors import RunError
from coterie.limits import MOST_CLASSES, MOST_FEATURES, MOST_LEVELS, MOST_NAME
from coterie.protocol import Ask
from coterie.secure.fixed_point import MOST_NODES
from coterie.secure.messages import EPOCH

__all__ = [
    "MOST_CLIENTS", "MOST_NAMES", "MOST_ROWS", "check_batch", "check_hello", "check_introduction",
    "check_reply", "check_room", "printable",
]  # fmt: skip

_HINT = "see the node's log, and that both sides run the same version of coterie"

MOST_CLIENTS = 100_000  # of a node
MOST_NAMES = 20_000_000  # characters of a node's clients, were all names as long as the longest: an array of them is
MOST_ROWS = 1 << 32  # of a client: sums over a federation stay within 64 bits
MOST_SCHEMA = 1 << 23  # characters that describe the columns
MOST_STEPS = 10_000  # client functions; coterie has some seventy
MOST_VERSIONS = 16  # packages
MOST_WORD = 200  # characters of a version, a fingerprint, a key or a proof
MOST_SHOWN = 300  # characters that are shown of what somebody else has said
MOST_QUESTIONS = 1_000  # in a message; a comparison asks some ten at once
MOST_ASKS = 10_000  # in a question: runs in lockstep
MOST_VIEWS = 64  # of rows
MOST_FOLDS = 1_000  # of rows; a comparison has five
MOST_STATE = 1 << 33  # bytes that a question may make a node keep for its clients: 8 GiB

_PARTS = ("train", "test", "newcomers")


def printable(text: object) -> str:
    """What somebody else has said, so that it can be shown: no control characters, and not too long."""
    said = str(text)
    return "".join(c if c.isprintable() else " " for c in said[:MOST_SHOWN]) + ("..." if len(said) > MOST_SHOWN else "")


# -- on the server ----------------------------------------------------------------------------------------------------
def check_introduction(said: Introduction) -> Schema:
    """Refuse a node that says of itself what cannot be.  -> its columns"""
    _want(_is_name(said.node), f"its name is not a word of at most {MOST_NAME} characters")
    _want(type(said.protocol) is int, "its protocol is not a number")
    _want_words("versions", said.versions, MOST_VERSIONS)
    _want_all("client functions", said.steps, MOST_STEPS)
    for what in ("fingerprint", "public", "proof"):
        _want(_is_text(getattr(said, what), MOST_WORD), f"its {what} is not a text of at most {MOST_WORD} characters")
    _want(
        isinstance(said.names, tuple) and 0 < len(said.names) <= MOST_CLIENTS,
        f"it has no clients, or more than {MOST_CLIENTS:,}",
    )
    for wrong in (name for name in said.names if not _is_name(name)):
        _want(False, f"the name of a client is {wrong!r:.40}, and not a word of at most {MOST_NAME} characters")
    room = len(said.names) * max(map(len, said.names))
    _want(room <= MOST_NAMES, f"names of its clients take {room:,} characters; at most {MOST_NAMES:,}")
    _want(len(set(said.names)) == len(said.names), "two of its clients have one name")
    _check_counts(said)
    schema = _schema(said.schema)
    _check_row(said, schema)
    return schema


def _check_counts(said: Introduction) -> None:
    counts = said.counts
    _want(
        isinstance(counts, dict) and "train" in counts and set(counts) <= {*_PARTS}, "it counts other rows than it has"
    )
    for part, n in counts.items():
        fits = isinstance(n, Tensor) and n.dtype == torch.int64 and n.shape == (len(said.names),)
        _want(fits, f"its {part} rows are not counted by client")
        low, high = (int(end) for end in n.aminmax())
        _want(0 <= low <= high <= MOST_ROWS, f"a client has {low:,} or {high:,} {part} rows; at most {MOST_ROWS:,}")


def _schema(text: object) -> Schema:
    if not isinstance(text, str) or len(text) > MOST_SCHEMA or text.count("{") > MOST_FEATURES + 1:
        raise RunError(
            f"its columns are not told in at most {MOST_SCHEMA:,} characters, {MOST_FEATURES:,} columns", _HINT
        )
    try:
        schema = Schema.model_validate_json(text)
    except (ValidationError, ValueError, RecursionError):
        raise RunError("its columns cannot be understood", _HINT) from None
    _want(
        schema.n_features <= MOST_FEATURES, f"its rows have {schema.n_features:,} features; at most {MOST_FEATURES:,}"
    )
    _want(len(schema.classes) <= MOST_CLASSES, f"it has {len(schema.classes):,} classes; at most {MOST_CLASSES:,}")
    names = [column.name for column in schema.columns]
    _want(len(set(names)) == len(names), "two of its columns have one name")
    for column in schema.columns:
        few = len(column.levels) <= (MOST_LEVELS if column.kind == "categorical" else 0)
        _want(few, f"column '{printable(column.name)}' has {len(column.levels):,} levels; at most {MOST_LEVELS}")
    words = (
        schema.client,
        schema.target or "",
        *names,
        *schema.classes,
        *(w for c in schema.columns for w in c.levels),
    )
    _want(max(map(len, words)) <= MOST_NAME, f"a column, level or class has a name of more than {MOST_NAME} characters")
    return schema


def _check_row(said: Introduction, schema: Schema) -> None:
    row = said.row
    _want(isinstance(row, dict) and {"x"} <= set(row) <= {"x", "y"}, "it does not say what its rows look like")
    for name, value in row.items():
        fits = isinstance(value, Tensor) and value.dim() > (name == "x") and len(value) == 0
        _want(
            fits and math.prod(value.shape[1:]) <= MOST_FEATURES, f"its '{name}' is no row of at most {MOST_FEATURES:,}"
        )
    _want(row["x"].is_floating_point(), f"its features are of {row['x'].dtype}")
    wide = math.prod(row["x"].shape[1:])
    _want(wide == schema.n_features, f"its rows have {wide:,} features, and its columns {schema.n_features:,}")


def check_reply(said: Reply) -> None:
    """Refuse a reply whose parts are of other kinds than they must be; whether they are what was asked for comes after."""
    _want(
        isinstance(said.answers, tuple) and len(said.answers) <= MOST_QUESTIONS, "its answer is malformed: no answers"
    )
    if (sealed := said.sealed) is not None:
        _want(isinstance(sealed, Sealed) and _is_places(sealed.places), "its part of a secure sum is malformed")
        _want(sealed.keys is None or isinstance(sealed.keys, PublicKeys), "its keys for a secure sum are malformed")
        for value in (sealed.letters, sealed.words):
            _want(value is None or isinstance(value, Tensor), "its part of a secure sum is malformed")
    for one in said.answers:
        _want(isinstance(one, Answers), f"its answer is malformed: a {type(one).__name__}")
        fits = type(one.number) is int and type(one.kept) is bool and type(one.lost) is bool and _is_ids(one.ids)
        _want(fits, "its answer is malformed: it does not say to what, or for whom")
        _want(_is_by_run(one.parts), "its answer is malformed: no parts")
        _want(_is_by_run(one.left_out) and _is_by_run(one.lengths), "its answer is malformed: no clients are left out")
        fits = all(
            type(client) is int and _is_text(why, MOST_SHOWN)
            for without in one.left_out.values()
            for client, why in without.items()
        )
        _want(
            fits, f"its answer is malformed: a client is left out without a reason of at most {MOST_SHOWN} characters"
        )
        fits = all(isinstance(value, Tensor) for own in one.lengths.values() for value in own.values())
        _want(fits, "its answer is malformed: lengths are no tensors")
        for fields in one.parts.values():
            fits = isinstance(fields, dict) and all(
                isinstance(name, str) and isinstance(part, dict) and all(map(_is_named_tensor, part.items()))
                for name, part in fields.items()
            )
            _want(fits, "its answer is malformed: a part is no tensors")


# -- on a node --------------------------------------------------------------------------------------------------------
def check_hello(asked: Hello) -> None:
    """Refuse a greeting that is none."""
    fits = _is_text(asked.run, MOST_NAME) and _is_text(asked.challenge, MOST_WORD)
    _want(fits, f"the server's greeting is not of texts of at most {MOST_NAME} characters")


def check_batch(asked: Batch) -> None:
    """Refuse questions that are none, and more than there may be."""
    questions = asked.questions
    fits = isinstance(questions, tuple) and len(questions) <= MOST_QUESTIONS
    _want(
        fits and all(isinstance(one, Question) for one in questions), f"it is not at most {MOST_QUESTIONS:,} questions"
    )
    if asked.secure is not None:
        _check_secure(asked)
    for number, one in enumerate(questions):
        _want(_is_text(one.run, MOST_NAME), "a question is of no run")
        fits = one.schema is None or _is_text(one.schema, MOST_SCHEMA)
        _want(fits, f"a question's columns are not told in at most {MOST_SCHEMA:,} characters")
        _want(
            one.after is None or (type(one.after) is int and 0 <= one.after < number), "a question follows a later one"
        )
        _want(_is_ids(one.ids), "a question is to no clients: their numbers must be ascending")
        _check_rows(one.part, one.views)
        _check_state(one.state)
        asks = one.asks
        fits = isinstance(asks, dict) and 0 < len(asks) <= MOST_ASKS and all(type(run) is int for run in asks)
        _want(fits, f"a question does not have 1 to {MOST_ASKS:,} asks")
        for ask in asks.values():
            _check_ask(ask, len(one.ids))


def _check_secure(asked: Batch) -> None:
    said = asked.secure
    fits = isinstance(said, Secure) and said.step in ("keys", "letters", "mask", "unmask")
    _want(fits and bool(asked.questions) == (asked.secure.step == "mask"), "it is no step of a secure sum")  # type: ignore[union-attr]
    assert isinstance(said, Secure)
    _want(_is_text(said.run, MOST_NAME), "a secure sum is of no run")
    digits = (
        isinstance(said.epoch, str)
        and len(said.epoch) == 2 * EPOCH
        and all(c in "0123456789abcdef" for c in said.epoch)
    )
    _want(digits, "a secure sum names no exchange of keys")
    numbers = (said.sums, said.number, said.place, said.n_nodes, said.threshold)
    _want(all(type(n) is int and 0 <= n <= MOST_NODES for n in numbers), "a secure sum counts what there cannot be")
    _want(_is_places(said.places) and isinstance(said.neighbours, tuple), "a secure sum is of no nodes")
    _want(len(said.neighbours) < MOST_NODES, f"a secure sum is of at most {MOST_NODES:,} nodes")
    for one in said.neighbours:
        _want(isinstance(one, PublicKeys) and type(one.place) is int and _is_name(one.name), "a neighbour has no keys")
    letters = said.letters
    fits = letters is None or (isinstance(letters, Tensor) and letters.dim() == 2 and len(letters) == len(said.places))
    _want(fits, "letters of a secure sum are none")
    runs = {one.run for one in asked.questions}
    _want(runs <= {said.run}, "a secure sum is of several runs")


def _is_places(places: Any) -> bool:
    return isinstance(places, tuple) and len(places) <= MOST_NODES and all(type(n) is int and n >= 0 for n in places)


def _check_rows(part: object, views: object) -> None:
    kinds = (Scaled, Cast, Divided, Newcomers, AtLeast)
    several = [(part, views)]
    if isinstance(part, Folded):
        _want(type(part.n_folds) is int and 0 < part.n_folds <= MOST_FOLDS, f"rows have at most {MOST_FOLDS:,} folds")
        several += [(part.train, part.views), (part.test or Part("test"), part.test_views)]
    for which, done in several:
        fits = isinstance(which, Part | Folded if which is part else Part)
        fits = fits and isinstance(done, tuple) and len(done) <= MOST_VIEWS and all(isinstance(v, kinds) for v in done)
        _want(fits, f"a question does not say of which rows, in at most {MOST_VIEWS} steps")


def _check_state(state: object) -> None:
    fits = isinstance(state, State) and all(_is_text(name, MOST_NAME) for name in (state.source, state.store))
    numbers = (state.accepted, state.number, state.needed) if isinstance(state, State) else ()
    fits = fits and all(type(n) is int and n >= 0 for n in numbers)
    _want(fits, "a question does not say what private state it starts from")


def _check_ask(ask: object, n_clients: int) -> None:
    _want(isinstance(ask, Ask), f"a {type(ask).__name__} is no ask")
    assert isinstance(ask, Ask)
    named = all(isinstance(values, Mapping) and all(isinstance(name, str) for name in values)
                for values in (ask.shared, ask.fold, ask.each, ask.fresh))  # fmt: skip
    _want(named and callable(ask.step), "an ask has parts without names")
    tensors = all(isinstance(value, Tensor) for value in (*ask.each.values(), *ask.fresh.values()))
    _want(tensors and all(hasattr(how, "merge") for how in ask.fold.values()), "an ask has parts of another kind")
    _want(
        all(value.shape[:1] == (n_clients,) for value in ask.each.values()),
        "an ask is to other clients",
    )
    _want(type(ask.scratch) is int and ask.scratch >= 0, "an ask needs less than no room")
    cost = ask.epsilon
    fits = cost is None or (isinstance(cost, int | float) and not isinstance(cost, bool) and 0 < cost < math.inf)
    _want(fits, "an ask's epsilon is not a number above 0")


def check_room(asked: Question, n_clients: int) -> None:
    """Refuse a question to clients that are not there, and one that would make them keep more than there is room for."""
    if len(asked.ids) and int(asked.ids.max()) >= n_clients:
        raise RunError(
            "the server asks for a client that is not on this node", "start a new run: the node's clients have changed"
        )
    room = n_clients * sum(value.nbytes for ask in asked.asks.values() for value in ask.fresh.values())
    _want(room <= MOST_STATE, f"clients are to keep {room:,} bytes; at most {MOST_STATE:,}")


# -- kinds ------------------------------------------------------------------------------------------------------------
def _want(true: object, otherwise: str) -> None:
    if not true:
        raise RunError(printable(otherwise), _HINT)


def _want_words(what: str, words: object, most: int) -> None:
    _want(isinstance(words, dict) and all(map(_is_word, words.values())), f"its {what} are no words")
    assert isinstance(words, dict)
    _want_all(what, tuple(words), most)


def _want_all(what: str, words: object, most: int) -> None:
    fits = isinstance(words, tuple) and len(words) <= most and all(map(_is_word, words))
    _want(fits, f"its {what} are not at most {most:,} words of at most {MOST_WORD} characters")


def _is_by_run(values: Any) -> bool:
    """Whether it holds something by name, or by client, for every run."""
    return isinstance(values, dict) and all(type(k) is int and isinstance(v, dict) for k, v in values.items())


def _is_named_tensor(item: tuple[Any, Any]) -> bool:
    return isinstance(item[0], str) and isinstance(item[1], Tensor)


def _is_word(text: Any) -> bool:
    return _is_text(text, MOST_WORD)


def _is_text(text: Any, most: int) -> bool:
    return isinstance(text, str) and len(text) <= most


def _is_name(text: Any) -> bool:
    """Whether it can stand in a table and on a screen: control characters cannot."""
    return _is_text(text, MOST_NAME) and text != "" and not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in text)


def _is_ids(ids: Any) -> bool:
    """Whether these are numbers of clients, each once and ascending."""
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() != 1 or len(ids) > MOST_CLIENTS:
        return False
    return not len(ids) or (int(ids[0]) >= 0 and bool((ids[1:] > ids[:-1]).all()))
