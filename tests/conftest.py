"""What every test file shares: seeded generators, and where the real data are when they are there."""

import signal
from pathlib import Path

import numba
import pytest
import torch

SHARED = Path(__file__).resolve().parents[2] / "shared"


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; tests of Ctrl-C send it themselves
    signal.signal(signal.SIGINT, signal.default_int_handler)


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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
