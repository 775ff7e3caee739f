# SPDX-License-Identifier: Apache-2.0
"""The node's half of what `coterie flower run` runs. Every message is a new process there, so it imports little."""

from flwr.clientapp import ClientApp

from coterie.engines.flower.registration import register

__all__ = ["client"]

client = ClientApp()
register(client)
