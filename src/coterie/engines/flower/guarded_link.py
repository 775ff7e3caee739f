# SPDX-License-Identifier: Apache-2.0
"""Flower's SuperLink for submitters with a key: `coterie flower superlink --trusted-entities FILE`, then its own arguments.

Flower's own lets whoever reaches it run apps, register nodes and take over the task of a ServerApp: accounts and signed apps
are left to its commercial editions, though the places for them are there. Here they are filled. Requests to the Control API
must carry a submitter's word; an app must be signed, and its signature is handed on to the nodes, which check it themselves;
and only a process that was started from here can fetch ServerApps to run.
"""

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from flwr.common.constant import ACCESS_TOKEN_KEY
from flwr.supercore.auth.typing import AccountAuthCredentials, AccountAuthLoginDetails, AccountInfo
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.fab import Fab
from flwr.superlink.auth_plugin import ControlAuthnPlugin, NoOpControlAuthnPlugin
from flwr.superlink.servicer.control import control_handlers

from coterie.engines.flower.submitters import Trusted, is_signed, read_trusted, whose
from coterie.engines.flower.superlink import tool
from coterie.errors import ConfigError, CoterieError

__all__ = ["main"]

flower: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")  # the package has a function of this name

_OPTION = "--trusted-entities"
_signatures: ContextVar[dict[str, str]] = ContextVar("signatures")  # of the app of the request that is handled

Words = Sequence[tuple[str, str | bytes]]


class Submitters(ControlAuthnPlugin):
    """Flower's place for accounts: who has a trusted key is in."""

    def __init__(self, trusted: Trusted) -> None:
        self.trusted = trusted

    def validate_tokens_in_metadata(self, metadata: Words) -> tuple[bool, AccountInfo | None]:
        """Check a submitter's word. All submitters share the account that Flower has without accounts."""
        word = dict(metadata).get(ACCESS_TOKEN_KEY, "")
        if not isinstance(word, str) or whose(word, self.trusted) is None:
            return False, None
        return NoOpControlAuthnPlugin().validate_tokens_in_metadata([])

    def get_login_details(self) -> AccountAuthLoginDetails | None:
        """There is no login: a key is enough."""
        return None

    def get_auth_tokens(self, device_code: str) -> AccountAuthCredentials | None:
        """There is no login."""
        return None

    def refresh_tokens(self, metadata: Words) -> tuple[Words | None, AccountInfo | None]:
        """Nothing is refreshed: every command signs anew."""
        return None, None


def main(words: Sequence[str] | None = None) -> None:
    """Run the SuperLink until it is stopped."""
    given = list(sys.argv[1:] if words is None else words)
    try:
        trusted = read_trusted(Path(_taken(given)))
    except CoterieError as error:
        sys.exit(str(error))
    _put(flower, "load_control_authn_plugin", lambda: Submitters(trusted))
    _hand_on_signatures(trusted)
    with tempfile.TemporaryDirectory(prefix="coterie-link-") as folder:  # nobody else may enter it
        secret = Path(folder) / "secret"
        secret.write_bytes(os.urandom(32))
        sys.argv = ["flower-superlink", *given, "--isolation", "process", "--superexec-auth-secret-file", str(secret)]
        serve = flower._run_superlink_http_api

        def serve_guarded(lifespan_config: Any) -> None:
            if not isinstance(lifespan_config.authn_plugin, Submitters) or not lifespan_config.superexec_auth_secret:
                sys.exit("this version of Flower cannot be guarded: use another one")
            _start_tasks(lifespan_config, secret)
            serve(lifespan_config)

        _put(flower, "_run_superlink_http_api", serve_guarded)
        flower.flower_superlink()


def _taken(words: list[str]) -> str:
    """Take our own option out of Flower's."""
    if _OPTION not in words[:-1]:
        raise ConfigError(f"{_OPTION} is missing", "name the file with the keys of those who may run apps")
    if "--insecure" in words:
        raise ConfigError("a submitter's word must not be overheard, and --insecure does without TLS", "use --ssl-...")
    at = words.index(_OPTION)
    _, file = words[at : at + 2]
    del words[at : at + 2]
    return file


def _hand_on_signatures(trusted: Trusted) -> None:
    """Keep the signatures of an app with it; Flower drops those that come with a request."""
    start_run = control_handlers.start_run

    def start_signed(request: Any, *args: Any, **more: Any) -> Any:
        said = dict(request.fab.verifications)
        if not is_signed(request.fab.content, said, trusted):
            raise FlowerError(ApiErrorCode.INVALID_APP_SPEC, "the app is not signed by a trusted submitter")
        _signatures.set(said)
        return start_run(request, *args, **more)

    _put(control_handlers, "start_run", start_signed)
    _put(control_handlers, "Fab", lambda name, content, _: Fab(name, content, _signatures.get()))


def _put(module: Any, name: str, value: Any) -> None:
    """Put something of ours in the place of Flower's; where there is no such place, nothing would be guarded."""
    if not hasattr(module, name):
        sys.exit(f"this version of Flower has no {module.__name__}.{name}: use another one")
    setattr(module, name, value)


def _start_tasks(said: Any, secret: Path) -> None:
    """Start the process that runs ServerApps: it proves by a secret that it is ours, which Flower's own does not."""
    host = f"[{said.host}]" if ":" in said.host else said.host
    command = [tool("flower-superexec"), "--runtime-api-address", flower.resolve_bind_address(f"{host}:{said.port}")]
    command += ["--root-certificates", str(said.ssl_ca_certfile), "--superexec-auth-secret-file", str(secret)]
    command += ["--parent-pid", str(os.getpid())]
    if said.runtime_dependency_install:
        command += ["--allow-runtime-dependency-installation"]
    subprocess.Popen(command, start_new_session=True)


if __name__ == "__main__":
    main()
