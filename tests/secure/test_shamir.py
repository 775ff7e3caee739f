# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest
from scipy.stats import chisquare

from coterie.errors import RunError
from coterie.secure.shamir import PRIME, SIZE, draw_secret, recovered, split


def test_any_shares_up_to_the_threshold_give_the_secret() -> None:
    secret = draw_secret()
    shares = split(secret, 3, [1, 2, 5, 9, 13])
    for some in itertools.combinations(shares, 3):
        assert recovered({place: shares[place] for place in some}, 3) == secret
    assert recovered(shares, 3) == secret


def test_fewer_shares_are_refused() -> None:
    shares = split(draw_secret(), 3, [1, 2, 3])
    with pytest.raises(RunError, match="fewer than the 3"):
        recovered({1: shares[1], 2: shares[2]}, 3)


def test_fewer_shares_fit_every_secret() -> None:
    # with t - 1 shares, each other secret has exactly one polynomial: the missing share decides
    secret, other = draw_secret(), draw_secret()
    shares = split(secret, 3, [1, 2, 3])
    whole = int.from_bytes(other, "little")
    y1, y2 = (int.from_bytes(shares[x], "little") for x in (1, 2))
    forged = (whole - 3 * y1 + 3 * y2) % PRIME  # the value at 3 of the polynomial of degree 2 through 0, 1 and 2
    assert recovered({1: shares[1], 2: shares[2], 3: forged.to_bytes(SIZE, "little")}, 3) == other


def test_shares_of_one_secret_are_spread_evenly() -> None:
    secret = draw_secret()
    low = [split(secret, 2, [1, 2])[1][0] for _ in range(5000)]
    counts = [sum(16 * i <= byte < 16 * (i + 1) for byte in low) for i in range(16)]
    assert chisquare(counts).pvalue > 1e-6


@pytest.mark.parametrize(("threshold", "places"), [(0, [1, 2]), (3, [1, 2]), (2, [1, 1]), (1, [0]), (1, [PRIME])])
def test_thresholds_and_places_that_cannot_be_are_refused(threshold: int, places: list[int]) -> None:
    with pytest.raises(RunError):
        split(draw_secret(), threshold, places)


def test_what_is_not_in_the_field_is_refused() -> None:
    with pytest.raises(RunError):
        split(b"\xff" * SIZE, 1, [1])
    with pytest.raises(RunError):
        split(b"short", 1, [1])
    with pytest.raises(RunError):
        recovered({1: b"\xff" * SIZE, 2: bytes(SIZE)}, 2)


def test_the_modulus_is_prime() -> None:
    # Fermat's test to many bases; that it is prime is known
    assert all(pow(base, PRIME - 1, PRIME) == 1 for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29))
