# SPDX-License-Identifier: Apache-2.0
"""Run folders lose nothing: not to damage, not to strangers, not to a second process, and nothing of the user's to us."""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from command import coterie, refused
from coterie.engines.checkpoint import load_tensors, save_tensors
from coterie.errors import DataError
from coterie.lock import LOCK, held
from coterie.runs import fit as fit_runs
from coterie.runs.folder import load_run
from coterie.runs.holding import holding
from helpers import KilledError
from planted import planted

DATA = planted(10, 20)
SITES = ("--client", "site", "--target", "y")
FIT = (*SITES, "--rounds", "4", "--no-baselines", "--checkpoint-seconds", "0")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return DATA.write(tmp_path_factory.mktemp("data") / "sites.csv")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert coterie("fit", data, *FIT, "--out", folder).code == 0
    return folder


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A run that was killed in its third round."""
    return killed(tmp_path_factory.mktemp("cut") / "run", data)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def begun(cut: Path, tmp_path: Path) -> Path:
    shutil.copytree(cut, tmp_path / "run")
    return tmp_path / "run"


def killed(folder: Path, data: Path, *words: str, after: Callable[[str, int], bool] | None = None) -> Path:
    stop = after or (lambda phase, round_: phase == "fit" and round_ == 3)

    def watching(clients: Any, session: Any, given: Any) -> Any:
        def watch(phase: str, done: Any, total: int) -> None:
            if stop(phase, done.round):
                raise KilledError

        object.__setattr__(session, "watch", watch)
        return real(clients, session, given)

    real = fit_runs.train
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit_runs, "train", watching)
        with pytest.raises(KilledError):
            coterie("fit", data, *FIT, *words, "--out", folder)
    return folder


def flipped(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    bit = draw.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


# -- nothing of the user's is removed ---------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["auto", "fedavg"])
@pytest.mark.parametrize("name", ["notes.tmp", ".notes.tmp", "checkpoints/mine.txt"])
def test_a_folder_of_the_user_is_refused_and_left_as_it_is(name: str, method: str, tmp_path: Path) -> None:
    few = planted(2, 3).write(tmp_path / "few.csv")  # too few for a comparison, too
    mine = tmp_path / "mine"
    (mine / name).parent.mkdir(parents=True)
    (mine / name).write_text("mine")
    assert refused("fit", few, *SITES, "--method", method, "--out", mine)[0] == f"{mine} is not empty and not a run"
    assert files(mine) == {name: b"mine"}


def test_an_auto_run_that_cannot_be_leaves_what_was_there(tmp_path: Path) -> None:
    few = planted(2, 3).write(tmp_path / "few.csv")
    (tmp_path / "mine").mkdir()
    for out in (tmp_path / "mine", tmp_path / "new" / "deeper"):
        assert "cross-validation" in refused("fit", few, *SITES, "--method", "auto", "--out", out)[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["few.csv", "mine"]
    assert files(tmp_path / "mine") == {}


def test_a_fit_that_fails_removes_only_what_it_has_written(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fit_runs.train

    def failing(clients: Any, session: Any, given: Any) -> Any:
        real(clients, session, given)  # all checkpoints are there
        (session.folder / "notes.txt").write_text("mine")
        (session.folder / "checkpoints" / "notes.txt").write_text("mine")
        raise DataError("no")

    monkeypatch.setattr(fit_runs, "train", failing)
    assert coterie("fit", data, *FIT, "--out", tmp_path / "r").code == 2
    assert files(tmp_path / "r") == {"notes.txt": b"mine", "checkpoints/notes.txt": b"mine"}


# -- two processes ----------------------------------------------------------------------------------------------------
@pytest.fixture
def busy(begun: Path) -> Iterator[Path]:
    """A run that another process has: its lock file is open there, and here it is another open file."""
    words = [sys.executable, "-c", HOLD, str(begun / LOCK)]
    other = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    (begun.parent / "pid").write_text(other.stdout.readline())
    yield begun
    other.communicate("")


HOLD = """\
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o644)
fcntl.flock(file, fcntl.LOCK_EX)
os.write(file, f"{os.getpid()}\\n".encode())
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def test_commands_are_refused_while_another_process_has_the_folder(busy: Path, data: Path) -> None:
    before, pid = files(busy), (busy.parent / "pid").read_text().strip()
    for words in (("fit", data, *FIT, "--out", busy), ("resume", busy)):
        said, hint = refused(*words)
        assert said == f"{busy} is in use by process {pid}"
        assert hint == "wait until that has ended, or use another folder"
    asked = coterie("report", busy)
    assert asked.code == 2
    assert f"error: {busy} is in use by process {pid}" in asked.err
    assert files(busy) == before


