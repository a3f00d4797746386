"""Rows that have the same features: found, kept together, scored once, and no number changed by it."""

import contextlib
import math

import numpy as np
import pytest
import torch
from scipy import sparse

from augment_reduce import AugmentReduceClassifier, CrossFitted, Grid
from augment_reduce.config.shape import Shape
from augment_reduce.kernels import device, reference
from augment_reduce.kernels.cpu import backend as cpu
from augment_reduce.kernels.cpu import batch as batch_kernels
from augment_reduce.kernels.cpu import candidates as candidates_kernels
from augment_reduce.kernels.cpu import row_groups as groups_kernels
from augment_reduce.kernels.cpu import softmax_groups
from augment_reduce.kernels.minibatch_groups import MinibatchGroups
from augment_reduce.kernels.rows import as_rows
from augment_reduce.local.base import Clock
from augment_reduce.model.compiled import compiled
from augment_reduce.model.noise import resolve_noise
from augment_reduce.optim import Adagrad, Adam, Prior
from augment_reduce.sampling import AllClasses, FeatureCandidates, FrequencyShared, HeadAndTail, TrainingData
from augment_reduce.training import fit as fitting
from augment_reduce.training import prior_search
from augment_reduce.training import step as vem
from augment_reduce.training.order import epoch_order
from augment_reduce.training.step import Problem, State
from tests.helpers.user_noises import CompiledStudentT3, Laplace

N, D, K, DOCUMENTS = 240, 30, 40, 45


def documents(seed=0, dtype=np.float32):
    """Every label of a document an example: 45 documents, one of them without features."""
    rng = np.random.default_rng(seed)
    once = sparse.random_array((DOCUMENTS, D), density=0.15, rng=rng, format="csr", dtype=np.float64)
    once = sparse.csr_matrix(once.multiply(np.arange(DOCUMENTS)[:, None] > 0)).astype(dtype)
    of_document = np.sort(rng.integers(0, DOCUMENTS, N))
    return sparse.csr_matrix(once[of_document]), np.minimum(rng.zipf(1.3, N) - 1, K - 1), of_document


def different_rows():
    X, y, document = documents(1)
    first = np.unique(document, return_index=True)[1]
    return X[first], y[first]


def test_numbers_are_those_of_the_documents_in_parts_of_at_most_so_many():
    X, _, document = documents()
    rows = np.random.default_rng(1).permutation(N)[:200]
    number = groups_kernels.group_rows(as_rows(X), rows).stored[rows]
    pairs = {(number[i], document[n]) for i, n in enumerate(rows)}
    assert len(pairs) == len(np.unique(document[rows])) == number.max() + 1
    parts = groups_kernels.split_groups(number, 3)
    assert np.bincount(parts).max() == 3
    assert len({(p, n) for p, n in zip(parts, number, strict=True)}) == parts.max() + 1
    assert parts.max() + 1 == sum(math.ceil(n / 3) for n in np.bincount(number))


def test_rows_that_only_look_alike_are_not_taken_for_it(monkeypatch):
    """Another order, an explicit zero, another value, a hash that they share."""
    indptr, indices = np.array([0, 2, 4, 6, 9, 11]), np.array([1, 3, 1, 3, 3, 1, 1, 2, 3, 1, 3])
    values = np.array([1.0, 2, 1, 2, 2, 1, 1, 0, 2, 1, 2.5])
    X = as_rows(sparse.csr_matrix((values, indices, indptr), shape=(5, 4)))
    assert len(set(groups_kernels.group_rows(X, np.arange(5)).stored.tolist())) == 4
    monkeypatch.setattr(groups_kernels, "hash_rows", lambda indptr, indices, values, rows, out: out.fill(7))
    number = groups_kernels.group_rows(X, np.arange(5)).stored
    assert number[0] == number[1]
    assert len(set(number[1:].tolist())) == 4


