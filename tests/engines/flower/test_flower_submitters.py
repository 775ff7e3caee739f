# SPDX-License-Identifier: Apache-2.0
"""Who may run apps: holders of a trusted key, with apps that they have signed, and nobody else."""

import json
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.supercore.fab import Fab
from flwr.supernode.cli.flower_supernode import _try_obtain_trusted_entities, _validate_public_keys_ed25519
from flwr.supernode.start_client_internal import _verify_fab

from coterie.engines.flower import submitters
from coterie.engines.flower.submitters import is_signed, make_key, public_line, read_trusted, signatures, token, whose
from coterie.errors import ConfigError

APP = b"an app"


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A trusted key, a stranger's, and the file of trusted keys."""
    for name in ("own", "strange"):
        make_key(tmp_path / name)
    trusted = tmp_path / "trusted.yaml"
    trusted.write_text(f"# {public_line(tmp_path / 'strange')}\n{public_line(tmp_path / 'own')}\n", encoding="utf-8")
    return tmp_path / "own", tmp_path / "strange", trusted


def test_a_key_is_its_owners_and_never_replaced(keys: tuple[Path, Path, Path]) -> None:
    own, _, _ = keys
    assert stat.S_IMODE(own.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="there is a file"):
        make_key(own)


def test_a_word_lets_its_owner_in_until_it_is_over(
    keys: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, strange, file = keys
    trusted, word = read_trusted(file), token(own)
    assert whose(word, trusted) == next(iter(trusted))
    assert whose(token(strange), trusted) is None
    name, until, signed = word.split(".")
    for forged in (
        f"{name}.{int(until) + 1}.{signed}",
        f"{name}.{until}.{signed[:-4]}AAAA",
        "",
        "a.b.c",
        f"{name}.-1.x",
    ):
        assert whose(forged, trusted) is None
    now = submitters.time.time()
    monkeypatch.setattr(submitters, "time", SimpleNamespace(time=lambda: now + 3600))
    assert whose(word, trusted) is None


def test_flowers_own_nodes_take_our_signature_and_no_other(keys: tuple[Path, Path, Path]) -> None:
    own, strange, file = keys
    known = _try_obtain_trusted_entities(file)
    assert known is not None
    _validate_public_keys_ed25519(known)
    said = signatures(APP, own)
    assert said["valid_license"]
    assert _verify_fab(Fab("", APP, said), known)
    assert not _verify_fab(Fab("", APP + b"!", said), known)
    assert not _verify_fab(Fab("", APP, signatures(APP, strange)), known)


def test_the_superlink_sees_who_has_signed(keys: tuple[Path, Path, Path]) -> None:
    own, strange, file = keys
    trusted, said = read_trusted(file), signatures(APP, own)
    (name,) = trusted
    assert is_signed(APP, said, trusted)
    assert not is_signed(APP + b"!", said, trusted)
    bad: list[dict[str, str]] = [{}, signatures(APP, strange), {name: "{"}, {name: "[]"}, {name: "1"}, {name: "{}"}]
    bad += [
        {name: json.dumps({"signed_at": -1, "signature": "x"})},
        {name: json.dumps({"signed_at": 1, "signature": 3})},
    ]
    assert not any(is_signed(APP, one, trusted) for one in bad)


@pytest.mark.parametrize("text", ["", "a: b\n", "fpk_1: 'ssh-rsa AAAA'\n", "fpk_1: 'ssh-ed25519 AAAA'\n"])
def test_a_file_without_keys_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "trusted.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="does not hold Ed25519 keys"):
        read_trusted(tmp_path / "trusted.yaml")
    with pytest.raises(ConfigError, match="No such file"):
        read_trusted(tmp_path / "none.yaml")


def test_a_key_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("no key")
    with pytest.raises(ConfigError, match="not an Ed25519 key"):
        token(tmp_path / "key")


def test_an_app_keeps_its_signature_on_a_guarded_superlink_and_one_without_is_refused(
    keys: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flwr.supercore.error import FlowerError
    from flwr.superlink.servicer.control import control_handlers

    from coterie.engines.flower import guarded_link

    own, strange, file = keys
    started: list[Any] = []
    monkeypatch.setattr(
        control_handlers, "start_run", lambda request: started.append(control_handlers.Fab("", APP, {}))
    )
    monkeypatch.setattr(control_handlers, "Fab", Fab)
    guarded_link._hand_on_signatures(read_trusted(file))
    said = signatures(APP, own)
    control_handlers.start_run(SimpleNamespace(fab=SimpleNamespace(content=APP, verifications=said)))  # type: ignore[call-arg,arg-type]
    assert [fab.verifications for fab in started] == [said]
    for content, wrong in ((APP, {}), (APP, signatures(APP, strange)), (b"", said)):
        with pytest.raises(FlowerError, match="not signed"):
            control_handlers.start_run(SimpleNamespace(fab=SimpleNamespace(content=content, verifications=wrong)))  # type: ignore[call-arg,arg-type]


@pytest.mark.parametrize(
    ("words", "why"),
    [((), "--trusted-entities is missing"), (("--trusted-entities", "none.yaml"), "cannot be read"),
     (("--insecure", "--trusted-entities", "none.yaml"), "must not be overheard")],
)  # fmt: skip
def test_a_guarded_superlink_does_not_start_unguarded(words: tuple[str, ...], why: str) -> None:
    command = [sys.executable, "-m", "coterie.engines.flower.guarded_link", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert why in done.stderr
