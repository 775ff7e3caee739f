# SPDX-License-Identifier: Apache-2.0
"""Messages keep what they carry exactly, and carry nothing that could run."""

import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from safetensors.torch import save

import coterie.engines.flower.catalogue
from coterie.algorithms.fedavg import train_shared
from coterie.algorithms.preparation import Scaling
from coterie.data.draws import Share
from coterie.data.remote import Cast, Divided, Part, Scaled
from coterie.engines.flower import registry
from coterie.engines.flower.messages import FROM_NODES, Question, Refusal, State
from coterie.engines.flower.wire import fingerprint, from_records, from_text, tensors_in, to_records, to_text
from coterie.errors import ConfigError, CoterieError, RunError
from coterie.local import Training
from coterie.models import Dense, Network, split
from coterie.models.mixtures import Gaussian, Regression
from coterie.protocol import Ask, ByCluster, Stack, Sum, WeightedMean


def travelled(value: Any) -> Any:
    """What comes out at the other end of Flower's own encoding."""
    return from_records(recorddict_from_proto(recorddict_to_proto(to_records(value))))


def spoilt(document: Any) -> RecordDict:
    """A message that says this."""
    return saying(json.dumps(document))


def saying(text: str) -> RecordDict:
    """A message with this document."""
    nothing = to_records(None)["coterie-document"]
    return RecordDict({"coterie-document": ConfigRecord({**nothing, "json": text})})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(True),
        torch.tensor([[True], [False]]),
        torch.tensor(-1),
        torch.tensor([2**62, -(2**62)]),
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor([0.1, math.nan, -math.inf]),
        torch.zeros(0, 3),
        torch.zeros(2, 0, dtype=torch.float64),
        torch.arange(6).reshape(2, 3).T,
        torch.ones(1, 4).expand(3, 4),
    ],
)
def test_tensors_keep_dtype_shape_and_every_bit(tensor: Tensor) -> None:
    found = travelled({"t": tensor})["t"]
    assert found.dtype == tensor.dtype
    assert found.shape == tensor.shape
    assert torch.equal(found.nan_to_num(7.0), tensor.nan_to_num(7.0))


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        0.1 + 0.2,
        5e-324,
        math.inf,
        "words",
        [1, "a"],
        (1, (2.5, None)),
        {0: {"a": (True,)}},
        Training(epochs=2, batch_size=10),
        Dense((3, 4, 2), "cross_entropy", l2=0.1, dtype=torch.float32),
        split(Dense((3, 4, 2), "cross_entropy"), ("1",)),
        Gaussian(3, "full"),
        Regression(3),
        ByCluster("share", per_cluster=True),
        Divided(Share(0.2), 7, "validation", True),
    ],
)
def test_values_come_out_equal(value: Any) -> None:
    found = travelled(value)
    assert found == value
    assert type(found) is type(value)


def test_a_question_comes_out_whole() -> None:
    theta = torch.randn(2, 4, dtype=torch.float64)
    ask = Ask(
        train_shared,
        {"model": Dense((3, 1), "squared"), "theta": theta, "by_rows": True},
        {"update": WeightedMean("weight"), "n": Sum(), "all": Stack()},
        each={"label": torch.tensor([0, 1])},
        fresh={"label": torch.tensor(-1)},
        work=3.0,
    )
    zero = torch.zeros(3, dtype=torch.float64)
    views = (Scaled(Scaling(zero, zero, zero + 2, zero[0], zero[0] + 1)), Cast(torch.float32))
    state = State("fit", 3, "fit", 4, 2)
    found = travelled(Question("run", Part("train"), views, None, torch.tensor([0, 2]), {5: ask}, state))
    assert found.asks[5].step is train_shared
    assert torch.equal(found.asks[5].shared["theta"], theta)
    assert found.asks[5].fold == ask.fold
    assert (found.views[0].by.scale == 2).all()
    assert found.state == state


def test_a_tensor_that_is_used_twice_is_sent_once() -> None:
    theta = torch.randn(3)
    assert len(tensors_in(to_records([theta, (theta, {"again": theta})]))) == 1


def test_many_tensors_are_few_objects_to_flower() -> None:
    few, many = (to_records([torch.full((3,), float(i)) for i in range(n)]) for n in (1, 40))
    assert len(get_all_nested_objects(many)) == len(get_all_nested_objects(few)) == 2  # each costs six requests