def test_an_epoch_has_every_row_once_and_the_same_together():
    row_group = np.random.default_rng(0).integers(0, 40, 300)
    orders = [
        epoch_order(seed, epoch, np.arange(300), row_group=row_group)
        for seed, epoch in ((1, 0), (1, 0), (1, 1), (2, 0))
    ]
    for order in orders:
        assert sorted(order) == list(range(300))
        ring = row_group[np.append(order, order[0])]  # one group may be cut, its ends first and last
        assert np.count_nonzero(np.diff(ring)) == len(np.unique(row_group))
    assert np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], orders[2])
    assert not np.array_equal(orders[0], orders[3])


def test_a_row_of_a_large_group_is_as_likely_as_any_to_be_the_last():
    """Fifty groups of eight and 401 single rows; failing by chance: 5 standard errors, below 1e-6."""
    row_group = np.concatenate([np.arange(50).repeat(8), np.arange(50, 451)])
    last = np.array([epoch_order(seed, 0, np.arange(801), row_group=row_group)[-1] for seed in range(600)])
    assert abs((last < 400).mean() - 400 / 801) < 5 * 0.5 / 600**0.5


def cross_fitted(model, floor=1.0):
    """What has a fused pass: the softmax's closed form, a grid for other noises."""
    return CrossFitted(floor=floor) if model == "softmax" else Grid(7, "cross-fitted", floor=floor)


def problem_of(X, y, *, model="softmax", method="augment-reduce", sampler=None, dtype=torch.float32, **changes):
    rng = np.random.default_rng(2)
    sampler = sampler or FeatureCandidates(n_own=3, per_feature=4)
    sampler = sampler.bind(np.bincount(y, minlength=K), cpu.draw_without_replacement)
    sampler.prepare(TrainingData(as_rows(X), np.arange(N), y), 12)
    settings = {
        "X": as_rows(X), "active": np.arange(N), "n_rows": N, "labels": torch.from_numpy(y.astype(np.int64)),
        "sample_weight": torch.from_numpy(rng.random(N) + 0.5).to(dtype), "method": method,
        "noise": resolve_noise(model), "sampler": sampler, "n_sampled": 12, "kernels": cpu,
        "local": cross_fitted(model) if method == "augment-reduce" else None, "optimizer": Adagrad(0.3, 2.0),
        "prior": Prior.from_counts(2.0, np.maximum((X != 0).sum(0), 1).A1, N, dtype, of_bias=1.5),
    }  # fmt: skip
    return Problem(**{**settings, **changes})


def state_of(problem, dtype, scale=1.0):
    rng = np.random.default_rng(3)
    weight, bias = (torch.from_numpy(scale * rng.standard_normal(s)).to(dtype) for s in ((K, D), (K,)))
    of_weight, of_bias = problem.optimizer.init_state(weight), problem.optimizer.init_state(bias)
    return State(reference.Parameters(weight, bias, of_weight, of_bias), {}, Clock(4, 1))


def after_steps(problem, dtype, rows, scale=1.0, n=2):
    """Parameters, bounds and floor hits after n steps on the rows; those of plain torch where nothing is fused."""
    state, bounds, hits = state_of(problem, dtype, scale), [], 0
    with torch.inference_mode() if problem.fused else contextlib.nullcontext():
        for t in range(5, 5 + n):
            generator = torch.Generator().manual_seed(t)
            state, info = vem.step(problem, state, rows, Clock(t, 1), generator=generator)
            bounds.append(info.bound)
            hits += info.floor_hits
    parameters = state.parameters
    return [parameters.weight, parameters.bias, *parameters.weight_state, *parameters.bias_state, *bounds], hits


def fused(problem):
    return problem.local.fused(problem.kernels, compiled(problem.noise), K)


def counted(fused_pass, taken):
    """The pass, which notes that it has been taken."""

    class Counted:
        serves = staticmethod(fused_pass.serves)

        def __call__(self, *args, **named):
            taken.append(1)
            return fused_pass(*args, **named)

    return Counted()


ROWS = np.concatenate([np.arange(100, 170), np.arange(10), [3, 3], np.arange(200, 230)])


