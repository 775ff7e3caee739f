# SPDX-License-Identifier: Apache-2.0
"""What the server and the nodes say to each other."""

from dataclasses import dataclass, field

from torch import Tensor

from coterie.data.draws import First, Fold, Share
from coterie.data.remote import AtLeast, Cast, Divided, Folded, Newcomers, Part, Scaled, View
from coterie.engines.flower.registry import register_step, register_value
from coterie.engines.private import reveal
from coterie.engines.screening import Bounds
from coterie.protocol import Ask, ByCluster, Limit, Lowest, Mean, Noise, Stack, Sum, Tensors, WeightedMean
from coterie.robust_folds import Trimmed, TrimmedByCluster

__all__ = [
    "ASK",
    "FROM_NODES",
    "HELLO",
    "PROTOCOL",
    "Answers",
    "Batch",
    "Hello",
    "Introduction",
    "PublicKeys",
    "Question",
    "Refusal",
    "Reply",
    "Sealed",
    "Secure",
    "State",
]  # fmt: skip

# 2: one batch for many questions; 3: nodes prove who they are; 4: clients left out; 5: runs wait for approval;
# 6: secure sums; 7: noise
PROTOCOL = 7
HELLO, ASK = "query.coterie", "train.coterie"  # Flower's message types


@register_value
@dataclass(frozen=True)
class Hello:
    """Who are you, and what have you got?

    Attributes
    ----------
    run : str
        The run's identity.
    challenge : str
        What the node is to sign, drawn for this greeting alone.
    """

    run: str
    challenge: str = ""
    protocol: int = PROTOCOL


@register_value
@dataclass(frozen=True)
class Introduction:
    """What a node says of itself.

    Attributes
    ----------
    node : str
        Its name, the same after a restart.
    versions : dict
        Of coterie and torch.
    steps : tuple of str
        Client functions that it would run.
    schema : str
        JSON of its columns and classes.
    names : tuple of str
        Its clients, or what stands for their names where these are hidden, in the order of its own numbers.
    counts : dict
        Part -> [m] rows of each client.
    row : dict
        x, y -> a tensor without rows that says shape and precision.
    fingerprint : str
        What tells its rows from others, to who has heard it before: a run is not continued on other data.
    public, proof : str
        The node's public key, and its signature of the challenge: see `coterie.engines.flower.identity`.
    """

    node: str
    versions: dict[str, str]
    steps: tuple[str, ...]
    schema: str
    names: tuple[str, ...]
    counts: Tensors
    row: Tensors
    fingerprint: str
    public: str = ""
    proof: str = ""
    protocol: int = PROTOCOL


@register_value
@dataclass(frozen=True)
class State:
    """Which private state a question starts from, and where what comes of it is kept.

    Attributes
    ----------
    source, accepted : str, int
        Begin with what was kept under this name after this answer; 0 is nothing.
    store, number : str, int
        Keep under this name, as this answer. Later ones are undone.
    needed : int
        Answers before this one will never be gone back to.
    """

    source: str
    accepted: int
    store: str
    number: int
    needed: int


@register_value
@dataclass(frozen=True)
class Question:
    """The asks of several runs to some clients of a node, on one set of their rows."""

    run: str
    part: Part | Folded
    views: tuple[View, ...]
    schema: str | None  # the federation's, where it is not the node's own
    ids: Tensor  # the node's own numbers, ascending
    asks: dict[int, Ask]
    state: State
    after: int | None = None  # the question of the batch whose private state it goes on from, in place of what was kept
    bounds: dict[int, Bounds] = field(default_factory=dict)  # run -> what its clients' answers may be


@register_value
@dataclass(frozen=True)
class PublicKeys:
    """A node's `coterie.secure.messages.Keys`, as it travels; `place` is the node's among all, -1 where it has none yet."""

    name: str
    letters: Tensor
    masks: Tensor
    seeds: Tensor
    signer: Tensor
    signature: Tensor
    place: int = -1


@register_value
@dataclass(frozen=True)
class Secure:
    """What a node is to do for a secure sum: see `coterie.secure.node`.

    Attributes
    ----------
    step : str
        "keys", "letters", "mask" (with the questions of the batch) or "unmask".
    run, epoch : str
        The run, and the exchange of keys, in hexadecimal digits.
    sums, number : int
        How many sums keys are for, and which of them is meant.
    place, n_nodes, threshold : int
        For letters: the node's place among all, how many these are, and the shares that a secret takes.
    neighbours : tuple of PublicKeys
        For letters.
    places : tuple of int
        Whose letters are handed over, or who is present.
    letters : Tensor or None
        A letter a row, once, with the first sum.
    """

    step: str
    run: str
    epoch: str
    sums: int = 0
    number: int = 0
    place: int = 0
    n_nodes: int = 0
    threshold: int = 0
    neighbours: tuple[PublicKeys, ...] = ()
    places: tuple[int, ...] = ()
    letters: Tensor | None = None


@register_value
@dataclass(frozen=True)
class Sealed:
    """What a node says for a secure sum: its keys, letters, a masked part, or shares."""

    keys: PublicKeys | None = None
    places: tuple[int, ...] = ()
    letters: Tensor | None = None
    layout: list[list[object]] = field(default_factory=list)
    words: Tensor | None = None


@register_value
@dataclass(frozen=True)
class Batch:
    """All that a node is asked in one message, to be answered one after the other; with `secure`, in one secure sum."""

    questions: tuple[Question, ...]
    secure: Secure | None = None


@register_value
@dataclass(frozen=True)
class Answers:
    """What came of a question.

    Attributes
    ----------
    number : int
        Of the question.
    parts : dict
        Run -> field -> what its fold made of the clients' replies.
    ids : Tensor
        Who answered.
    kept : bool
        Whether private state has changed and was kept.
    lost : bool
        Whether private state was asked for that is not there any more, so that clients began anew.
    left_out : dict
        Run -> the node's number of a client whose answer does not count -> why.
    lengths : dict
        Run -> field -> clients counted by the length of their values.
    """

    number: int
    parts: dict[int, dict[str, Tensors]]
    ids: Tensor
    kept: bool
    lost: bool
    left_out: dict[int, dict[int, str]] = field(default_factory=dict)
    lengths: dict[int, Tensors] = field(default_factory=dict)


@register_value
@dataclass(frozen=True)
class Reply:
    """What a node makes of a batch: an answer to each question; of a secure sum these have no parts."""

    node: str
    answers: tuple[Answers, ...]
    sealed: Sealed | None = None


@register_value
@dataclass(frozen=True)
class Refusal:
    """A node cannot answer, and says why; `waits` if it may, as soon as its owner has approved the run."""

    node: str
    why: str
    hint: str = field(default="")
    waits: bool = False


FROM_NODES = (Introduction, Reply, Answers, Refusal, Sealed, PublicKeys)  # all that a server makes of what nodes say

for _kind in (
    Ask,
    Noise,
    Limit,
    Bounds,
    Trimmed,
    TrimmedByCluster,
    Sum,
    Mean,
    WeightedMean,
    ByCluster,
    Stack,
    Lowest,
    Part,
    Folded,
    Scaled,
    Cast,
    Divided,
    Share,
    First,
    Fold,
    Newcomers,
    AtLeast,
):
    register_value(_kind)
register_step(reveal)
