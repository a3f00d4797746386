"""Threads that each have a stretch of the classes: where it begins and ends, and that nobody sees it in the results."""

from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from compiled_rules import RULES, generator

from augment_reduce import vem
from augment_reduce.kernels import _cpu_batch, _cpu_team, compiled, cpu
from augment_reduce.kernels._cpu_team import Team, TeamByClasses, even_cuts, fair_cuts
from augment_reduce.kernels.reference import Parameters
from augment_reduce.kernels.rows import as_rows
from augment_reduce.local import Clock
from augment_reduce.optim import Adagrad, Prior
from augment_reduce.sampler import UniformPerRow
from augment_reduce.vem import Problem, State


def expected_pairs(cuts, S, labels):
    """Of a row, by stretch: S classes that may be any, and its label."""
    K = cuts[-1]
    return [S * (b - a) / K + np.mean((labels >= a) & (labels < b)) for a, b in pairwise(cuts)]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("S", [1, 20])
@pytest.mark.parametrize("power", [1, 8], ids=["even", "most are low"])
def test_stretches_have_the_same_number_of_pairs(n, S, power):
    K = 1000
    labels = (np.random.default_rng(0).random(4000) ** power * K).astype(int)
    cuts = fair_cuts(n, K, S, labels)
    assert cuts[0] == 0
    assert cuts[-1] == K
    assert len(cuts) == n + 1
    one_class = S / K + np.bincount(labels).max() / len(labels)
    assert np.abs(np.array(expected_pairs(cuts, S, labels)) - (1 + S) / n).max() <= one_class


def test_more_threads_than_classes_leave_some_without():
    cuts = fair_cuts(5, 3, 2, np.array([0, 1, 2]))
    assert cuts[0] == 0
    assert cuts[-1] == 3
    assert (np.diff(cuts) >= 0).all()
    assert (np.diff(cuts) <= 1).all()


def test_classes_go_from_the_slow_to_the_fast_and_stay_where_they_are_if_they_are_even():
    cuts = np.array([0, 500, 1000])
    assert np.array_equal(even_cuts(cuts, np.array([1.0, 1.015])), cuts)
    assert np.array_equal(even_cuts(cuts, np.array([3.0, 1.0])), [0, 417, 1000])  # half way to 333
    assert np.array_equal(even_cuts(cuts[[0, 2]], np.array([2.0])), [0, 1000])
    assert np.array_equal(even_cuts(np.array([0, 0, 1000]), np.array([0.0, 1.0])), [0, 250, 1000])
    cuts, speeds = np.array([0, 10, 20, 1000]), np.array([1.0, 2.0, 4.0])
    for _ in range(20):  # of a thread that is twice as fast as one and half as fast as another
        cuts = even_cuts(cuts, np.diff(cuts) / speeds)
    assert np.abs(np.diff(cuts) - 1000 * speeds / 7).max() <= 0.03 * 1000 / 7


N, B, S, D = 120, 20, 7, 48


