"""The helper of the distributed tests: results, tracebacks, ranks that die, ranks that hang."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.rank_processes import run_on_ranks, try_on_ranks


def rank_and_sum(group, number):
    total = torch.tensor([number + dist.get_rank(group)])
    dist.all_reduce(total, group=group)
    return dist.get_rank(group), int(total), torch.get_num_threads()


def fails_on_one(group):
    if dist.get_rank(group) == 1:
        raise ValueError("of rank 1")
    dist.barrier(group)


def dies_or_hangs(group):
    if dist.get_rank(group) == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1_000)


def test_results_of_each_rank(tmp_path):
    assert run_on_ranks(rank_and_sum, 3, tmp_path, 10) == [(rank, 33, 1) for rank in range(3)]


def test_an_error_is_shown_with_its_traceback(tmp_path):
    with pytest.raises(AssertionError, match=r"(?s)rank 1, exit code 1.*ValueError: of rank 1"):
        run_on_ranks(fails_on_one, 2, tmp_path)


def test_a_dead_rank_and_one_that_hangs(tmp_path):
    dead, hung = try_on_ranks(dies_or_hangs, 2, tmp_path, limit=6.0)
    assert dead.code == -signal.SIGKILL
    assert hung.code is None
