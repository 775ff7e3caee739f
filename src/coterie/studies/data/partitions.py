# SPDX-License-Identifier: Apache-2.0
"""Deal labelled rows to clients that differ: shards of classes, Dirichlet shares of classes, writers.

Shards: the data allocation of straggler-resilient personalisation, where every client has equally many rows of the same
number of classes, and test rows to match. Departure: a client's classes are all different (shards that are dealt blindly
may give it one twice), and every class has as many clients as any other. Dirichlet: Yurochkin et al., ICML 2019.
"""

from collections.abc import Sequence

import numpy as np
import torch

from coterie import keys
from coterie.errors import ConfigError, DataError
from coterie.studies.data.holdings import PartitionIndices, Rows

__all__ = ["by_writer", "dirichlet", "shards"]

_DRAWS = 100  # of Dirichlet shares, for one that leaves every client rows enough


# -- shards of classes ------------------------------------------------------------------------------------------------
def shards(
    y: np.ndarray,
    *,
    n_clients: int,
    classes_per_client: int,
    rows_per_client: int,
    y_test: np.ndarray | None = None,
    test_rows_per_client: int | None = None,
    seed: int,
) -> PartitionIndices:
    """Deal every client equally many rows of each of its S classes, and test rows of the same classes.

    Which classes a client has is random; every class has as many clients as any other (or one more).

    Parameters
    ----------
    y : ndarray
        [N] class of each row.
    n_clients, classes_per_client, rows_per_client : int
        M clients with S different classes and as many training rows each, spread evenly over the classes.
    y_test : ndarray, optional
        [N] class of each row of a test set; without one, test rows are rows of `y` that nobody trains on.
    test_rows_per_client : int, optional
        Test rows of each client, spread likewise; by default as many as are left for everybody.
    seed : int
        Decides who holds what.

    Returns
    -------
    PartitionIndices
        Row numbers of each client.

    Raises
    ------
    ConfigError
        If the sizes make no sense.
    DataError
        If there are too few rows of a class.
    """
    classes = np.unique(y)  # [K]
    if n_clients < 1 or not 1 <= classes_per_client <= min(len(classes), rows_per_client):
        raise ConfigError(
            f"cannot deal {rows_per_client} rows of {classes_per_client} classes to {n_clients} clients",
            f"there are {len(classes)} classes; a client needs a row of each of its own",
        )
    held = _deal_classes(len(classes), n_clients, classes_per_client, seed)  # [M, S]
    train, left = _deal_rows(_pools(y, classes, seed, "train"), classes, held, rows_per_client, "training")
    if y_test is not None:
        left = _pools(y_test, classes, seed, "test")
    if test_rows_per_client is None:
        test_rows_per_client = _most(left, held)
    if test_rows_per_client < classes_per_client:
        raise DataError(
            f"{test_rows_per_client} test rows cannot match {classes_per_client} classes",
            "leave every client a test row of each of its classes: fewer clients, or fewer training rows",
        )
    test, _ = _deal_rows(left, classes, held, test_rows_per_client, "test")
    return PartitionIndices(train, test, _names("client", np.arange(n_clients)), y_test is not None)


def _deal_classes(n_classes: int, n_clients: int, each: int, seed: int) -> np.ndarray:
    """Give clients, one after the other, the classes of which most places are left, equals at random.  [M, S]"""
    places = n_clients * each
    left = places // n_classes + (_permutation(n_classes, seed, "places") < places % n_classes)  # [K]
    u = keys.uniform(keys.key(seed, "classes", torch.arange(n_clients)), n_classes).numpy()  # [M, K]
    held = np.empty((n_clients, each), dtype=np.int64)
    for own, draw in zip(held, u, strict=True):
        own[:] = np.lexsort((draw, -left))[:each]  # this way round there are always enough different ones left
        left[own] -= 1
    return held