def test_a_second_comparison_of_the_same_name_is_refused(data: Path, tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / ".c.lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    pid = other.stdout.readline().strip()
    said, _ = refused("compare", data, *SITES, "--quick", "--out", tmp_path / "c")
    other.communicate("")
    assert said == f"{tmp_path / 'c'} is in use by process {pid}"
    assert not (tmp_path / "c").exists()


def test_lock_and_drafts_of_killed_comparisons_go_away(data: Path, tmp_path: Path) -> None:
    (tmp_path / ".c.lock").write_text("123\n")
    for name in (".c.0123456789abcdef.tmp", ".c.77.tmp", ".c.d.77.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "compare.json").write_text("{")
    (tmp_path / ".c.88.tmp").write_text("a file of somebody else")
    assert coterie("compare", data, *SITES, "--quick", "--out", tmp_path / "c").code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [".c.88.tmp", ".c.d.77.tmp", "c"]
    (tmp_path / ".c.lock").write_text("123\n")
    (tmp_path / ".c.answers").mkdir()
    for name in ("about.json", "flower-run", "000001.safetensors"):
        (tmp_path / ".c.answers" / name).touch()
    assert "is not empty" in refused("compare", data, *SITES, "--out", tmp_path / "c")[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".c.88.tmp", ".c.d.77.tmp", "c"]


# -- what killed processes leave --------------------------------------------------------------------------------------
@pytest.mark.parametrize("command", ["report", "resume"])
def test_leftovers_are_cleared_by_the_next_command(command: str, run: Path) -> None:
    """A process may be killed when it has ended its work, but not yet removed its checkpoints."""
    before = sorted(files(run))
    (run / "checkpoints").mkdir()
    for name in (
        ".run.json.0123456789abcdef.tmp",
        "models/.models.safetensors.12.tmp",
        "checkpoints/prepare.safetensors",
    ):
        (run / name).write_text("x")
    (run / LOCK).write_text("123\n")
    (run / "notes.tmp").write_text("mine")
    assert coterie(command, run).code == 0
    assert sorted(files(run)) == sorted([*before, "notes.tmp"])
    assert not (run / "checkpoints").exists()


def test_checkpoints_of_a_run_that_goes_on_stay(begun: Path) -> None:
    before = sorted(files(begun))
    (begun / ".run.json.123.tmp").write_text("x")
    assert coterie("report", begun).code == 0
    assert sorted(files(begun)) == sorted([*before, "report.html"])


def test_a_finished_run_that_is_fitted_again_and_killed_can_be_resumed(run: Path, data: Path) -> None:
    theta = load_run(run).models.theta
    killed(run, data, after=lambda phase, round_: phase == "prepare")
    assert "has not finished" in refused("predict", run, data)[0]
    assert coterie("resume", run).code == 0
    assert torch.equal(load_run(run).models.theta, theta)


# -- damage -----------------------------------------------------------------------------------------------------------
def test_a_flipped_bit_is_never_silent_when_a_run_is_resumed(cut: Path, whole: Path, tmp_path: Path) -> None:
    names = [name for name in files(cut) if name != "report.html"]
    assert {"run.json", "state.safetensors", "checkpoints/prepare.safetensors"} <= set(names)
    theta, ended = load_run(whole).models.theta, 0
    for seed in range(24):
        draw = random.Random(seed)
        run = tmp_path / str(seed)
        shutil.copytree(cut, run)
        flipped(run / names[seed % len(names)], draw)
        said = coterie("resume", run)
        if said.code == 0:
            ended += 1
            assert torch.equal(load_run(run).models.theta, theta)
        else:
            assert (said.code, said.err.count("error: ")) == (2, 1), said
    assert ended < 6


@pytest.mark.parametrize("command", ["predict", "report"])
def test_a_flipped_bit_is_never_silent_when_a_run_is_read(command: str, run: Path, data: Path) -> None:
    words = ("predict", run, data) if command == "predict" else ("report", run)
    names = [name for name in files(run) if name != "report.html"]
    before = (coterie(*words).out, (run / "report.html").read_bytes())
    caught = 0
    for seed in range(24):
        path = run / names[seed % len(names)]
        kept = path.read_bytes()
        flipped(path, random.Random(seed))
        said = coterie(*words)
        if said.code == 0:
            assert (said.out, (run / "report.html").read_bytes()) == before
        else:
            caught += 1
            assert (said.code, said.err.count("error: ")) == (2, 1), said
        path.write_bytes(kept)
    assert caught >= (20 if command == "predict" else 6)  # a report reads no models


def test_a_damaged_checkpoint_is_named_and_the_way_out_works(begun: Path, whole: Path) -> None:
    path = begun / "state.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    said, hint = refused("resume", begun)
    assert said == f"the checkpoint {path} is damaged: its checksum is wrong"
    assert hint == "remove that file and resume: only its phase is done again"
    path.write_bytes(content[:-1])
    assert refused("resume", begun)[1] == hint
    path.unlink()
    assert coterie("resume", begun).code == 0
    assert torch.equal(load_run(begun).models.theta, load_run(whole).models.theta)


def test_the_checkpoint_of_another_run_is_refused(begun: Path, data: Path, tmp_path: Path) -> None:
    other = killed(tmp_path / "other", data)  # the same options, the same data
    shutil.copy(other / "state.safetensors", begun)
    assert refused("resume", begun)[0] == f"the checkpoint {begun / 'state.safetensors'} is of another run"


def test_the_checkpoint_of_another_phase_is_refused(begun: Path) -> None:
    inside = begun / "checkpoints"
    shutil.copy(inside / "prepare.safetensors", begun / "state.safetensors")
    assert "is of another phase of the run" in refused("resume", begun)[0]


def test_checkpoints_say_whose_they_are(tmp_path: Path) -> None:
    mine = {"run": "a", "data": "b"}
    save_tensors(tmp_path / "c", {"x": torch.ones(2)}, {"round": 1}, mine)
    assert load_tensors(tmp_path / "c", mine)[1] == {"round": 1}
    for other, said in (({"run": "z"}, "another run"), ({"run": "a", "data": "z"}, "other data")):
        with pytest.raises(Exception, match=f"is of {said}"):
            load_tensors(tmp_path / "c", other)
    assert b'\\"coterie\\": \\"' in (tmp_path / "c").read_bytes()  # the version that wrote it


def test_files_of_earlier_versions_have_no_checksum_and_are_read(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "c", metadata={"coterie": '{"round": 1}'})
    tensors, document = load_tensors(tmp_path / "c")
    assert document == {"round": 1}
    assert torch.equal(tensors["x"], torch.ones(2))


def test_models_of_another_run_are_refused(run: Path, data: Path, tmp_path: Path) -> None:
    assert coterie("fit", data, *FIT, "--seed", 1, "--out", tmp_path / "other").code == 0
    path = run / "models" / "models.safetensors"
    shutil.copy(tmp_path / "other" / "models" / "models.safetensors", path)
    assert refused("predict", run, data)[0].startswith(f"{path} is not as the run has written it")


def test_plain_safetensors_readers_still_read_models(run: Path) -> None:
    theta = load_file(run / "models" / "models.safetensors")["theta"]
    assert torch.equal(theta, load_run(run).models.theta)


def test_run_json_that_the_user_changed_is_taken_without_its_checksum(run: Path) -> None:
    path = run / "run.json"
    lines = path.read_text().replace('"seed": 0', '"seed": 1').splitlines(keepends=True)
    path.write_text("".join(lines))
    said, hint = refused("report", run)
    assert said == f"{path} was damaged or changed after it was written"
    assert 'remove "sha256"' in hint
    text = "".join(line for line in lines if '"sha256"' not in line)
    path.write_text(text.replace("},\n}", "}\n}"))
    assert coterie("report", run).code == 0


# -- folders that a stranger has made ---------------------------------------------------------------------------------
def test_a_report_overwrites_no_file_elsewhere(run: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (run / "report.html").unlink()
    names = ["report.html", *(f".report.{os.getpid() + i}.tmp" for i in range(3)), f".report.html.{os.getpid()}.tmp"]
    for name in names:
        (run / name).symlink_to(tmp_path / "precious")
    assert coterie("report", run).code == 0
    assert (tmp_path / "precious").read_text() == "mine"
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    assert not list(run.glob(".report*"))


@pytest.mark.parametrize("name", ["checkpoints", "models"])
def test_a_folder_that_is_a_link_is_refused(name: str, begun: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    shutil.rmtree(begun / name, ignore_errors=True)
    (begun / name).symlink_to(tmp_path / "mine")
    assert refused("resume", begun)[0] == f"{begun / name} is a link, and files would be written elsewhere"
    assert files(tmp_path / "mine") == {}


def test_a_lock_that_is_a_link_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("1\n")
    (run / LOCK).symlink_to(tmp_path / "precious")
    assert refused("report", run)[0] == f"{run / LOCK} is not a lock of coterie's"
    assert (tmp_path / "precious").read_text() == "1\n"


# -- nobody reads -----------------------------------------------------------------------------------------------------
def test_the_report_is_written_where_nobody_reads(data: Path, tmp_path: Path) -> None:
    started = []
    for i, closed in enumerate(("| head -c 0", "2>&1 >/dev/null | head -c 0", ">&- 2>&- <&-")):
        asked = f"fit {data} {' '.join(FIT)} --new-clients 0.2 --out {i}"
        command = f"{sys.executable} -m coterie {asked} {closed}"
        started.append(subprocess.Popen(command, shell=True, cwd=tmp_path, stderr=subprocess.DEVNULL))
    for i, one in enumerate(started):
        one.wait()
        assert (tmp_path / str(i) / "report.html").exists()
        assert list((tmp_path / str(i)).glob(".*")) == []


# -- auto -------------------------------------------------------------------------------------------------------------
def test_a_repeated_auto_command_continues(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("fit", data, *SITES, "--method", "auto", "--out", tmp_path / "a")

    def stop(*_: object, **__: object) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr("coterie.runs.fit.fit_run", stop)
        with pytest.raises(KilledError):
            coterie(*words)
    with monkeypatch.context() as patch:
        patch.setattr("coterie.runs.auto.compare", stop)  # not a second time
        for _ in range(2):  # interrupted, and finished
            assert coterie(*words).code == 0
    assert "holds a run with other options" in refused(*words, "--seed", 1)[0]


def test_holding_a_folder_twice_is_one_lock(tmp_path: Path) -> None:
    with holding(tmp_path / "r"), holding(tmp_path / "r"), held(tmp_path / "r" / LOCK, tmp_path) as first:
        assert not first
    assert not (tmp_path / "r").exists()