def test_a_network_of_ones_own_is_sent_by_name() -> None:
    module = nn.Linear(3, 1)
    with pytest.raises(ConfigError, match="a Linear cannot be sent"):
        to_records(Network(module, "squared"))
    registry.register_named("test-wire", module)
    found = travelled(Network(module, "squared", kernel="loop"))
    assert found.module is module
    assert found.kernel == "loop"


def test_client_functions_must_be_registered() -> None:
    def step() -> None: ...

    with pytest.raises(ConfigError, match="not registered"):
        to_records(Ask(step, {}, {}))  # type: ignore[arg-type]
    for known in coterie.engines.flower.catalogue.STEPS:
        assert registry.step(registry.step_name(known)) is known


def test_a_second_function_or_dataclass_of_a_name_is_refused() -> None:
    def train_shared() -> None: ...

    train_shared.__module__ = "coterie.algorithms.fedavg"
    with pytest.raises(ConfigError, match="another client function"):
        registry.register_step(train_shared)

    @dataclass(frozen=True)
    class Training: ...

    with pytest.raises(ConfigError, match="another dataclass"):
        registry.register_value(Training)
    with pytest.raises(ConfigError, match="not a dataclass"):
        registry.register_value(int)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"step": "os.system"}, "no client function 'os.system'"),
        ({"type": "Popen", "fields": {}}, "no dataclass 'Popen'"),
        ({"type": "Training", "fields": {"steps": 1, "evil": 2}}, "cannot be understood"),
        ({"named": "nothing"}, "no object 'nothing'"),
        ({"tensor": "7"}, "cannot be understood"),
        ({"pickle": "gASV"}, "cannot be understood"),
        ({"a": 1, "b": 2}, "cannot be understood"),
    ],
)
def test_what_is_not_registered_is_not_made(document: Any, said: str) -> None:
    with pytest.raises(CoterieError, match=said):
        from_records(spoilt(document))


def test_arrays_must_be_what_they_say() -> None:
    good = to_records(torch.zeros(2, 3))["coterie-document"]["tensors"]
    assert isinstance(good, bytes)
    header = json.loads(good[8 : 8 + int.from_bytes(good[:8], "little")])

    def lying(**lie: Any) -> bytes:
        said = json.dumps({"0": {**header["0"], **lie}}).encode()
        return len(said).to_bytes(8, "little") + said + bytes(24)

    lies = [
        good[:-4], b"\x80\x04K\x01.", b"", b"\xff" * 64, lying(shape=[3, 3]), lying(dtype="F64"),
        lying(data_offsets=[0, 1 << 40]), save({"0": torch.zeros(2, 3, dtype=torch.bfloat16)}),
    ]  # fmt: skip
    for records in (*map(holding, lies), *map(as_array, lies), as_array(good, "numpy.ndarray")):
        with pytest.raises(RunError, match="cannot be read"):
            from_records(records)


def holding(data: bytes) -> RecordDict:
    """A message with a tensor that is in these bytes."""
    return RecordDict({"coterie-document": ConfigRecord({"json": '{"tensor": "0"}', "tensors": data})})


def as_array(data: bytes, kind: str = "safetensors") -> RecordDict:
    """The same as an array, as large messages are."""
    array = Array(dtype="uint8", shape=(len(data),), stype=kind, data=data)
    document = ConfigRecord({"json": '{"tensor": "0"}'})
    return RecordDict({"coterie-document": document, "coterie-arrays": ArrayRecord({"tensors": array})})


def test_few_numbers_are_one_object_and_many_are_an_array() -> None:
    for size, records in ((1000, 1), (1 << 18, 2)):
        sent = torch.arange(size, dtype=torch.float64)
        made = to_records(sent)
        assert len(made) == records
        assert torch.equal(from_records(made), sent)


def claiming(shape: Any, begin: int, end: int, more: int = 0) -> RecordDict:
    """A message whose tensor is said to be of this shape in these bytes."""
    said = json.dumps({"0": {"dtype": "F64", "shape": shape, "data_offsets": [begin, end]}}).encode()
    data = len(said).to_bytes(8, "little") + said + bytes(more)
    return holding(data)


