# SPDX-License-Identifier: Apache-2.0
"""How Flower's own commands are called: which SuperLink, with which files, and without a word to anybody else."""

import base64
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError, RunError
from coterie.files import owner_only, replace_file

__all__ = ["QUIET", "Connection", "environment", "guarded_superlink", "new_submitter", "quick_supernode", "tool"]

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
_SOON = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}  # seconds after which Flower looks for work; its default is 1


def tool(name: str) -> str:
    """Find one of Flower's commands: beside this Python, or wherever the shell would."""
    found = shutil.which(name, path=_path())
    if found is None:
        raise ConfigError(f"there is no command {name}", "install Flower with: pip install 'coterie[flower]'")
    return found


def quick_supernode() -> list[str]:
    """The command of a SuperNode that is quicker between two messages than Flower's own."""
    return [sys.executable, "-m", "coterie.engines.flower.supernode"]


def guarded_superlink() -> list[str]:
    """The command of a SuperLink that is for submitters with a key only."""
    return [sys.executable, "-m", "coterie.engines.flower.guarded_link"]


def new_submitter(key: Path) -> str:
    """Make a submitter's key.  -> the line that lets it in, for the file of trusted keys"""
    from coterie.engines.flower.submitters import make_key, public_line

    make_key(key)
    return public_line(key)


def environment(home: Path | None, *, threads: int | None = None) -> dict[str, str]:
    """The environment of Flower's processes: files in `home`, no telemetry, short waits unless the user says otherwise."""
    made = {**QUIET, **_SOON, **os.environ, "PATH": _path(), "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    if home is not None:
        made["FLWR_HOME"] = str(home)
    if threads is not None:
        made.setdefault("OMP_NUM_THREADS", str(threads))  # nodes share the machine's cores
    return made


@dataclass(frozen=True)
class Connection:
    """A SuperLink as Flower's commands know it: a name in a configuration.

    Attributes
    ----------
    name : str
        In the configuration.
    home : Path or None
        Flower's folder that holds the configuration; None is the user's own.
    address : str, optional
        HOST:PORT; with it the configuration is ours to write.
    root_certificates : str, optional
        The authority that has signed the SuperLink's certificate; by default, those that the system trusts.
    insecure : bool
        Whether to do without TLS.
    key : str, optional
        The submitter's key, for a SuperLink that is guarded: see `coterie.engines.flower.submitters`.
    """

    name: str
    home: Path | None
    address: str | None = None
    root_certificates: str | None = None
    insecure: bool = False
    key: str | None = None

    @property
    def submitter(self) -> str:
        """The id of the submitter's key, as the file of trusted keys has it; empty without a key."""
        if self.key is None:
            return ""
        from coterie.engines.flower.submitters import public_line

        return public_line(Path(self.key)).partition(":")[0]

    def write(self) -> None:
        """Write the configuration that Flower's commands read."""
        assert self.home is not None
        lines = ["[superlink]", f'default = "{self.name}"', f"[superlink.{self.name}]", f'address = "{self.address}"']
        if self.insecure:
            lines.append("insecure = true")
        elif self.root_certificates is not None:
            lines.append(f"root-certificates = {json.dumps(str(Path(self.root_certificates).absolute()))}")
        self.home.mkdir(parents=True, exist_ok=True)
        replace_file(self.home / "config.toml", ("\n".join(lines) + "\n").encode())

    def flwr(self, *words: str) -> str:
        """Call one of Flower's commands, and hand over what it says."""
        self.sign_in()
        done = subprocess.run(
            [tool("flwr"), *words], env=environment(self.home), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise self._refused(done.stderr or done.stdout)
        return done.stdout

    def sign_in(self) -> None:
        """Write a fresh word of the submitter's where Flower's commands look for one; without a key, nothing."""
        if self.key is None:
            return
        from coterie.engines.flower.submitters import token

        assert self.home is not None
        words = {"authn-type": "oidc", "oidc-access-token": token(Path(self.key)), "oidc-refresh-token": "-"}
        lines = [f"flower.account-auth.{self.address}.{name}: {_encoded(word)}" for name, word in words.items()]
        with owner_only():
            replace_file(self.home / "credentials.yaml", ("\n".join(lines) + "\n").encode())

    def start(self, app: Path) -> str:
        """Let the SuperLink run an app, signed where there is a key.  -> the number of the run"""
        if self.key is None:
            return str(self.document("run", str(app), self.name)["run-id"])
        self.sign_in()
        words = [sys.executable, "-m", "coterie.engines.flower.signed_run", str(app), self.name, self.key]
        done = subprocess.run(words, env=environment(self.home), capture_output=True, text=True, check=False)
        if done.returncode:
            raise self._refused(done.stderr or done.stdout)
        return done.stdout.strip().splitlines()[-1]

    def document(self, *words: str) -> dict[str, Any]:
        """Call one of Flower's commands that answers with a JSON document."""
        said = self.flwr(*words, "--format", "json")
        found: dict[str, Any] = json.loads(said[said.index("{") :])
        if not found.get("success"):
            raise self._refused(str(found.get("error-message", "")))
        return found

    def nodes_online(self) -> int:
        """How many nodes are there now."""
        nodes = self.document("supernode", "list", self.name)["nodes"]
        return sum(node["status"] == "online" for node in nodes)

    def _refused(self, said: str) -> RunError:
        """What Flower complains of, without the box around it."""
        lines = [line.strip("╭╮╰╯│─ \t") for line in said.splitlines()]
        boxed = lines[lines.index("Error") + 1 :] if "Error" in lines else [line for line in lines if line][-1:]
        why = " ".join(line for line in boxed if line) or "it does not answer"
        where = self.address or f"'{self.name}'"
        return RunError(f"the SuperLink at {where} cannot be asked: {why}", "is it up? see `coterie flower status`")


def _encoded(word: str) -> str:
    return json.dumps(base64.b64encode(word.encode()).decode())


def _path() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
