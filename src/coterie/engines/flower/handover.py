# SPDX-License-Identifier: Apache-2.0
"""From the process that Flower starts for a message to the one that the node keeps, and back.

Flower starts a process for every message, and one that imports torch and reads the rows takes seconds to begin. So this one
imports neither: it hands the message's bytes to the node's process, which has both.
"""

import json

from flwr.app import Context, Message
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as RecordsOnWire

from coterie.engines.flower.node_config import idle_seconds, state_folder
from coterie.engines.flower.warm_node import WarmNode

__all__ = ["hand_over"]


def hand_over(message: Message, context: Context) -> Message:
    """Let the process that the node keeps answer; what Flower itself keeps of the run stays here."""
    node = WarmNode.of(context.node_config, state_folder(context), idle_seconds(context))
    configs = {"node_config": dict(context.node_config), "run_config": dict(context.run_config)}
    told = json.dumps({"run_id": context.run_id, "node_id": context.node_id, **configs})
    reply = node.ask(told.encode(), recorddict_to_proto(message.content).SerializeToString())
    return Message(recorddict_from_proto(RecordsOnWire.FromString(reply)), reply_to=message)