@pytest.mark.parametrize(
    ("records", "said"),
    [
        (claiming([1 << 45], 0, 8 << 45), "at most 4,294,967,296 numbers"),
        (claiming([1 << 45, 0], 0, 0), "at most 4,294,967,296 numbers"),
        (claiming([0, 1 << 62, 1 << 62], 0, 0), "at most 4,294,967,296 numbers"),
        (claiming([2], 0, 16, more=8), r"a tensor of shape \[2\] in the bytes 0 to 16 of 8"),
        (claiming([2], 16, 0, more=16), "in the bytes 16 to 0"),
        (claiming([-1, -1], 0, 8, more=8), r"a tensor of shape \[-1, -1\]"),
        (claiming([True], 0, 8, more=8), r"a tensor of shape \[True\]"),
        (claiming([1] * 13, 0, 8, more=8), "a tensor of shape"),
        (claiming("[" * 5_000, 0, 8), "a tensor of shape"),
    ],
)
def test_what_a_header_claims_is_held_against_what_is_there(records: RecordDict, said: str) -> None:
    with pytest.raises(RunError, match=f"a message cannot be read: .*{said}"):
        from_records(records)


def test_no_byte_of_a_message_becomes_two_tensors() -> None:
    about = {"dtype": "F64", "shape": [2], "data_offsets": [0, 16]}
    said = json.dumps(dict.fromkeys(map(str, range(1_000)), about)).encode()
    data = len(said).to_bytes(8, "little") + said + bytes(16)
    with pytest.raises(RunError, match="in the bytes 0 to 16 of 16"):
        from_records(holding(data))


def test_a_flag_is_one_or_nothing() -> None:
    data = to_records(torch.tensor([True, False]))["coterie-document"]["tensors"]
    assert isinstance(data, bytes)
    assert int(from_records(holding(data[:-2] + b"\xff\x00")).sum()) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 200_000 + "]" * 200_000, "cannot be read: RecursionError"),
        ('{"tuple": [' * 100 + "]}" * 100, "more than 64 levels or 1,048,576 values"),
        ("[" + "0," * (1 << 20) + "0]", "more than 64 levels or 1,048,576 values"),
        ('"' + "a" * (1 << 24) + '"', "no text of at most 16,777,216 characters"),
        ("[" + "[]," * (1 << 20) + "0]", "more than 1,048,576 lists and maps"),
        ("1" * 5_000, "cannot be read"),
        ("1" * 50, "a number beyond 64 bits"),
        ('"\\ud800"', "cannot be understood"),
        ("NaN", "NaN is not JSON"),
        ('{"type": "Dense", "fields": []}', "cannot be understood"),
        ('{"type": ["Dense"], "fields": {}}', "cannot be understood"),
        ('{"map": 5}', "cannot be understood"),
        ('{"type": "Part", "fields": {"' + "x\\u001b" * 1_000 + '": 1}}', "cannot be understood"),
    ],
)
def test_documents_are_read_within_bounds(text: str, said: str) -> None:
    records = saying(text)
    with pytest.raises(RunError, match=said) as refused:
        from_records(records)
    assert len(refused.value.message) < 300
    assert refused.value.message.isprintable()


def test_a_server_makes_nothing_of_what_nodes_do_not_say() -> None:
    state = State("fit", 3, "fit", 4, 2)
    assert from_records(to_records(state)) == state
    assert from_records(to_records(Refusal("n", "no")), FROM_NODES) == Refusal("n", "no")
    for value in (state, Dense((3, 1), "squared"), train_shared, torch.float32):
        with pytest.raises(RunError, match="cannot be understood"):
            from_records(to_records(value), FROM_NODES)


def test_a_text_for_a_file_holds_what_a_message_holds() -> None:
    value = (Refusal("n", "no"), {"t": torch.tensor([0.1, math.nan])})
    found = from_text(to_text(value))
    assert found[0] == value[0]
    assert torch.equal(found[1]["t"].nan_to_num(7.0), value[1]["t"].nan_to_num(7.0))
    for text in ("", "[]", "{}", '{"document": 1, "tensors": 5}', '{"document": 1, "tensors": "AAAA"}'):
        with pytest.raises(RunError, match="a file cannot be read"):
            from_text(text)


def test_records_of_others_are_refused() -> None:
    with pytest.raises(RunError, match="cannot be read"):
        from_records(RecordDict({"arrays": ArrayRecord({})}))


def test_fingerprints_tell_values_apart_to_the_last_bit() -> None:
    a = torch.tensor([1.0, 2.0], dtype=torch.float64)
    b = a.clone()
    b[1] = math.nextafter(2.0, 3.0)
    assert fingerprint((a, "x")) == fingerprint((a.clone(), "x"))
    assert (
        len({fingerprint((a, "x")), fingerprint((b, "x")), fingerprint((a, "y")), fingerprint((a.float(), "x"))}) == 4
    )
