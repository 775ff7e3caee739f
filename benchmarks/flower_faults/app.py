# SPDX-License-Identifier: Apache-2.0
"""coterie's app with nodes that misbehave: the run's configuration says how.

`fault = "answers"`: from its second training on, node-1 answers with a NaN, a wrong shape, an unknown step, an array ten
times as large. `fault = "sleep"`: before training, every node sleeps for as many seconds as `sleep` says in its place.
`fault = "silent"`: node-1 answers nothing after its fourth message.
"""

import time
from dataclasses import replace
from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

import coterie.engines.flower.catalogue  # noqa: F401
from coterie.engines.flower import server_app as serving
from coterie.engines.flower.client import answer
from coterie.engines.flower.messages import Batch, Reply
from coterie.engines.flower.node_data import node_data
from coterie.engines.flower.wire import from_records, to_records
from coterie.protocol import Tensors

server = serving.server
client = ClientApp()

TRAINING = ("assign_and_train", "train_in_turn", "train_shared", "cluster_step")
ANSWERED = 4  # messages, before a node falls silent
FAULTS = ("none", "NaN", "wrong shape", "unknown step", "ten times as large")


@client.query("coterie")
@client.train("coterie")
def misbehave(message: Message, context: Context) -> Message:
    holding = node_data(context)
    if context.run_config["fault"] == "silent" and holding.name == "node-1" and count(holding.folder) >= ANSWERED:
        time.sleep(3600.0)
    asked = from_records(message.content)
    questions = asked.questions if isinstance(asked, Batch) else ()
    if not any(ask.step.__name__ in TRAINING for question in questions for ask in question.asks.values()):
        return answer(message, holding)
    node = int(holding.name.removeprefix("node-"))
    fault = context.run_config["fault"]
    if fault == "sleep":
        time.sleep(float(str(context.run_config["sleep"]).split(",")[node]))
    elif fault == "answers" and node == 1:
        return wrong(message, holding, FAULTS[min(count(holding.folder), len(FAULTS) - 1)])
    return answer(message, holding)


def count(folder: Path) -> int:
    """How often this node has been asked: every message is answered by a process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder.parent / "trainings"
    number = int(file.read_text()) if file.exists() else 0
    file.write_text(str(number + 1))
    return number


def wrong(message: Message, holding: object, fault: str) -> Message:
    if fault == "unknown step":
        for record in message.content.config_records.values():
            record["json"] = str(record["json"]).replace("assign_and_train", "os_system")
        return answer(message, holding)
    reply = answer(message, holding)
    said = from_records(reply.content)
    if fault == "none" or not isinstance(said, Reply):
        return reply
    answers = tuple(replace(one, parts=_spoilt(one.parts, fault)) for one in said.answers)
    return Message(to_records(replace(said, answers=answers)), reply_to=message)


def _spoilt(parts: dict[int, dict[str, Tensors]], fault: str) -> dict[int, dict[str, Tensors]]:
    return {
        run: {name: {key: spoil(value, fault) for key, value in part.items()} for name, part in own.items()}
        for run, own in parts.items()
    }


def spoil(value: torch.Tensor, fault: str) -> torch.Tensor:
    if fault == "NaN":
        return torch.full_like(value, float("nan")) if value.is_floating_point() else value
    if fault == "wrong shape":
        return value[..., None]
    return torch.cat([value] * 10)