@pytest.mark.parametrize(
    ("model", "method", "sampler"),
    [
        ("softmax", "augment-reduce", FeatureCandidates(3, 4)),
        ("probit", "augment-reduce", FeatureCandidates(3, 4)),
        ("softmax", "augment-reduce", HeadAndTail()),
        ("softmax", "sampled-softmax", FeatureCandidates(3, 4)),
        ("logistic", "one-vs-each", FrequencyShared()),
        ("softmax", "exact", AllClasses()),
    ],
)
def test_a_step_that_scores_them_once_is_the_step_that_scores_each(model, method, sampler):
    X, y, document = documents(dtype=np.float64)
    settings = {"model": model, "method": method, "sampler": sampler, "dtype": torch.float64}
    runs = MinibatchGroups.among(document[ROWS])
    assert len(runs.first) < 0.5 * len(ROWS)
    one_by_one, _ = after_steps(problem_of(X, y, **settings), torch.float64, ROWS)
    once, _ = after_steps(problem_of(X, y, **settings, row_group=document), torch.float64, ROWS)
    for expected, found in zip(one_by_one, once, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("in_one_pass", [False, True])
def test_a_run_is_scored_and_pushed_once(in_one_pass, monkeypatch):
    """How many rows the kernels are given: different ones, however many have the same features."""
    X, y, document = documents()
    given = []

    def counting(name):
        kernel = getattr(cpu, name)
        return lambda X, rows, *rest, **named: given.append(len(rows)) or kernel(X, rows, *rest, **named)

    for name in ("pair_scores", "shared_scores", "push_shared"):
        monkeypatch.setattr(cpu, name, counting(name))
    problem = problem_of(X, y, row_group=document)
    problem.fused = fused(problem) if in_one_pass else None
    after_steps(problem, torch.float32, ROWS, n=1)
    assert given == [len(MinibatchGroups.among(document[ROWS]).first)] * 3
    given.clear()
    problem = problem_of(X, y)
    problem.fused = fused(problem) if in_one_pass else None
    after_steps(problem, torch.float32, ROWS, n=1)
    assert given == [len(ROWS)] * 3


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("prior", "weighted", "floor"), [(True, True, 1.0), (False, False, 0.01), (True, False, None)])
@pytest.mark.parametrize(
    "sampler", [FeatureCandidates(3, 4), HeadAndTail(), FrequencyShared(), FeatureCandidates(40, 40)]
)
@pytest.mark.parametrize(
    ("model", "scale"),
    [
        ("softmax", 0.3),
        ("softmax", 30.0),
        ("probit", 0.3),
        ("probit", 3.0),
        ("logistic", 0.3),
        ("logistic", 3.0),
        (CompiledStudentT3(), 3.0),
    ],
)
def test_one_pass_over_the_runs_makes_the_numbers_of_the_torch_operations(
    sampler, prior, weighted, floor, known, model, scale, monkeypatch
):
    """In float64, where twenty torch operations and one pass differ by rounding alone; p small and large."""
    monkeypatch.setattr("augment_reduce.kernels.cpu.work.WORTH_A_THREAD", 1)
    X, y, document = documents(dtype=np.float64)
    changes = {"model": model, "sampler": sampler, "local": cross_fitted(model, floor), "dtype": torch.float64}
    changes |= {} if prior else {"prior": None}
    changes |= {} if weighted else {"sample_weight": None}
    changes |= {"row_group": document} if known else {}
    problem = problem_of(X, y, **changes)
    plain, plain_hits = after_steps(problem, torch.float64, ROWS, scale)
    problem.fused = counted(fused(problem), taken := [])
    passed, hits = after_steps(problem, torch.float64, ROWS, scale)
    assert hits == plain_hits
    assert len(taken) == 2
    for expected, found in zip(plain, passed, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("model", ["softmax", "probit", "logistic"])
def test_a_label_far_above_or_below_all_others_stays_finite(model):
    """psi_y up to 300 above and below: beyond what a float32 exponential reaches."""
    X, y, document = documents()
    settings = {"model": model, "row_group": document, "prior": None, "optimizer": Adagrad(1.0, 1.0)}
    problem = problem_of(X, y, **settings)
    start = state_of(problem, torch.float32, 150.0).parameters.weight
    expected, _ = after_steps(problem, torch.float32, ROWS, scale=150.0, n=1)
    problem.fused = fused(problem)
    found, _ = after_steps(problem, torch.float32, ROWS, scale=150.0, n=1)
    assert all(torch.isfinite(t).all() for t in found)
    moved = expected[0] - start
    assert moved.abs().max() > 0.5
    # Between a label and a rival 300 above it a logistic's integrand is flat, and rounding decides where nodes lie.
    rough = 0.2 if model == "logistic" else 1e-2
    torch.testing.assert_close(found[0] - start, moved, rtol=rough, atol=rough)


def test_what_is_left_beside_a_label_that_is_nearly_all_keeps_its_digits():
    """The label, in the sample too, 25 to 35 above its rivals: they are e^-30 of the sum."""
    psi = np.array([[30.0, -1.0, 0.5, 2.0]], np.float32)
    last, before = np.full(6, -1, np.int32), np.empty(4, np.int32)
    classes = np.array([3, 1, 4, 5])
    candidates_kernels.link(classes, last, before)
    ones, grad, of_label = np.ones((1, 4), np.float32), np.empty((1, 4), np.float32), np.empty(1, np.float32)
    softmax_groups.cross_fitted_softmax(
        0, 1, psi, np.array([30.0], np.float32), np.array([0, 1]), np.array([3]), np.empty((1, 0), np.int64),
        np.zeros(1, np.int64), last, before, ones, ones, ones[0], np.ones(1, np.float32), 0, 1.0, np.inf, grad,
        of_label, np.empty((0, 4), np.float32), np.empty(0, np.float32), np.zeros(1, np.int64), np.empty(4, np.int64),
        np.zeros(4),
    )  # fmt: skip
    rivals = np.exp(np.array([-31.0, -29.5, -28.0]))
    np.testing.assert_allclose(of_label[0], rivals.sum(), rtol=1e-6)
    np.testing.assert_allclose(grad[0], [0.0, *-rivals], rtol=1e-6, atol=1e-22)


def test_an_interrupt_while_a_minibatch_is_loaded_leaves_no_trace(monkeypatch):
    """Between finding the touched features and numbering them; D beyond the number for which none is needed."""
    rng = np.random.default_rng(0)
    X = sparse.random_array((60, 6000), density=0.01, rng=rng, format="csr", dtype=np.float32)
    weight, bias = torch.from_numpy(rng.standard_normal((7, 6000)).astype(np.float32)), torch.zeros(7)
    rows, other, classes = np.arange(30), np.arange(30, 60), torch.arange(7)
    expected = cpu.shared_scores(as_rows(X), other, classes, weight, bias)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(batch_kernels, "_number_features", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cpu.shared_scores(as_rows(X), rows, classes, weight, bias)
    assert torch.equal(cpu.shared_scores(as_rows(X), other, classes, weight, bias), expected)


class OneOfItsOwn(HeadAndTail):
    """A sampler of the user's: besides, for each row, the class after its label, and nothing said of how many."""

    name = "one-of-its-own-shared"

    def draw_for(self, minibatch, size, *, generator):
        sampled, labels = super().draw_for(minibatch, size, generator=generator), minibatch.labels
        own = (labels[:, None] + 1) % self.n_classes
        return sampled._replace(
            own=own, log_weight=torch.nn.functional.pad(sampled.log_weight, (0, 1)),
            mask=torch.nn.functional.pad(sampled.mask | (sampled.classes == own), (0, 1)),
        )  # fmt: skip


def test_a_sampler_of_the_user_may_have_own_classes_by_the_label():
    X, y, _ = documents(dtype=np.float64)
    problem = problem_of(X, y, method="sampled-softmax", sampler=OneOfItsOwn(), dtype=torch.float64)
    found, _ = after_steps(problem, torch.float64, ROWS)
    problem.kernels = reference
    expected, _ = after_steps(problem, torch.float64, ROWS)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    settings = AugmentReduceClassifier(
        class_sampling=OneOfItsOwn(), method="sampled-softmax", max_iter=2, batch_size=240
    )
    problems, train = [], fitting.train
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "RUNS", 2)
        patch.setattr(fitting, "train", lambda problem, *rest: problems.append(problem) or train(problem, *rest))
        settings.fit(X, y)
    assert problems[0].row_group is None


def test_whole_numbers_are_compared_too():
    X = sparse.csr_matrix(np.array([[1, 0, 2], [1, 0, 2], [0, 3, 0]], np.int8))
    assert Shape.of(as_rows(X), 2).repeats == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True), ({"model": "probit"}, True), ({"sampler": HeadAndTail()}, True), ({"model": Laplace()}, False),
        ({"method": "sampled-softmax"}, False), ({"sampler": AllClasses()}, False),
        ({"sampler": FeatureCandidates(2, 4)}, True),
    ],
)  # fmt: skip
def test_which_steps_take_one_pass(changes, expected):
    """Cross-fitted, with classes, weights and a mask that a minibatch shares."""
    X, y, _ = documents()
    problem, taken = problem_of(X, y, **changes), []
    made = problem.local and fused(problem)
    problem.fused = made and counted(made, taken)
    after_steps(problem, torch.float32, ROWS, n=1)
    assert bool(taken) is expected


