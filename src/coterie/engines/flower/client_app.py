# SPDX-License-Identifier: Apache-2.0
"""The node's half of what `coterie flower run` runs. Every message is a new process there, so it imports little."""

from logging import WARNING

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.supercore import log

from coterie.engines.flower.node_config import is_warm

__all__ = ["client"]

client = ClientApp()


@client.query("coterie")
@client.train("coterie")
def ask(message: Message, context: Context) -> Message:
    """Answer by the process that the node keeps, or in this one where it keeps none."""
    if is_warm(context):
        from coterie.engines.flower.handover import hand_over
        from coterie.engines.flower.warm_node import NotWarmError

        try:
            return hand_over(message, context)
        except NotWarmError as error:
            log(WARNING, "coterie: this message is answered by a process of its own: %s", error)
    from coterie.engines.flower.warm import answer_here

    return Message(answer_here(message.content, context), reply_to=message)
