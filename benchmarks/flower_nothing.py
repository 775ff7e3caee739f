# SPDX-License-Identifier: Apache-2.0
"""An app that does nothing but return a number: what Flower itself takes for a round, for `benchmarks.flower_rounds`."""

import time

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from coterie.engines.flower.events import tell

server = ServerApp()
client = ClientApp()

POLL = 0.2  # as coterie's


@server.main()
def serve(grid: Grid, context: Context) -> None:
    nodes, rounds = int(context.run_config["nodes"]), int(context.run_config["rounds"])
    while len(list(grid.get_node_ids())) < nodes:
        time.sleep(POLL)
    for number in range(rounds + 1):  # in the first, nodes fetch the app
        begin = time.perf_counter()
        ask(grid)
        if number:
            tell(
                "round", phase="fit", total=rounds, done={"seconds": time.perf_counter() - begin, "participants": nodes}
            )
    tell("result")


def ask(grid: Grid) -> None:
    """Send a number to every node, and wait until all have returned it."""
    number = RecordDict({"number": ConfigRecord({"number": 1})})
    waiting = set(grid.push_messages([Message(number, node, "train") for node in grid.get_node_ids()]))
    while waiting:
        time.sleep(POLL)
        waiting -= {reply.metadata.reply_to_message_id for reply in grid.pull_messages(list(waiting))}


@client.train()
def train(message: Message, context: Context) -> Message:
    return Message(message.content, reply_to=message)