@pytest.mark.parametrize("optimizer", [Adagrad(0.3, 1.0), Adam(0.1)])
@pytest.mark.parametrize("with_prior", [False, True])
@pytest.mark.parametrize("kernels", [cpu, device])
def test_pairs_that_belong_to_any_row_are_those_of_the_reference(kernels, optimizer, with_prior):
    """Lines that are not row by row: some rows have several, some none."""
    X, _, _ = documents(dtype=np.float64)
    rng, rows = np.random.default_rng(0), np.arange(50, 80)
    of_line = rng.integers(0, 25, 70)
    shared, own = torch.from_numpy(rng.permutation(K)[:9]), torch.from_numpy(rng.integers(0, K, (70, 2)))
    grad, own_grad, share, own_share = (
        torch.from_numpy(rng.standard_normal(size)) for size in ((30, 9), (70, 2), (30, 9), (70, 2))
    )
    shares = (share.abs(), own_share.abs()) if with_prior else (None, None)
    prior = (
        Prior.from_counts(2.0, np.maximum((X != 0).sum(0), 1).A1, N, torch.float64, of_bias=1.5) if with_prior else None
    )
    results = []
    for module in (reference, kernels):
        weight, bias = (torch.from_numpy(np.random.default_rng(1).standard_normal(s)) for s in ((K, D), (K,)))
        parameters = reference.Parameters(weight, bias, optimizer.init_state(weight), optimizer.init_state(bias))
        there = as_rows(X)
        if module is device:
            there = device.DeviceRows.of(there, torch.device("cpu"), torch.float64)
        psi = module.pair_scores(there, rows, own, weight, bias, of_line)
        module.push_shared(
            there, rows, shared, grad, own, own_grad, *shares, parameters, optimizer, 3, prior, own_rows=of_line
        )
        results.append([psi, weight, bias, *parameters.weight_state, *parameters.bias_state])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("stream", [False, True])
