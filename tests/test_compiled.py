"""The compiled twin of the whole step makes the numbers of the step it stands for."""

import gc
import weakref
from dataclasses import replace

import numba
import numpy as np
import pytest
import scipy.sparse as sp
import torch
from compiled_rules import RULES, generator

from augment_reduce import AugmentReduceClassifier, vem
from augment_reduce import local as local_steps
from augment_reduce.kernels import _cpu_batch, _cpu_team, _cpu_work, compiled, cpu, reference
from augment_reduce.kernels._cpu_team import Team
from augment_reduce.kernels.rows import SparseRows, as_rows
from augment_reduce.local import Clock
from augment_reduce.noise import Normal
from augment_reduce.optim import Adagrad, Adam, Prior, RowwiseAdagrad, SectionFour
from augment_reduce.sampler import FrequencyShared, UniformPerRow
from augment_reduce.vem import Problem, State

B, K, D, N = 37, 11, 117, 90  # D: sixteens of features by the four, by themselves, and some


def problem_of(name: str, kind: str, optimizer, prior: bool, weighted: bool, dtype: torch.dtype) -> Problem:
    rng = np.random.default_rng(0)
    number = np.float32 if dtype == torch.float32 else np.float64
    x = rng.normal(size=(N, D)).astype(number) * (rng.random((N, D)) < 0.4)
    X = {"dense": x, "sparse": sp.csr_matrix(x), "empty": sp.csr_matrix(x.shape, dtype=number)}[kind]
    noise, rule = RULES[name]
    counts = np.maximum((x != 0).sum(0), 1)
    return Problem(
        X=as_rows(X), active=np.arange(N), n_rows=N, labels=torch.from_numpy(rng.integers(0, K, N)),
        sample_weight=torch.from_numpy(rng.random(N).astype(number)) if weighted else None, method="augment-reduce",
        noise=noise, sampler=UniformPerRow().bind(np.ones(K), cpu.draw_without_replacement), n_sampled=4, local=rule,
        optimizer=optimizer, kernels=cpu,
        prior=Prior.from_counts(2.0, counts, N, dtype, of_bias=1.5) if prior else None,
    )  # fmt: skip


def row_by_row(few: bool, monkeypatch) -> None:
    """As where weights and classes are few; else class by class, or biases alone."""
    monkeypatch.setattr(cpu, "FEW_WEIGHTS", 10**6 if few else 0)
    monkeypatch.setattr(cpu, "PAIRS_A_CLASS", 0 if few else 10**6)


