# SPDX-License-Identifier: Apache-2.0
"""The protocol with nodes in memory: what comes out, what the server sees, and what nodes refuse."""

import random
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chisquare

from coterie.errors import RunError
from coterie.secure.fixed_point import encode
from coterie.secure.graph import threshold
from coterie.secure.masks import public_of, signing_key
from coterie.secure.messages import Keys
from coterie.secure.server import Epoch
from secure_nodes import QUESTION, Seen, add_up, drop, made, ready


def arrays(names: list[str], seed: int = 0) -> dict[str, dict[str, np.ndarray]]:
    draw = np.random.default_rng(seed)
    return {
        name: {
            "gram": draw.normal(size=(3, 3)),
            "n": draw.integers(0, 50, 2),
            "theta": draw.normal(size=4).astype("f4"),
        }
        for name in names
    }


@pytest.mark.parametrize("n", [2, 3, 8, 40])
def test_the_sum_is_that_of_all_nodes(n: int) -> None:
    nodes = made(n)
    parts = arrays(list(nodes))
    found = add_up(nodes, ready(nodes), parts)
    np.testing.assert_allclose(found["gram"], sum(p["gram"] for p in parts.values()), rtol=1e-14, atol=1e-14)
    assert np.array_equal(found["n"], sum(p["n"] for p in parts.values()))
    np.testing.assert_allclose(found["theta"], sum(p["theta"].astype("f8") for p in parts.values()), rtol=1e-6)


def test_thirty_percent_drop_out_at_any_step_and_no_sum_is_wrong() -> None:
    draw, stopped = random.Random(0), 0
    for attempt in range(200):
        nodes = made(draw.choice([4, 8, 10, 16]))
        parts = arrays(list(nodes), attempt)
        gone = drop(nodes, 0.3, draw)
        try:
            found = add_up(nodes, ready(nodes, gone=gone), parts, gone)
        except RunError:
            stopped += 1
            continue
        there = [name for name in nodes if gone.get(name) not in ("keys", "letters", "masked")]
        np.testing.assert_allclose(found["gram"], sum(parts[name]["gram"] for name in there), rtol=1e-13, atol=1e-13)
        assert np.array_equal(found["n"], sum(parts[name]["n"] for name in there))
    assert stopped == 0  # of 4, 8, 10 and 16 nodes, 30 % leave as many as it takes


def test_neighbours_in_a_sparse_graph_drop_out() -> None:
    draw = random.Random(1)
    for attempt in range(5):
        nodes = made(64)
        parts = arrays(list(nodes), attempt)
        gone = drop(nodes, 0.1, draw)
        found = add_up(nodes, ready(nodes, gone=gone), parts, gone)
        there = [name for name in nodes if gone.get(name) not in ("keys", "letters", "masked")]
        np.testing.assert_allclose(found["gram"], sum(parts[name]["gram"] for name in there), rtol=1e-13, atol=1e-12)


def test_too_many_drop_out_and_the_sum_stops() -> None:
    for step in ("keys", "letters", "masked", "unmasked"):
        nodes = made(8)
        gone = dict.fromkeys(list(nodes)[: 7 if step == "keys" else 3], step)
        with pytest.raises(RunError, match="takes"):
            add_up(nodes, ready(nodes, gone=gone), arrays(list(nodes)), gone)


def test_who_drops_out_of_one_sum_is_in_the_next() -> None:
    nodes = made(5)
    epoch, parts = ready(nodes, sums=3), arrays(list(nodes))
    total = sum(p["gram"] for p in parts.values())
    for gone in ({}, {"node-2": "masked"}, {}):
        found = add_up(nodes, epoch, parts, gone)["gram"]
        np.testing.assert_allclose(found, total - (parts["node-2"]["gram"] if gone else 0), rtol=1e-13, atol=1e-13)
    with pytest.raises(RunError, match="used up"):
        epoch.begin()


# -- what the server sees ---------------------------------------------------------------------------------------------
def test_no_masked_array_is_a_nodes_part_and_no_two_are_alike() -> None:
    nodes = made(8)
    epoch, seen = ready(nodes, sums=2), []
    for _ in range(2):
        seen.append(Seen())
        add_up(nodes, epoch, dict.fromkeys(nodes, arrays(["same"])["same"]), seen=seen[-1])
    every = [words for one in seen for words in one.masked.values()]
    for one in seen:
        for name, words in one.masked.items():
            assert not np.isin(words, one.parts[name]).any()
    assert len({words.tobytes() for words in every}) == len(every)


