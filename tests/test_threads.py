# SPDX-License-Identifier: Apache-2.0
"""Threads wait briefly, small work has one of them, and what the user set stays."""

import os
import subprocess
import sys
import threading
from functools import partial

import pytest
import torch

from coterie.threads import bound_waiting, for_work, side_by_side


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_small_work_has_one_thread_and_large_work_all(two_threads):
    with for_work(1000):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with for_work(10_000_000):
        assert torch.get_num_threads() == 2


def test_threads_are_given_back_after_an_error(two_threads):
    with pytest.raises(ValueError, match="in the middle"), for_work(1000):
        raise ValueError("in the middle")
    assert torch.get_num_threads() == 2


def test_a_number_of_threads_that_the_user_set_stays(two_threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with for_work(1000):
        assert torch.get_num_threads() == 2


def test_work_side_by_side_divides_the_threads_and_keeps_its_order(two_threads):
    meet = threading.Barrier(2, timeout=60)  # nobody passes alone

    def work(name):
        meet.wait()
        with for_work(1000):
            return name, torch.get_num_threads()

    assert side_by_side([partial(work, "a"), partial(work, "b")]) == [("a", 1), ("b", 1)]
    assert torch.get_num_threads() == 2


def test_an_error_in_work_side_by_side_is_raised_and_threads_are_given_back(two_threads):
    def fails():
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        side_by_side([fails, lambda: 1])
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("said", "spins"), [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_waiting_is_bounded_unless_the_user_said_how_to_wait(monkeypatch, said, spins):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delitem(sys.modules, "torch")
    bound_waiting()
    assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_waiting_is_bounded_before_torch_is_imported():
    code = (
        "import builtins, os; real = builtins.__import__\n"
        "def watched(name, *rest):\n"
        "    if name == 'torch': print(os.environ.get('GOMP_SPINCOUNT')); raise SystemExit\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = watched\n"
        "import coterie; coterie.Clients"
    )
    around = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=around)
    assert done.stdout.strip() == "2000"
