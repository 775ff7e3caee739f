# SPDX-License-Identifier: Apache-2.0
"""Augmentation: mirrors and crops of pictures, driven by keys."""

from dataclasses import replace

import pytest
import torch

from coterie import keys
from coterie.data.ragged import Ragged
from coterie.local import Training, train
from coterie.models import Network
from coterie.studies.data.augment import Flat, crop, flip, flip_and_crop
from helpers import one_block


def pictures_and_keys(C: int = 5, B: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.rand(C, B, 3, 8, 8, generator=torch.Generator().manual_seed(0)) + 1.0  # nowhere zero, all pixels differ
    return x, keys.key(1, "augment", torch.arange(C)[:, None], torch.arange(B))


def test_augmented_picture_is_a_crop_of_the_padded_picture_or_its_mirror() -> None:
    x, each = pictures_and_keys()
    out = flip_and_crop(x, each)
    assert out.shape == x.shape
    padded = torch.nn.functional.pad(x, (4, 4, 4, 4))
    mirrored = torch.nn.functional.pad(x.flip(-1), (4, 4, 4, 4))
    for c in range(5):
        for b in range(7):
            crops = [p[c, b, :, i : i + 8, j : j + 8] for p in (padded, mirrored) for i in range(9) for j in range(9)]
            assert sum(torch.equal(out[c, b], crop) for crop in crops) == 1


def test_places_and_mirrors_are_uniform() -> None:
    n = 8100
    x = torch.zeros(1, n, 1, 9, 9)
    x[..., 4, 4], x[..., 4, 3] = 1.0, 2.0  # after padding by 4 the 1 can land on any of the 81 pixels
    out = flip_and_crop(x, keys.key(torch.arange(n))[None])[0, :, 0]
    places = (out == 1.0).double().sum(0)
    assert float(places.sum()) == n
    # 100 expected on each of 81 pixels: chi-square with 80 degrees of freedom is below 125 in 99.9 % of cases.
    assert float(((places - 100) ** 2 / 100).sum()) < 125
    mirrored = ((out[:, :, :-1] == 1.0) & (out[:, :, 1:] == 2.0)).any((1, 2)).double().mean()
    # Seen unless the 1 lands in the last column: 1/2 x 8/9, standard error 0.0055.
    assert float(mirrored) == pytest.approx(4 / 9, abs=0.025)


def test_augmentation_depends_on_the_key_only() -> None:
    x, each = pictures_and_keys()
    out = flip_and_crop(x, each)
    assert torch.equal(flip_and_crop(x[3:4, 2:5], each[3:4, 2:5]), out[3:4, 2:5])
    assert torch.equal(flip_and_crop(x.flip(1), each.flip(1)), out.flip(1))
    assert not torch.equal(flip_and_crop(x, each + 1), out)


def test_without_padding_only_mirrors_remain() -> None:
    x, each = pictures_and_keys()
    out = flip_and_crop(x, each, padding=0)
    same = (out == x).flatten(2).all(-1)
    mirrored = (out == x.flip(-1)).flatten(2).all(-1)
    assert bool((same ^ mirrored).all())
    assert bool(same.any())
    assert bool(mirrored.any())


def test_flip_then_crop_are_the_parts_of_both() -> None:
    x, each = pictures_and_keys()
    assert torch.equal(flip_and_crop(x, each, padding=2), crop(flip(x, each), each, padding=2))
    assert torch.equal(crop(x, each, padding=0), x)
    mirrored = (flip(x, each) == x.flip(-1)).flatten(2).all(-1)
    assert torch.equal(mirrored, keys.uniform(each, 1)[..., 0] < 0.5)


def test_flat_rows_are_augmented_as_the_pictures_that_they_are() -> None:
    x, each = pictures_and_keys()
    flat = Flat(flip_and_crop, (3, 8, 8))
    assert torch.equal(flat(x.flatten(2), each), flip_and_crop(x, each).flatten(2))


def test_pictures_themselves_stay_as_they_are() -> None:
    x, each = pictures_and_keys()
    before = x.clone()
    flip_and_crop(x, each)
    Flat(flip_and_crop, (3, 8, 8))(x.flatten(2), each)
    assert torch.equal(x, before)


def test_local_training_augments_and_a_client_gets_in_a_block_what_it_gets_alone() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(64, 3)).double()
    model = Network(module, "cross_entropy", augment=Flat(flip_and_crop, (1, 8, 8)))
    x = torch.rand(4, 6, 64, dtype=torch.float64)
    rows = Ragged.from_blocks(x, torch.randint(3, (4, 6)))
    theta = model.initial(1, torch.Generator().manual_seed(1)).expand(1, 4, -1)
    how, eta, key = Training(epochs=2, batch_size=4), torch.tensor([0.1]), keys.key(0)[None]
    together = train(model, theta, one_block(rows), eta, how, key)[0]
    alone = train(model, theta[:, :1], rows.client(2), eta, how, key)[0, 0]
    torch.testing.assert_close(together[2], alone, atol=1e-12, rtol=0)  # one client's products may round otherwise
    plain = train(replace(model, augment=None), theta, one_block(rows), eta, how, key)[0]
    assert not torch.allclose(together, plain)
