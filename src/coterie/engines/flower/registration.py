# SPDX-License-Identifier: Apache-2.0
"""The client half, for any ClientApp."""

from collections.abc import Callable, Mapping

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import nn

import coterie.engines.flower.catalogue  # noqa: F401  registers all steps
from coterie.engines.flower.client import answer, refuse_mods
from coterie.engines.flower.node_data import LoadData, node_data

__all__ = ["register"]


def register(
    app: ClientApp,
    load_data: LoadData | None = None,
    *,
    modules: Mapping[str, Callable[[], nn.Module]] | None = None,
    opaque: bool = False,
) -> ClientApp:
    """Let an app answer what coterie's strategies ask; what else it answers stays as it is.

    Parameters
    ----------
    app : ClientApp
        The app. Flower's mods for secure aggregation or differential privacy are refused: they would not touch our messages.
    load_data : callable, optional
        Given the context, hands over the node's rows: `Clients` (see `coterie.from_arrays`), or the path of a file or
        folder. By default the node's configuration names them: ``data``, ``client``, ``target``.
    modules : mapping, optional
        The user's own networks: name -> function that makes one.
    opaque : bool
        Whether to hide clients' names from the server, by a secret of the node, or that of the federation which `secret` in
        the node's configuration names.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> app = register(ClientApp(), lambda context: "rows.parquet")
    """
    refuse_mods(app)

    def ask(message: Message, context: Context) -> Message:
        return answer(message, node_data(context, load_data, modules=modules, opaque=opaque))

    app.query("coterie")(ask)
    app.train("coterie")(ask)
    return app