def trained(problem: Problem, dtype: torch.dtype, few: bool, monkeypatch) -> dict[str, torch.Tensor]:
    """Parameters, local state and last bound after six steps over rows that come three times."""
    row_by_row(few, monkeypatch)
    weight = torch.randn(K, D, generator=generator(1), dtype=dtype) * 0.3
    bias = torch.randn(K, generator=generator(2), dtype=dtype) * 0.3
    optimizer = problem.optimizer
    parameters = reference.Parameters(weight, bias, optimizer.init_state(weight), optimizer.init_state(bias))
    state = State(parameters, problem.local.init_state(N, dtype), Clock(0, 0))
    with torch.inference_mode():
        for t in range(1, 7):
            rows = np.arange(45) + 45 * (t % 2)
            state, info = vem.step(
                problem, state, rows, Clock(t, (t + 1) // 2), generator=generator(t), want_bound=t % 2 == 0
            )
    out = {"weight": weight, "bias": bias, "bound": info.bound, "hits": torch.tensor(info.floor_hits), **state.local}
    for i, s in enumerate([*parameters.weight_state, *parameters.bias_state]):
        out[f"state {i}"] = s
    return {key: value.clone() for key, value in out.items()}


WAYS = [("dense", True), ("dense", False), ("sparse", False), ("empty", True), ("empty", False)]


@pytest.mark.parametrize(("kind", "few"), WAYS)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("setting", ["plain", "all", "fast biases"])
def test_the_compiled_step_is_the_step_to_the_last_bit(name, kind, few, setting, monkeypatch):
    everything = setting == "all"
    optimizer = {"plain": SectionFour(), "all": Adam(), "fast biases": Adagrad(bias_scale=2.7)}[setting]
    dtype = torch.float32
    found, taken = [], []
    run = Team.run
    monkeypatch.setattr(Team, "run", lambda *a: taken.append(1) or run(*a))
    threads = numba.get_num_threads()
    numba.set_num_threads(1)
    try:
        for may_compile in (False, True):
            problem = problem_of(name, kind, optimizer, everything, everything, dtype)
            problem.may_compile = may_compile and compiled.possible(problem, torch.float32)
            found.append(trained(problem, dtype, few, monkeypatch))
    finally:
        numba.set_num_threads(threads)
    assert len(taken) == (6 if RULES[name][1].uses_updated else 4)  # rows seen for the first time are vem.step's
    for key, expected in found[0].items():
        assert torch.equal(found[1][key], expected), key


@pytest.mark.parametrize(("kind", "few"), WAYS)
@pytest.mark.parametrize("name", RULES)
def test_the_compiled_step_does_not_depend_on_the_number_of_threads(name, kind, few, monkeypatch):
    monkeypatch.setattr(compiled, "WORTH_THREADS", 0)
    monkeypatch.setattr(_cpu_work, "WORTH_A_THREAD", 1)
    used, run = set(), Team.run
    monkeypatch.setattr(Team, "run", lambda self, *a: used.add(self.n) or run(self, *a))
    found, before = [], numba.get_num_threads()
    try:
        for n in (1, 2, 4):
            numba.set_num_threads(min(n, numba.config.NUMBA_NUM_THREADS))
            monkeypatch.setattr(compiled, "most_threads", lambda n=n: n)
            problem = problem_of(name, kind, Adagrad(), True, False, torch.float32)
            problem.may_compile = True
            found.append(trained(problem, torch.float32, few, monkeypatch))
    finally:
        numba.set_num_threads(before)
    assert used == {1, 2, 4}  # more than there may be cores: slow, but no less right
    for key, expected in found[0].items():
        assert all(torch.equal(other[key], expected) for other in found[1:]), key


@pytest.mark.parametrize(("kind", "few"), WAYS)
@pytest.mark.parametrize("name", ["paper softmax", "paper probit"])
def test_a_team_leaves_scores_that_are_not_finite_and_rows_that_come_twice(name, kind, few, monkeypatch):
    """A bad score in the rows of either thread: nothing has moved in either, and the next step is what it would have
    been. A row twice: one thread, one by one."""
    monkeypatch.setattr(compiled, "WORTH_THREADS", 0)
    row_by_row(few, monkeypatch)
    used, run = [], Team.run
    monkeypatch.setattr(Team, "run", lambda self, *a: used.append(self.n) or run(self, *a))
    problem = problem_of(name, kind, SectionFour(), True, False, torch.float32)
    problem.may_compile = True

    def new_state() -> State:
        parameters = reference.Parameters(torch.zeros(K, D), torch.zeros(K), [torch.zeros(K, D)], [torch.zeros(K)])
        return State(parameters, problem.local.init_state(N, torch.float32), Clock(0, 0))

    before, (state, fresh) = numba.get_num_threads(), (new_state(), new_state())
    try:
        numba.set_num_threads(min(2, numba.config.NUMBA_NUM_THREADS))
        for bad in (0, 30):  # a label of the first thread's rows, and one of the second's
            state.parameters.bias[problem.labels[bad]] = torch.inf
            with torch.inference_mode(), pytest.raises(FloatingPointError, match="diverged"):
                vem.step(problem, state, np.arange(45), Clock(1, 1), generator=generator(1))
            state.parameters.bias.zero_()
            assert not state.parameters.weight.any()
            assert all(torch.equal(state.local[key], fresh.local[key]) for key in fresh.local)
        assert used == [min(2, numba.config.NUMBA_NUM_THREADS, _cpu_team.CORES)] * 2
        for one in (state, fresh):
            with torch.inference_mode():
                vem.step(problem, one, np.arange(45), Clock(1, 1), generator=generator(1))
        assert state.parameters.weight.any() or kind == "empty"
        assert torch.equal(state.parameters.weight, fresh.parameters.weight)
        assert all(torch.equal(state.local[key], fresh.local[key]) for key in fresh.local)
        used.clear()
        with torch.inference_mode():
            vem.step(problem, state, np.append(np.arange(44), 3), Clock(2, 1), generator=generator(2))
            problem.may_compile = False
            vem.step(problem, fresh, np.append(np.arange(44), 3), Clock(2, 1), generator=generator(2))
        assert used == ([] if few else [1])  # where parts of the rows would see what others moved: as `vem` has it
        assert state.local["visits"][3] == 3
        assert torch.equal(state.parameters.weight, fresh.parameters.weight)
        assert all(torch.equal(state.local[key], fresh.local[key]) for key in fresh.local)
    finally:
        numba.set_num_threads(before)


@pytest.mark.parametrize(("kind", "few"), WAYS)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_minibatches_smaller_than_the_shares_they_are_cut_into(size, kind, few, monkeypatch):
    monkeypatch.setattr(compiled, "WORTH_THREADS", 0)
    row_by_row(few, monkeypatch)
    found = []
    for fast in (False, True):
        problem = problem_of("our softmax", kind, Adagrad(), True, True, torch.float32)
        problem.may_compile = fast
        parameters = reference.Parameters(torch.zeros(K, D), torch.zeros(K), [torch.zeros(K, D)], [torch.zeros(K)])
        state = State(parameters, problem.local.init_state(N, torch.float32), Clock(0, 0))
        state.local["visits"] += 1
        with torch.inference_mode():
            vem.step(problem, state, np.arange(size), Clock(1, 1), generator=generator(1))
        found.append((parameters.weight, parameters.bias, *state.local.values()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("n_pairs", [K - 1, K, K + 1])
def test_biases_are_summed_in_quarters_from_one_pair_a_class_on_where_no_row_has_features(n_pairs):
    without, some = (as_rows(sp.csr_matrix((5, D), dtype=np.float32)), as_rows(sp.eye(5, D, dtype=np.float32).tocsr()))
    assert cpu.in_quarters(without, D, K, n_pairs) == (n_pairs >= K)
    assert not cpu.in_quarters(some, D, K, n_pairs)


def test_an_empty_minibatch_is_summed_as_it_would_be_alone(monkeypatch):
    """Beside one that has features, in one call, and in calls of their own: to the last bit."""
    monkeypatch.setattr(_cpu_batch, "DENSE_FROM", 1.0)
    x = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
    x[np.random.default_rng(1).random(x.shape) < 0.9] = 0
    x[45:] = 0
    found = []
    for at_once in (1, 2):
        problem = problem_of("our softmax", "sparse", Adagrad(), True, False, torch.float32)
        problem.X, problem.may_compile = as_rows(sp.csr_matrix(x)), True
        weight, bias = torch.randn(K, D, generator=generator(1)) * 0.3, torch.randn(K, generator=generator(2))
        parameters = reference.Parameters(weight, bias, [torch.zeros(K, D)], [torch.zeros(K)])
        state = State(parameters, problem.local.init_state(N, torch.float32), Clock(0, 0))
        state.local["visits"] += 1
        with torch.inference_mode():
            for i in range(0, 2, at_once):
                turns = range(1 + i, 1 + i + at_once)
                vem.steps(
                    problem, state, np.arange(N).reshape(2, 45)[i : i + at_once], Clock(1 + i, 1),
                    generators=[generator(t) for t in turns], wanted=[False] * at_once,
                )  # fmt: skip
        found.append((weight, bias, parameters.bias_state[0]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def steps_of(
    problem: Problem, at_once: int, bad_from: int | None = None
) -> tuple[dict[str, torch.Tensor], State, list]:
    """Six minibatches of fifteen rows, so many in a call; every second step is asked for its bound."""
    weight, bias = torch.randn(K, D, generator=generator(1)) * 0.3, torch.randn(K, generator=generator(2)) * 0.3
    optimizer = problem.optimizer
    parameters = reference.Parameters(weight, bias, optimizer.init_state(weight), optimizer.init_state(bias))
    state = State(parameters, problem.local.init_state(N, torch.float32), Clock(0, 0))
    state.local["visits"] += 1
    order, infos = np.random.default_rng(5).permutation(N).reshape(6, 15), []
    if bad_from is not None:
        problem.X.values[order[bad_from:]] = np.nan
    one = torch.Generator()
    with torch.inference_mode():
        for i in range(0, 6, at_once):
            turns = range(1 + i, 1 + i + at_once)
            state, new = vem.steps(
                problem, state, order[i : i + at_once], Clock(1 + i, 1),
                generators=(one.manual_seed(t) for t in turns), wanted=[t % 2 == 0 for t in turns],
            )  # fmt: skip
            infos += map(new.of, range(new.n_steps))
    out = {"weight": weight, "bias": bias, **state.local}
    for i, info in enumerate(infos):
        out[f"hits {i}"] = torch.tensor(info.floor_hits)
        out[f"bound {i}"] = torch.empty(0) if info.bound is None else info.bound
    return {key: value.clone() for key, value in out.items()}, state, infos


@pytest.mark.parametrize(("kind", "few"), WAYS)
@pytest.mark.parametrize("name", RULES)
def test_several_steps_in_one_call_are_those_steps(name, kind, few, monkeypatch):
    """To the last bit, whatever the number of threads; with weights of the rows, and an optimiser that counts."""
    monkeypatch.setattr(compiled, "WORTH_THREADS", 0)
    row_by_row(few, monkeypatch)
    monkeypatch.setattr(_cpu_batch, "DENSE_FROM", 1.0)  # these rows are not very sparse
    calls, run = [], Team.run
    monkeypatch.setattr(Team, "run", lambda self, M, *a: calls.append((self.n, M)) or run(self, M, *a))
    found = []
    for n, at_once in ((1, 1), (1, 6), (2, 3), (2, 6), (4, 6)):
        monkeypatch.setattr(compiled, "most_threads", lambda n=n: n)
        problem = problem_of(name, kind, Adam(), True, True, torch.float32)
        problem.may_compile = True
        found.append(steps_of(problem, at_once)[0])
    assert set(calls) == {(1, 1), (1, 6), (2, 3), (2, 6), (4, 6)}
    assert sum(len(bound) > 0 for key, bound in found[0].items() if key.startswith("bound")) == 3
    for key, expected in found[0].items():
        assert all(torch.equal(other[key], expected) for other in found[1:]), key


@pytest.mark.parametrize(("kind", "few"), WAYS)
@pytest.mark.parametrize("touched_only", [True, False])
@pytest.mark.parametrize("optimizer", [SectionFour(every_entry=True), RowwiseAdagrad(), Adam()], ids=lambda o: o.name)
def test_the_number_of_threads_may_change_between_calls(optimizer, touched_only, kind, few, monkeypatch):
    """Each thread's copies of the weights are those of the call, whoever moved them last."""
    monkeypatch.setattr(compiled, "WORTH_THREADS", 0)
    monkeypatch.setattr(_cpu_batch, "DENSE_FROM", 1.0)
    row_by_row(few, monkeypatch)
    found = []
    for changing in (False, True):
        turns = iter([2, 1, 4, 2, 1, 4] if changing else [1] * 6)
        monkeypatch.setattr(compiled, "most_threads", lambda turns=turns: next(turns))
        problem = problem_of("our softmax", kind, optimizer, True, True, torch.float32)
        problem.prior, problem.may_compile = replace(problem.prior, touched_only=touched_only), True
        found.append(steps_of(problem, 1)[0])
    assert next(turns, None) is None
    for key, expected in found[0].items():
        assert torch.equal(found[1][key], expected), key


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_after_an_interrupt_the_same_state_goes_on(n, few, monkeypatch):
    """Sums that lay about half made are gone: a step that another thread left undone is then the step it would have
    been."""
    monkeypatch.setattr(compiled, "WORTH_THREADS", 0)
    monkeypatch.setattr(compiled, "most_threads", lambda: n)
    row_by_row(few, monkeypatch)
    found = []
    for interrupted in (False, True):
        problem = problem_of("our softmax", "dense", Adagrad(), True, False, torch.float32)
        problem.may_compile = True
        _, state, _ = steps_of(problem, 6)
        team = next(iter(state.compiled.teams.values()))
        if interrupted:
            for lines in getattr(team, "lines", []):
                lines[:] = 3.0
            with monkeypatch.context() as patch, torch.inference_mode():
                patch.setattr(type(team), "run", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
                with pytest.raises(KeyboardInterrupt):
                    vem.step(problem, state, np.arange(15), Clock(7, 2), generator=generator(7))
        with torch.inference_mode():
            vem.step(problem, state, np.arange(15), Clock(7, 2), generator=generator(7))
        found.append((state.parameters.weight.clone(), state.parameters.bias.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_steps_before_one_that_diverges_are_taken(n, few, monkeypatch):
    """Four of six; the next call says after which, clock and visits agree, nothing of the fifth is there."""
    row_by_row(few, monkeypatch)
    monkeypatch.setattr(compiled, "WORTH_THREADS", 0)
    monkeypatch.setattr(compiled, "most_threads", lambda: n)
    problem = problem_of("paper softmax", "dense", SectionFour(), False, False, torch.float32)
    problem.may_compile = True
    _, state, infos = steps_of(problem, 6, bad_from=4)
    assert len(infos) == 4
    assert state.clock.iteration == 4
    assert (state.local["visits"] == 2).sum() == 60
    assert torch.isfinite(state.parameters.weight).all()
    bad = np.flatnonzero(np.isnan(problem.X.values[:, 0])).reshape(2, 15)
    with torch.inference_mode(), pytest.raises(FloatingPointError, match="After iteration 4"):
        vem.steps(
            problem, state, bad, Clock(5, 1), generators=iter([generator(5), generator(6)]),
            wanted=[True, True],
        )  # fmt: skip
    assert (state.local["visits"] == 2).sum() == 60


@pytest.mark.parametrize("oddity", ["zeros", "int64", "large D", "dense enough", "float64", "out of range"])
def test_rows_that_cannot_be_read_where_they_lie_are_loaded(oddity):
    """One minibatch a call, with the numbers of `vem.step`; and an index out of range is told of."""
    rng = np.random.default_rng(0)
    n_features = 5000 if oddity == "large D" else D
    x = rng.normal(size=(N, n_features)) * (rng.random((N, n_features)) < 0.05)
    x[:, :2] = rng.normal(size=(N, 2)) if oddity == "dense enough" else x[:, :2]
    X = sp.csr_matrix(x.astype(np.float64 if oddity == "float64" else np.float32))
    if oddity == "zeros":
        X.data[::7] = 0
    if oddity == "int64":
        X.indices, X.indptr = X.indices.astype(np.int64), X.indptr.astype(np.int64)
    if oddity == "out of range":
        X.indices[3] = n_features
    found = []
    for may_compile in (False, True):
        problem = problem_of("paper softmax", "sparse", SectionFour(), False, False, torch.float32)
        problem.X, problem.may_compile = SparseRows(X.indptr, X.indices, X.data, n_features), may_compile
        weight = torch.randn(K, n_features, generator=generator(1)) * 0.3
        parameters = reference.Parameters(weight, torch.zeros(K), [torch.zeros_like(weight)], [torch.zeros(K)])
        state = State(parameters, problem.local.init_state(N, torch.float32), Clock(0, 0))
        steps = problem, state, np.arange(N).reshape(2, 45), Clock(1, 1)
        with torch.inference_mode():
            assert vem.at_once(problem, state, 45) == 1 or oddity in ("large D", "dense enough")
            if oddity == "out of range":
                with pytest.raises(ValueError, match="Expected feature indices in"):
                    vem.steps(*steps, generators=(generator(t) for t in (1, 2)), wanted=[True, True])
                continue
            vem.steps(*steps, generators=(generator(t) for t in (1, 2)), wanted=[True, True])
        found.append(weight)
    assert oddity == "out of range" or torch.equal(*found)


def test_what_has_no_twin_is_left_to_the_step(monkeypatch):
    problem = problem_of("our probit", "dense", Adagrad(), False, False, torch.float32)
    assert compiled.possible(problem, torch.float32)

    class Other(Normal):
        pass

    for change in (
        {"noise": Other()}, {"method": "one-vs-each"}, {"kernels": reference}, {"local": local_steps.Newton()},
        {"sampler": FrequencyShared().bind(np.ones(K), cpu.draw_without_replacement)},
    ):  # fmt: skip
        parts = {**vars(problem), **change}
        assert not compiled.possible(Problem(**parts), torch.float32), change


def test_float64_is_left_to_the_step():
    problem = problem_of("our softmax", "dense", Adagrad(), False, False, torch.float64)
    assert not compiled.possible(problem, torch.float64)


def test_weights_that_ran_away_are_named_and_nothing_moves():
    problem = problem_of("our softmax", "dense", Adagrad(), False, False, torch.float32)
    problem.may_compile = True
    weight, bias = torch.full((K, D), torch.inf), torch.zeros(K)
    state = [problem.optimizer.init_state(t) for t in (weight, bias)]
    parameters = reference.Parameters(weight, bias, *state)
    held = problem.local.init_state(N, torch.float32)
    held["visits"] += 1
    whole = State(parameters, held, Clock(4, 1))
    with torch.inference_mode(), pytest.raises(FloatingPointError, match="After iteration 4: The scores stopped"):
        vem.step(problem, whole, np.arange(20), Clock(5, 1), generator=generator(0))
    assert whole.clock.iteration == 4
    assert (held["visits"] == 1).all()
    assert not bias.any()


def test_a_forgotten_model_gives_its_weights_back_at_once():
    """No cycle keeps them until the garbage collector comes round: they may be gigabytes."""
    X, y = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32), np.arange(60) % 5
    clf = AugmentReduceClassifier(preset="paper", n_sampled_classes=2, batch_size=20, max_iter=6, random_state=0)
    clf.fit(X, y)
    weights = weakref.ref(clf._fitted.parameters)
    gc.collect()
    gc.disable()
    try:
        clf.fit(X, y)
        again = weakref.ref(clf._fitted.parameters)
        assert weights() is None
        del clf
        assert again() is None
    finally:
        gc.enable()