def test_masked_arrays_are_uniform() -> None:
    zeros = {"a": np.zeros(4000), "b": np.zeros(500, dtype=np.float32), "n": np.zeros(500, dtype=np.int64)}
    values = []
    for _ in range(20):
        nodes = made(4)
        epoch, seen = ready(nodes), Seen()
        add_up(nodes, epoch, dict.fromkeys(nodes, zeros), {"node-3": "unmasked"}, seen)
        for words in seen.masked.values():
            counts = np.bincount(words.view(np.uint8), minlength=256)
            assert chisquare(counts).pvalue > 0.001 / 80  # 80 tests: one in a thousand that any of them fails
        together = np.concatenate(list(seen.masked.values())).view(np.uint8)
        values.append(chisquare(np.bincount(together, minlength=256)).pvalue)
    # Masks are drawn anew each time, so that chance brings one below 0.001 in 2 % of the tests, and two in 0.02 %.
    assert sum(value <= 0.001 for value in values) <= 1


def test_below_the_threshold_nothing_is_revealed() -> None:
    nodes = made(6)
    epoch = ready(nodes)
    number = epoch.begin()
    layout, words = encode(arrays(["a"])["a"], 6)
    masked = {name: node.mask(number, QUESTION, layout, words) for name, node in nodes.items()}
    few = dict(list(masked.items())[: threshold(6) - 1])
    with pytest.raises(RunError, match="takes 5"):
        epoch.present(few, layout)
    for node in list(nodes.values())[:4]:  # nor does a node tell a share, whatever the server says
        with pytest.raises(RunError, match="takes 5"):
            node.unmask(number, set(range(4)))
    told = {name: nodes[name].unmask(number, set(range(5))) for name in list(nodes)[:4]}
    with pytest.raises(RunError, match="takes 5"):
        epoch.total(number, QUESTION, layout, dict(list(masked.items())[:5]), told)


@pytest.mark.parametrize(("dishonest", "read"), [(2, False), (3, True)])  # less than a third of seven, and more
def test_who_works_with_the_server_cannot_read_a_node_unless_a_third_does(dishonest: int, read: bool) -> None:
    nodes = made(7)
    number, layout, words = ready(nodes).begin(), *encode(arrays(["a"])["a"], 7)
    for node in nodes.values():
        node.mask(number, QUESTION, layout, words)
    every, both = set(range(7)), {"seed": 0, "key": 0}  # shares of the secrets of node-0
    honest = [node for place, node in enumerate(nodes.values()) if not 1 <= place <= dishonest]
    for k, node in enumerate(honest):  # to every other one the server says that node-0 has dropped out
        node.unmask(number, every if k % 2 == 0 else every - {0})
        both["seed" if k % 2 == 0 else "key"] += 1
    assert (min(both.values()) + dishonest >= threshold(7)) is read  # the dishonest tell both


# -- what nodes refuse ------------------------------------------------------------------------------------------------
def test_a_node_alone_refuses() -> None:
    nodes = made(2)
    with pytest.raises(RunError, match="takes 2"):
        ready(nodes, gone={"node-1": "keys"})
    (alone,) = made(1).values()
    epoch = Epoch(["node-0"], 1)
    keys = alone.advertise(epoch.epoch, 1)
    with pytest.raises(RunError, match="takes 2"):
        epoch.neighbours({"node-0": keys})
    from coterie.secure.messages import Neighbours

    with pytest.raises(RunError, match="wants at least 2"):
        alone.share(Neighbours(0, {}, 1, 1))


def test_a_node_may_want_more_others() -> None:
    nodes = made(4, least=5)
    with pytest.raises(RunError, match="wants at least 5"):
        ready(nodes)


def test_the_server_cannot_swap_keys_of_nodes_that_know_each_other() -> None:
    nodes = made(3)
    epoch = Epoch(list(nodes), 1)
    keys = {name: node.advertise(epoch.epoch, 1) for name, node in nodes.items()}
    said = epoch.neighbours(keys)["node-0"]
    own, (place, victim) = nodes["node-0"], next(iter(said.keys.items()))
    forged = replace(victim, letters=public_of(bytes(31) + b"\x01"))  # the signature is not of this key
    with pytest.raises(RunError, match="not signed"):
        own.share(replace(said, keys={**said.keys, place: forged}))
    impostor = made(1)["node-0"]  # signs well, with a key of its own
    impostor.name = victim.name
    own.known = {victim.name: victim.signer}
    with pytest.raises(RunError, match="another signing key"):
        own.share(replace(said, keys={**said.keys, place: impostor.advertise(epoch.epoch, 1)}))
    own.strict = True
    with pytest.raises(RunError, match="not among those"):
        own.share(said)
    own.known = {name: key.signer for name, key in keys.items()}
    assert own.share(said).keys() == said.keys.keys()