def _most(pools: Sequence[np.ndarray], held: np.ndarray) -> int:
    """Rows that there are for every client, equally many of each of its classes."""
    holders = np.bincount(held.ravel(), minlength=len(pools))
    least: int = min(len(pool) // n for pool, n in zip(pools, holders.tolist(), strict=True) if n)
    return int(held.shape[1] * least)


def _deal_rows(
    pools: Sequence[np.ndarray], classes: np.ndarray, held: np.ndarray, rows: int, part: str
) -> tuple[Rows, list[np.ndarray]]:
    """Deal rows of the classes that clients hold; tell what is left of each class."""
    n_own = held.shape[1]
    amount = rows // n_own + (np.arange(n_own) < rows % n_own)  # [S]
    needed = np.bincount(held.ravel(), np.tile(amount, len(held)), minlength=len(pools)).astype(np.int64)
    for pool, label, n in zip(pools, classes, needed, strict=True):
        if n > len(pool):
            raise DataError(
                f"clients need {n} {part} rows of class {label}; there are {len(pool)}",
                f"ask for at most {_most(pools, held)} {part} rows a client, or for fewer clients",
            )
    left, dealt = list(pools), []
    for own in held:
        dealt.append(np.concatenate([left[k][:n] for k, n in zip(own, amount, strict=True)]))
        for k, n in zip(own, amount, strict=True):
            left[k] = left[k][n:]
    return tuple(dealt), left


# -- Dirichlet shares -------------------------------------------------------------------------------------------------
def dirichlet(
    y: np.ndarray,
    *,
    n_clients: int,
    concentration: float,
    y_test: np.ndarray | None = None,
    test_share: float = 0.2,
    min_rows: int = 1,
    seed: int,
) -> PartitionIndices:
    """Deal all rows of each class by shares that are drawn from Dirichlet(concentration), test rows by the same shares.

    Parameters
    ----------
    y : ndarray
        [N] class of each row.
    n_clients : int
        M clients; they differ in the number of their rows too.
    concentration : float
        The smaller, the fewer classes a client has; with a large one all clients are alike.
    y_test : ndarray, optional
        [N] class of each row of a test set; without one, `test_share` of the rows of every class become test rows.
    test_share : float
        See `y_test`.
    min_rows : int
        Shares are drawn again until every client has so many training rows.
    seed : int
        Decides who holds what.

    Returns
    -------
    PartitionIndices
        Row numbers of each client. A client with few training rows may have no test rows.

    Raises
    ------
    ConfigError
        If the sizes make no sense, or no draw gives every client rows enough.
    """
    _check_share(test_share)
    if n_clients < 1 or not 0 < concentration < np.inf or min_rows < 0:
        raise ConfigError(
            f"cannot deal rows to {n_clients} clients with concentration {concentration}, {min_rows} at least",
            "there is at least one client, the concentration is positive, and the rows are not negative",
        )
    classes = np.unique(y)
    train = _pools(y, classes, seed, "train")
    if y_test is not None:
        test = _pools(y_test, classes, seed, "test")
    else:
        train, test = _held_out(train, test_share, at_least=0)
    for draw in range(_DRAWS):
        random = np.random.default_rng(int(keys.key(seed, "dirichlet", draw)) % (1 << 63))
        shares = random.dirichlet(np.full(n_clients, concentration), len(classes))  # [K, M]
        held = _by_shares(train, shares)
        if min(map(len, held)) >= min_rows:
            return PartitionIndices(
                held, _by_shares(test, shares), _names("client", np.arange(n_clients)), y_test is not None
            )
    raise ConfigError(
        f"in {_DRAWS} draws some of {n_clients} clients always had fewer than {min_rows} rows",
        "ask for fewer clients, a larger concentration or a smaller min_rows",
    )


def _by_shares(pools: Sequence[np.ndarray], shares: np.ndarray) -> Rows:
    """Cut every class where its shares say.  shares [K, M]"""
    cuts = [np.rint(share.cumsum()[:-1] * len(pool)).astype(int) for pool, share in zip(pools, shares, strict=True)]
    pieces = [np.split(pool, cut) for pool, cut in zip(pools, cuts, strict=True)]  # [K][M]
    return tuple(np.concatenate(own) for own in zip(*pieces, strict=True))


# -- writers ----------------------------------------------------------------------------------------------------------
def by_writer(
    writers: np.ndarray | None,
    *,
    writers_test: np.ndarray | None = None,
    test_share: float = 0.2,
    min_rows: int = 2,
    n_clients: int | None = None,
    seed: int,
) -> PartitionIndices:
    """Make every writer a client.

    Parameters
    ----------
    writers : ndarray
        [N] who wrote each row: numbers or names, such as `Images.writer_train`.
    writers_test : ndarray, optional
        [N] the same for a test set by the same people; without one, `test_share` of everybody's rows (at least one) become
        test rows. For people who wrote a test set only, as in MNIST, deal the test set on its own.
    test_share : float
        See `writers_test`.
    min_rows : int
        Writers with fewer rows in `writers` are left out; at least 2.
    n_clients : int, optional
        So many of the writers, drawn at random; by default all.
    seed : int
        Decides which rows are test rows, and which writers take part.

    Returns
    -------
    PartitionIndices
        Row numbers of each client; clients are named after the writers.

    Raises
    ------
    ConfigError
        If the sizes make no sense.
    DataError
        If writers are not known, or too few have rows enough.
    """
    _check_share(test_share)
    if writers is None:
        raise DataError("these images have no writers", "read them with their writers: mnist(writers=True)")
    if min_rows < 2 or (n_clients is not None and n_clients < 1):
        raise ConfigError(
            f"cannot train and test {n_clients or 'all'} writers with {min_rows} rows",
            "ask for at least one writer, with at least 2 rows",
        )
    found, counts = np.unique(writers, return_counts=True)
    found = found[counts >= min_rows]
    if len(found) < (n_clients or 1):
        raise DataError(f"{len(found)} writers have {min_rows} rows or more", "ask for fewer writers or fewer rows")
    if n_clients is not None:
        found = np.sort(found[_permutation(len(found), seed, "writers")[:n_clients]])
    train = _pools(writers, found, seed, "train")
    if writers_test is not None:
        test = _pools(writers_test, found, seed, "test")
    else:
        train, test = _held_out(train, test_share, at_least=1)
    return PartitionIndices(tuple(train), tuple(test), _names("writer", found), writers_test is not None)


# -- what they share --------------------------------------------------------------------------------------------------
def _pools(labels: np.ndarray, values: np.ndarray, seed: int, part: str) -> list[np.ndarray]:
    """Shuffle the rows, and gather them by label: a pool for each of the values, which are ascending."""
    order = _permutation(len(labels), seed, "pools", part)
    place = np.searchsorted(values, labels[order]).clip(max=len(values) - 1)
    wanted = values[place] == labels[order]
    order, place = order[wanted], place[wanted]
    sizes = np.bincount(place, minlength=len(values))
    return np.split(order[np.argsort(place, kind="stable")], sizes.cumsum()[:-1])


def _held_out(pools: list[np.ndarray], share: float, at_least: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Hold out a share of every pool, and a number of rows at least, but never the last row."""
    cuts = [min(max(round(share * len(pool)), at_least), max(len(pool) - 1, 0)) for pool in pools]
    rest = [pool[cut:] for pool, cut in zip(pools, cuts, strict=True)]
    return rest, [pool[:cut] for pool, cut in zip(pools, cuts, strict=True)]


def _check_share(share: float) -> None:
    if not 0 < share < 1:
        raise ConfigError(f"cannot hold out a share of {share}", "give a test_share between 0 and 1")


def _names(kind: str, values: np.ndarray) -> np.ndarray:
    """Name clients after numbers or names, so that names ascend as these do."""
    text = values.astype(str)
    width = max(4, *map(len, text)) if values.dtype.kind in "iu" else 0
    return np.array([f"{kind}-{word.zfill(width)}" for word in text])


def _permutation(n: int, *parts: int | str) -> np.ndarray:
    return torch.randperm(n, generator=keys.generator(*parts)).numpy()
