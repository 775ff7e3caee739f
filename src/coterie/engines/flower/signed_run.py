# SPDX-License-Identifier: Apache-2.0
"""`flwr run` with a signed app, in a process of its own as Flower's commands are: app, connection and key are its arguments.

It prints the number of the run.
"""

import hashlib
import sys
from pathlib import Path

from flwr.cli.build import build_fab_from_disk
from flwr.cli.flower_config import read_superlink_connection
from flwr.cli.utils import flwr_cli_exc_handler, init_http_client_from_connection
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import StartRunRequest
from flwr.supercore.fab import Fab

from coterie.engines.flower.submitters import signatures

__all__ = ["main"]


def main() -> None:
    """Hand an app over."""
    app, name, key = sys.argv[1:]
    content = build_fab_from_disk(Path(app))
    fab = Fab(hashlib.sha256(content).hexdigest(), content, signatures(content, Path(key)))
    client = init_http_client_from_connection(read_superlink_connection(name))
    try:
        with flwr_cli_exc_handler():
            print(client.StartRun(StartRunRequest(fab=fab_to_proto(fab))).run_id)
    except Exception as error:  # Flower's, with a sentence for a person
        sys.exit(str(error))
    finally:
        client.close()


if __name__ == "__main__":
    main()