def test_rows_are_hashed_once_a_fit(stream, monkeypatch):
    """For the batch size, the search for the prior, the runs of a minibatch and the labels of the same features."""
    X, y, _ = documents()
    hashed, hash_rows, searched = [], groups_kernels.hash_rows, []
    monkeypatch.setattr(fitting, "RUNS", 16)
    monkeypatch.setattr(
        groups_kernels, "hash_rows", lambda *arguments: hashed.append(len(arguments[3])) or hash_rows(*arguments)
    )
    monkeypatch.setattr(prior_search, "FEWEST_HELD_OUT", 5)
    monkeypatch.setattr(prior_search, "is_small", lambda noise, shape: False)  # so that it is searched by training
    documents_of = prior_search.documents
    monkeypatch.setattr(prior_search, "documents", lambda *given: searched.append(given) or documents_of(*given))
    clf = AugmentReduceClassifier(
        class_sampling="candidates-shared", n_sampled_classes=8, random_state=0, max_epochs=8, batch_size=64
    )
    if stream:
        clf.partial_fit(X, y, classes=np.arange(K))
    else:
        clf.set_params(early_stopping=True).fit(X, y)
    assert len(searched) == 1
    assert hashed == [N]


def test_the_estimator_merges_documents_and_leaves_different_rows_as_they_are(monkeypatch):
    X, y, _ = documents()
    problems, train = [], fitting.train
    monkeypatch.setattr(fitting, "RUNS", 64)
    monkeypatch.setattr(fitting, "train", lambda problem, *rest: problems.append(problem) or train(problem, *rest))
    settings = {"class_sampling": "candidates-shared", "n_sampled_classes": 8, "random_state": 0, "max_epochs": 2}
    settings["batch_size"] = 128
    AugmentReduceClassifier(**settings).fit(X, y)
    weight = np.ones(N)
    weight[:50] = 0.0
    AugmentReduceClassifier(**settings).fit(X, y, sample_weight=weight)
    AugmentReduceClassifier(**settings).fit(*different_rows())
    AugmentReduceClassifier(**{**settings, "class_sampling": "uniform"}).fit(X, y)
    assert [problem.row_group is not None for problem in problems] == [True, True, False, False]
    assert np.bincount(problems[0].row_group).max() == 2  # at least 64 different rows, or parts, of a minibatch of 128
    assert (problems[1].row_group[:50] == -1).all()
    assert (problems[1].row_group[50:] >= 0).all()


