# SPDX-License-Identifier: Apache-2.0
"""Answers that are differentially private for clients: each client's part is bounded, and sums have noise.

A worker does both before anything leaves it. One of several, whose sums are added securely, adds its share of the noise: the
variance over the number of nodes without which there is no sum.
"""

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from coterie.errors import RunError
from coterie.privacy.noise import Noises
from coterie.protocol import WITHIN, Ask, ByCluster, RowProduct, Sum, Tensors

__all__ = ["bounded", "check_noise", "noised", "word_of"]

_HINT = "see docs/differential-privacy.md for what can be asked with privacy.epsilon"
_ROUNDING = 1 + 1e-6


def check_noise(ask: Ask) -> None:
    """Refuse an answer of which not every field is a sum with a bound for each client."""
    name, noise = ask.step.__name__, ask.noise
    if noise is None:
        raise RunError(f"'{name}' would be answered without noise, and the run has a privacy budget", _HINT)
    read = set()
    for field, how in ask.fold.items():
        if not isinstance(how, Sum | ByCluster):
            raise RunError(f"'{field}' of '{name}' is no sum over clients that noise could hide them in", _HINT)
        read |= {field, *how.needs}
    for field in sorted(read):
        bound, weight = noise.bounds.get(field), noise.weights.get(field)
        if not _is_positive(bound) or not _is_positive(weight):
            raise RunError(f"'{field}' of '{name}' has no bound for what one client can add", _HINT)
    if not _is_positive(noise.multiplier) or not 0 < noise.sampling <= 1:
        raise RunError(f"'{name}' is to be answered with no noise", _HINT)
    if sum(noise.weights[field] for field in read) > _ROUNDING:
        raise RunError(f"fields of '{name}' have less noise than they are said to cost", _HINT)


def bounded(ask: Ask, reply: dict[str, Any]) -> dict[str, Any]:
    """Shorten every client's values to their bounds; what is not finite counts as zero."""
    noise = ask.noise
    assert noise is not None
    shares = {name for how in ask.fold.values() for name in how.needs}
    out = dict(reply)
    for name in {*ask.fold, *shares} - {WITHIN}:
        value = reply[name]
        value = value.formed() if isinstance(value, RowProduct) else value
        value = value if value.is_floating_point() else value.to(torch.float64)
        how = ask.fold.get(name)
        lead = 3 if isinstance(how, ByCluster) and how.per_cluster else 2
        out[name], within = _shortened(value.clamp(min=0) if name in shares else value, noise.bounds[name], lead)
        if name == next(iter(ask.fold)) and WITHIN in ask.fold:
            out[WITHIN] = torch.where(within, 1.0, -1.0).to(torch.float64)
    return out


def _shortened(value: Tensor, bound: float, lead: int) -> tuple[Tensor, Tensor]:
    """Each client's value, at most as long as its bound, and whether it was.  [S, C, ...] -> [S, C, ...], [S, C]"""
    flat = value.reshape(*value.shape[:lead], -1)
    length = torch.linalg.vector_norm(flat, dim=-1, dtype=torch.float64)
    finite = length.isfinite()
    factor = torch.where(length > bound, bound / length.clamp(min=bound), 1.0)
    factor = torch.where(length > bound, factor * (1 - torch.finfo(value.dtype).eps), factor)
    flat = torch.where(finite[..., None], flat, 0.0) * factor[..., None].to(value.dtype)
    within = finite & (length <= bound)
    return flat.reshape(value.shape), within if lead == 2 else within.all(-1)


def noised(ask: Ask, parts: dict[str, Tensors], noises: Noises, share: float, rows: bytes) -> dict[str, Tensors]:
    """Add this worker's share of the noise to what it has folded of some rows.

    Where clients answer from what they keep, which may change, noise depends on the answer as well.
    """
    noise = ask.noise
    assert noise is not None
    word = rows + word_of(ask)
    if noises.repeats and ask.fresh:
        word += b"".join(one.contiguous().numpy().tobytes() for part in parts.values() for one in part.values())
    out: dict[str, Tensors] = {}
    for field, part in parts.items():
        how = ask.fold[field]
        names = {"sum": field, "weight": how.share} if isinstance(how, ByCluster) else {"sum": field}
        out[field] = {
            key: noises.added(value, noise.deviation(names[key]) * math.sqrt(share), word + f"{field}/{key}".encode())
            for key, value in part.items()
        }
    return out


def word_of(ask: Ask) -> bytes:
    """What tells a question from others."""
    found = hashlib.sha256()
    found.update(f"{ask.step.__module__}.{ask.step.__name__} {dict(ask.fold)!r} {ask.noise!r}".encode())
    for name, value in sorted(ask.shared.items()):
        found.update(name.encode())
        found.update(value.contiguous().numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode())
    return found.digest()


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