def test_keys_of_another_epoch_are_not_taken() -> None:
    nodes = made(2)
    old, new = Epoch(list(nodes), 1), Epoch(list(nodes), 1)
    stale = {name: node.advertise(old.epoch, 1) for name, node in nodes.items()}
    with pytest.raises(RunError, match="0 of 2 nodes"):
        new.neighbours(stale)


def test_a_changed_letter_is_noticed() -> None:
    nodes = made(3)
    epoch = Epoch(list(nodes), 1)
    said = epoch.neighbours({name: node.advertise(epoch.epoch, 1) for name, node in nodes.items()})
    letters = epoch.letters({name: nodes[name].share(one) for name, one in said.items()})["node-0"]
    place = next(iter(letters))
    letters[place] = letters[place][:-1] + bytes([letters[place][-1] ^ 1])
    with pytest.raises(RunError, match="changed on its way"):
        nodes["node-0"].receive(letters)


def test_a_sum_is_answered_and_unmasked_once() -> None:
    nodes = made(3)
    epoch = ready(nodes)
    layout, words = encode(arrays(["a"])["a"], 3)
    masked = {name: node.mask(0, QUESTION, layout, words) for name, node in nodes.items()}
    node = nodes["node-0"]
    with pytest.raises(RunError, match="answered already"):
        node.mask(0, QUESTION, layout, words)
    with pytest.raises(RunError, match="none of this epoch"):
        node.mask(1, QUESTION, layout, words)
    node.unmask(0, epoch.present(masked, layout)["node-0"])
    with pytest.raises(RunError, match="told already"):
        node.unmask(0, {0, 1, 2})


def test_nodes_that_were_asked_different_things_add_up_to_noise() -> None:
    nodes = made(4)
    epoch = ready(nodes)
    layout, words = encode({"a": np.zeros(100)}, 4)
    masked = {
        name: node.mask(0, QUESTION if name != "node-1" else b"something else", layout, words)
        for name, node in nodes.items()
    }
    told = {name: nodes[name].unmask(0, who) for name, who in epoch.present(masked, layout).items()}
    total = epoch.total(0, QUESTION, layout, masked, told)
    assert (total != 0).mean() > 0.9


def test_wrong_shares_stop_the_sum() -> None:
    for gone in ({}, {"node-3": "masked"}):
        nodes = made(5)
        epoch = ready(nodes)
        layout, words = encode({"a": np.ones(3)}, 5)
        masked = {n: node.mask(0, QUESTION, layout, words) for n, node in nodes.items() if n not in gone}
        told = {name: nodes[name].unmask(0, who) for name, who in epoch.present(masked, layout).items()}
        told["node-0"] = {place: bytes(32) for place in told["node-0"]}
        with pytest.raises(RunError, match="wrong: there is no sum"):
            epoch.total(0, QUESTION, layout, masked, told)


def test_a_part_of_another_length_counts_as_none() -> None:
    nodes = made(4)
    epoch = ready(nodes)
    layout, words = encode({"a": np.ones(3)}, 4)
    masked = {name: node.mask(0, QUESTION, layout, words) for name, node in nodes.items()}
    masked["node-2"] = masked["node-2"][:-1]
    present = epoch.present(masked, layout)
    assert present.keys() == {"node-0", "node-1", "node-3"}
    told = {name: nodes[name].unmask(0, who) for name, who in present.items()}
    from coterie.secure.fixed_point import decode

    total = epoch.total(0, QUESTION, layout, {name: masked[name] for name in present}, told)
    assert decode(layout, total)["a"].tolist() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("change", ["place", "threshold", "few", "twice", "kind"])
def test_neighbours_that_cannot_be_are_refused(change: str) -> None:
    nodes = made(5)
    epoch = Epoch(list(nodes), 1)
    said = epoch.neighbours({name: node.advertise(epoch.epoch, 1) for name, node in nodes.items()})["node-0"]
    first = next(iter(said.keys))
    wrong = {
        "place": replace(said, place=first),
        "threshold": replace(said, threshold=2),
        "few": replace(said, keys={first: said.keys[first]}),
        "twice": replace(said, keys=dict.fromkeys(said.keys, said.keys[first])),
        "kind": replace(said, keys={first: Keys("a", b"", b"", b"", b"", b"")}),
    }[change]
    with pytest.raises(RunError):
        nodes["node-0"].share(wrong)


def test_signing_keys_are_fresh() -> None:
    assert signing_key() != signing_key()
