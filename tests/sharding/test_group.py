"""Collectives that are pending when a process exits."""

import atexit
import os

import torch

from augment_reduce.sharding import Ranks
from augment_reduce.sharding import group as group_module
from tests.helpers.rank_processes import run_on_ranks


def end_with_sums_under_way(group):
    """The state at exit: a forked process has no pending collective, this one has waited for its own."""
    ranks = Ranks(group)
    kept = ranks.start_sum(torch.full((3,), ranks.rank + 1.0))
    ranks.start_sum(torch.ones(3)).wait()
    child = os.fork()
    if child == 0:
        os._exit(len(group_module._under_way) + len(group_module._tensors_of_last))
    forked = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    before = len(group_module._under_way)
    atexit._run_exitfuncs()
    owners = [group_module._owners(x) for tensors in group_module._tensors_of_last for x in tensors]
    return before, len(group_module._under_way), kept.work is None, kept.values.tolist(), set(owners), forked


def test_what_is_under_way_is_waited_for_before_the_interpreter_ends(tmp_path):
    for found in run_on_ranks(end_with_sums_under_way, 2, tmp_path):
        assert found == (1, 0, True, [3.0, 3.0, 3.0], {1}, 0)