class Renamed(HeadAndTail):
    """A user's own sampler, which has whatever its base has."""

    name = "mine"


class DrawnAnew(HeadAndTail):
    """Of which nobody knows whether duplicates have the same classes."""

    name = "drawn-anew"

    def draw_halves(self, minibatch, size, *, generator):
        return super().draw_halves(minibatch, size, generator=generator)


class DrawnAnewByFeatures(DrawnAnew):
    own_by_features = True


def test_duplicates_come_together_with_a_sampler_of_the_users_own(monkeypatch):
    X, y, _ = documents()
    problems, train = [], fitting.train
    monkeypatch.setattr(fitting, "RUNS", 64)
    monkeypatch.setattr(fitting, "train", lambda problem, *rest: problems.append(problem) or train(problem, *rest))
    settings = {"n_sampled_classes": 8, "random_state": 0, "max_epochs": 2, "batch_size": 128}
    ours, mine, apart, together = (
        AugmentReduceClassifier(class_sampling=cls(), **settings).fit(X, y)
        for cls in (HeadAndTail, Renamed, DrawnAnew, DrawnAnewByFeatures)
    )
    assert [problem.row_group is not None for problem in problems] == [True, True, False, True]
    np.testing.assert_array_equal(ours.coef_, mine.coef_)
    np.testing.assert_array_equal(ours.coef_, together.coef_)
    assert not np.array_equal(ours.coef_, apart.coef_)


def test_a_fit_that_goes_on_is_one_that_never_stopped(monkeypatch):
    monkeypatch.setattr(fitting, "RUNS", 64)
    X, y, _ = documents()
    settings = {"class_sampling": "candidates-shared", "n_sampled_classes": 8, "random_state": 0, "batch_size": 128}
    whole = AugmentReduceClassifier(max_iter=6, **settings).fit(X, y)
    parts = AugmentReduceClassifier(max_iter=3, warm_start=True, **settings).fit(X, y).fit(X, y)
    assert torch.equal(whole._fitted.parameters.weight, parts._fitted.parameters.weight)