def problem_of(K, dense, prior):
    """Rows of which six minibatches can be made; `prior`: "touched", "unbiased" (which has shares) or none."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, D)).astype(np.float32) * (rng.random((N, D)) < (1.0 if dense else 0.2))
    noise, rule = RULES["paper softmax"]
    counts = np.maximum((x != 0).sum(0), 1)
    return Problem(
        X=as_rows(x if dense else sp.csr_matrix(x)), active=np.arange(N), n_rows=N,
        labels=torch.from_numpy(rng.integers(0, K, N)), sample_weight=None, method="augment-reduce", noise=noise,
        sampler=UniformPerRow().bind(np.ones(K), cpu.draw_without_replacement), n_sampled=S, local=rule,
        optimizer=Adagrad(), kernels=cpu, may_compile=True,
        prior=Prior.from_counts(2.0, counts, N, torch.float32, prior == "touched", of_bias=1.5) if prior else None,
    )  # fmt: skip


def stepped(problem, K, n, at_once, cuts, monkeypatch):
    """Everything that six steps have moved, so many in a call, by n threads that have these stretches."""
    weight, bias = torch.randn(K, D, generator=generator(1)) * 0.3, torch.zeros(K)
    state = State(
        Parameters(weight, bias, [torch.zeros(K, D)], [torch.zeros(K)]),
        problem.local.init_state(N, torch.float32),
        Clock(0, 0),
    )
    order, infos = np.random.default_rng(5).permutation(N).reshape(6, B), []
    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(compiled, "WORTH_THREADS", 0)
        patch.setattr(compiled, "most_threads", lambda: n)
        patch.setattr(compiled.cpu, "FEW_WEIGHTS", 0)
        patch.setattr(_cpu_batch, "DENSE_FROM", 1.0)
        if cuts is not None:
            patch.setattr(_cpu_team, "fair_cuts", lambda *a: np.array(cuts))
        for i in range(0, 6, at_once):
            turns = range(1 + i, 1 + i + at_once)
            state, new = vem.steps(
                problem, state, order[i : i + at_once], Clock(1 + i, 1), generators=map(generator, turns),
                wanted=[True] * at_once,
            )  # fmt: skip
            infos.append(new.bounds)
    moved = state.parameters
    return [weight, bias, *moved.weight_state, *moved.bias_state, *state.local.values(), torch.cat(infos)]


def noted(monkeypatch):
    """Of all calls from now on: threads, steps, passes of sorting, whether rows are dense, whether there are shares."""
    calls, take = set(), _cpu_team.take_by_classes

    def noting(tid, n, counter, cuts, sorting, plan, data, *rest):
        share, parts = rest[8], rest[9][2]
        calls.add((n, len(plan[0]), sorting[1], len(data[2]) > 0, len(share) > 0))
        assert (parts[5].size > 0) == (n > 1 and len(share) > 0)  # handed over by class where there is somebody else
        return take(tid, n, counter, cuts, sorting, plan, data, *rest)

    noting.overloads = take.overloads
    monkeypatch.setattr(_cpu_team, "take_by_classes", noting)
    return calls


@pytest.mark.parametrize(("K", "passes"), [(60, 1), (20_000, 2), (100_000, 3)])
@pytest.mark.parametrize("prior", [None, "touched", "unbiased"])
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "sparse"])
def test_results_do_not_depend_on_who_has_which_classes(K, passes, prior, dense, monkeypatch):
    """Also where a thread has none, or a single one, or nearly all; with several steps in a call and with one."""
    calls, problem = noted(monkeypatch), problem_of(K, dense, prior)
    expected = stepped(problem, K, 1, 1, None, monkeypatch)
    ways = [
        (1, 6, None), (2, 6, None), (2, 3, [0, 0, K]), (2, 6, [0, K, K]), (2, 1, [0, 1, K]), (3, 6, [0, 20, 20, K]),
        (4, 3, [0, 5, 6, 9, K]), (32, 6, None),
    ]  # fmt: skip
    for n, at_once, cuts in ways:
        found = stepped(problem, K, n, at_once, cuts, monkeypatch)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (n, at_once, cuts)
    assert {call[:2] for call in calls} == {(1, 1), *((n, at_once) for n, at_once, _ in ways)}
    assert {call[3:] for call in calls} == {(dense, prior == "unbiased")}
    assert passes in {call[2] for call in calls}


def test_nothing_is_written_behind_what_threads_have(monkeypatch):
    """Pairs are copied sixteen at a time."""
    guards = []

    def guarded(shape, dtype):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        room = np.zeros(size + 64, np.uint8)
        room[size:] = 0xA5
        guards.append(room[size:])
        return room[:size].view(dtype).reshape(shape)

    monkeypatch.setattr(_cpu_team, "zeros", guarded)
    problem = problem_of(60, True, None)
    for n, cuts in ((2, [0, 0, 60]), (2, None), (3, [0, 0, 60, 60])):
        stepped(problem, 60, n, 6, cuts, monkeypatch)
    assert len(guards) > 20
    assert all((guard == 0xA5).all() for guard in guards)


def test_stretches_follow_the_threads_after_a_while(monkeypatch):
    """Not after every step: a step has more pairs of some classes than of others by chance."""
    team = TeamByClasses(2, B, S, 1000, np.dtype(np.float32), (np.zeros(N, np.float32),), np.arange(1000), False)
    spent = iter([(0.01, 0.03), (0.01, 0.03), (0.03, 0.09), (0.001, 0.9)])

    def run(self, *arguments):
        self.busy[:, 0] += next(spent)

    monkeypatch.setattr(Team, "run", run)
    cuts = []
    for _ in range(4):
        team.run(1, 0, (), [])
        cuts.append(team.cuts.tolist())
    assert cuts[0] == cuts[1] == [0, 500, 1000]
    assert cuts[2] == [0, 583, 1000]  # 0.05 to 0.15 seconds: half way to 667
    assert cuts[3][1] > cuts[2][1]  # judged by itself
