"""Fixtures of every test."""

import signal

import numba
import pytest
import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; tests of Ctrl-C send it themselves
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Two workers on two cores: a thread each."""
    torch.set_num_threads(1)


@pytest.fixture
def one_numba_thread():
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(before)
