"""What is chosen when nothing is: the rules, what all classes in the sum make of it, and that no scale breaks a fit."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from augment_reduce import AugmentReduceClassifier, Grid
from augment_reduce.config.defaults import Shape, default_batch_size, default_epochs, first_prior_variance, resolve
from augment_reduce.config.validation import memory_bytes
from augment_reduce.kernels.rows import as_rows
from augment_reduce.local.amortised import Amortised
from augment_reduce.local.cross_fitting import CrossFitted
from augment_reduce.local.remembered import NaturalGradient, Newton
from augment_reduce.model.noise import NOISES, resolve_noise
from augment_reduce.optim import Adagrad
from augment_reduce.sampling import resolve_sampler
from augment_reduce.training import fit as fitting
from tests.helpers.user_noises import Laplace, StudentT3

MNIST = Shape(60_000, 784, 10, 60_000 * 150)
BIBTEX = Shape(4_880, 1_836, 146, 4_880 * 68)
OMNIGLOT = Shape(25_968, 784, 1_623, 25_968 * 190)
DEBIAN = Shape(161_000, 21_494, 5_694, 161_000 * 13)
NOTHING_SET = AugmentReduceClassifier().get_params()


def settings(shape, model="softmax", **changes):
    return resolve({**NOTHING_SET, **changes}, resolve_noise(model), shape, torch.float32)


@pytest.mark.parametrize("shape", [MNIST, BIBTEX, OMNIGLOT])
def test_few_classes_are_all_summed(shape):
    chosen = settings(shape)
    assert (chosen.sampler.name, chosen.n_sampled_classes) == ("all", shape.n_classes)
    assert isinstance(chosen.local, NaturalGradient)
    assert chosen.local.uses_updated


@pytest.mark.parametrize("model", NOISES)
def test_many_classes_are_sampled_by_the_minibatch_and_q_is_cross_fitted(model):
    for shape, name, size in (
        (DEBIAN, "head-tail-shared", 750),
        (replace(DEBIAN, sparse=True), "candidates-shared", 300),
    ):
        chosen = settings(shape, model)
        assert (chosen.sampler.name, chosen.n_sampled_classes) == (name, size)
        assert isinstance(chosen.local, CrossFitted if model == "softmax" else Grid)
        assert chosen.local.takes_halves


def test_features_that_say_nothing_point_at_nothing():
    """Rows without features, and rows that have most of them."""
    for n_nonzero in (0, 100_000, 161_000 * 10_000):
        assert settings(replace(DEBIAN, sparse=True, n_nonzero=n_nonzero)).sampler.name == "head-tail-shared"


def test_three_classes_are_too_few_for_halves():
    assert isinstance(settings(BIBTEX, n_sampled_classes=4).local, CrossFitted)
    assert isinstance(settings(BIBTEX, n_sampled_classes=3).local, NaturalGradient)
    assert isinstance(settings(BIBTEX, "probit", n_sampled_classes=3).local, Newton)
    assert isinstance(settings(DEBIAN, n_sampled_classes=3).local, Amortised)
    assert isinstance(settings(DEBIAN, "probit", n_sampled_classes=3).local, Newton)


def test_who_asks_for_a_number_of_classes_gets_a_sample():
    assert settings(BIBTEX, n_sampled_classes=20).sampler.name == "uniform"
    assert settings(OMNIGLOT, n_sampled_classes=50).sampler.name == "head-tail-shared"
    assert settings(BIBTEX, method="sampled-softmax").sampler.name == "uniform"


def test_presets_keep_the_papers_choices():
    chosen = settings(DEBIAN, preset="paper")
    assert (chosen.sampler.name, chosen.optimizer.name, chosen.prior_variance) == ("uniform", "section4", None)


def test_biases_are_as_fast_as_the_scores_of_others_move():
    """Pixels, counts: as far as the step of one row takes the score of another. Around zero, nothing to undo."""
    assert settings(replace(OMNIGLOT, agreement=30.0)).optimizer.bias_scale == 30.0
    assert settings(replace(OMNIGLOT, agreement=30.0)).describe().count("of biases 30 times that") == 1
    assert settings(replace(DEBIAN, agreement=0.3)).optimizer.bias_scale == 1.0
    assert settings(replace(MNIST, agreement=49.0)).optimizer.bias_scale == pytest.approx(7.0)
    assert settings(replace(MNIST, agreement=-0.1)).optimizer.bias_scale == 1.0
    assert settings(replace(OMNIGLOT, agreement=30.0, stream=True)).optimizer.bias_scale == 1.0


@pytest.mark.parametrize("of_bias", [None, 5.0])
def test_intercepts_have_a_prior_of_their_own_or_none(of_bias, monkeypatch):
    """The share of the weights' prior that a fit gives them is v / (N v_0), and 0 where they are free."""
    made, from_counts = [], fitting.Prior.from_counts
    monkeypatch.setattr(fitting.Prior, "from_counts", lambda *a, **k: made.append(from_counts(*a, **k)) or made[-1])
    X, y = np.abs(np.random.default_rng(0).normal(size=(50, 9))), np.arange(50) % 3
    AugmentReduceClassifier(max_iter=2, prior_variance=2.0, intercept_prior_variance=of_bias).fit(X, y)
    assert made[0].variance == 2.0
    assert made[0].inverse_rows == pytest.approx(0.0 if of_bias is None else 2.0 / (50 * of_bias))
    assert settings(replace(OMNIGLOT, agreement=30.0), preset="paper").optimizer.bias_scale == 1.0


def test_agreement_is_what_one_rows_step_does_to_another():
    """By its meaning: w + sign(x_n), and the score of x_m, over all pairs of different rows."""
    x = np.array([[0.0, 2.0, 0.5], [1.0, 0.0, -3.0], [0.0, 4.0, 0.0], [2.0, 1.0, 1.0]])
    truth = np.mean([np.sign(x[n]) @ x[m] for n in range(4) for m in range(4) if n != m])
    for X in (as_rows(x), as_rows(sp.csr_matrix(x))):
        assert X.agreement(np.arange(4)) == pytest.approx(truth, rel=1e-12)
        assert X.agreement(np.array([0, 3])) == pytest.approx(
            np.mean([np.sign(x[n]) @ x[m] for n, m in ((0, 3), (3, 0))]), rel=1e-12
        )
        assert X.agreement(np.array([1])) == 0.0
        assert Shape.of(X, 7, np.array([0, 3])).agreement == X.agreement(np.array([0, 3]))
        weights = np.array([1.0, 2.0, 0.0, 1.0])  # are repeats
        assert X.agreement(np.arange(4), weights) == pytest.approx(
            as_rows(x[[0, 1, 1, 3]]).agreement(np.arange(4)), rel=1e-12
        )
        assert X.agreement(np.arange(4), np.full(4, 1e-3)) == pytest.approx(truth, rel=1e-12)
    many = np.random.default_rng(0).standard_normal((30_000, 5))
    assert abs(as_rows(many).agreement(np.arange(30_000))) < 0.01  # 5 features, 1e4 rows: 5e-4 of chance
    assert as_rows(np.abs(many)).agreement(np.arange(30_000)) == pytest.approx(5 * math.sqrt(2 / math.pi), rel=0.02)


def test_the_first_step_is_measured_in_noise_over_the_root_of_the_nonzeros():
    """Of those that act together, where rows agree; the search for the prior begins at scores of variance 16."""
    for name, noise in NOISES.items():
        variance = {"softmax": math.pi**2 / 6, "probit": 1.0, "logistic": math.pi**2 / 3}[name]
        for agreement in (0.0, 13.0):
            optimizer = resolve(NOTHING_SET, noise(), replace(BIBTEX, agreement=agreement), torch.float32).optimizer
            expected = 2.2 * variance / math.sqrt(68 + agreement**2)
            assert optimizer.learning_rate == pytest.approx(expected)
        ratio = {"softmax": 1.0, "probit": 6 / math.pi**2, "logistic": 2.0}[name]
        assert first_prior_variance(noise(), BIBTEX) == pytest.approx(16 / 68 * ratio)
    assert settings(BIBTEX, learning_rate=0.7).optimizer.learning_rate == 0.7


def test_fewer_weights_than_rows_go_on_longer():
    assert (default_epochs(MNIST), default_epochs(OMNIGLOT), default_epochs(BIBTEX)) == (50, 10, 30)


def test_zeros_of_dense_rows_are_not_counted():
    """The same rows, dense and sparse, have the same defaults: all of the fit is then the same to rounding."""
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(300, 40)) * (rng.random((300, 40)) < 0.1)
    y = rng.integers(0, 7, 300)
    fits = [AugmentReduceClassifier(random_state=0, max_epochs=3).fit(X, y) for X in (dense, sp.csr_matrix(dense))]
    np.testing.assert_allclose(fits[0].coef_, fits[1].coef_, rtol=1e-9, atol=1e-12)


def test_rows_of_weight_zero_do_not_count_for_the_rules():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(120, 5)), rng.integers(0, 4, 120)
    weight = np.repeat([1.0, 0.0], [80, 40])
    with_zeros = AugmentReduceClassifier(random_state=0).fit(X, y, sample_weight=weight)
    without = AugmentReduceClassifier(random_state=0).fit(X[:80], y[:80])
    np.testing.assert_allclose(with_zeros.coef_, without.coef_, rtol=1e-9, atol=1e-12)


def test_the_rate_goes_by_the_step_alone():
    optimizer = Adagrad(0.6, half_after=10.0)
    assert optimizer.scalars(1)[0] == 0.6
    assert optimizer.scalars(11)[0] == pytest.approx(0.3)
    assert optimizer.scalars(21)[0] == pytest.approx(0.2)
    state = [torch.zeros(1)]
    assert float(optimizer.direction(torch.ones(1), state, 11)[0]) == pytest.approx(0.3)
    assert Adagrad(0.6).scalars(10**6)[0] == 0.6
    with pytest.raises(ValueError, match="half_after"):
        Adagrad(0.6, half_after=0.0)


def classes_in_blobs(n, K, D, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, K, n)
    return 2.0 * rng.normal(size=(K, D))[y] + rng.normal(size=(n, D)), y


def test_with_all_classes_augment_reduce_is_the_exact_fit():
    X, y = classes_in_blobs(200, 9, 4)
    ours, exact = (
        AugmentReduceClassifier(method=method, random_state=0, max_epochs=5).fit(X, y)
        for method in ("augment-reduce", "exact")
    )
    np.testing.assert_allclose(ours.coef_, exact.coef_, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("model", ["probit", "logistic"])
def test_with_all_classes_the_other_models_come_close_to_their_exact_fit(model):
    """Same optimiser, same steps; what differs is a bound in place of the integral. 2 % is what the bound may cost."""
    X, y = classes_in_blobs(400, 9, 4)
    ours, exact = (
        AugmentReduceClassifier(model, method=method, random_state=0, max_epochs=30).fit(X, y).log_likelihood(X, y)
        for method in ("augment-reduce", "exact")
    )
    assert abs(ours - exact) < 0.02 * abs(exact)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("start", [0.0, 1.0, 10.0])
@pytest.mark.parametrize(("model", "size"), [("softmax", None), ("softmax", 1), ("probit", None), ("logistic", 1)])
def test_no_scale_of_features_or_of_the_start_diverges(model, size, start, scale):
    """The end is finite, and no worse on the training rows than the start: nothing ran away."""
    X, y = classes_in_blobs(300, 12, 5)
    fits = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for steps in (1, 400):
            clf = AugmentReduceClassifier(
                model, n_sampled_classes=size, init_scale=start, max_iter=steps, random_state=0, batch_size=30
            )
            fits.append(clf.fit(scale * X, y).log_likelihood(scale * X, y))
    assert math.isfinite(fits[1])
    assert fits[1] > fits[0]


@pytest.mark.parametrize("model", ["softmax", "probit", "logistic"])
def test_one_sampled_class_learns(model):
    X, y = classes_in_blobs(500, 12, 5)
    clf = AugmentReduceClassifier(model, n_sampled_classes=1, random_state=0, max_epochs=60).fit(X, y)
    assert clf.score(X, y) > 0.75  # all classes summed: 0.86


@pytest.mark.parametrize("noise", [Laplace(), StudentT3()])
def test_a_noise_with_a_kink_or_heavy_tails_keeps_a_tight_bound(noise):
    """With all classes in the sum a grid gives nothing away, kinks and heavy tails or not."""
    X, y = classes_in_blobs(400, 8, 5)
    clf = AugmentReduceClassifier(noise, random_state=0, max_epochs=20).fit(X, y)
    gap = clf.history_["bound_gap"][~np.isnan(clf.history_["bound_gap"])][-1]
    assert abs(gap) < 1e-6


def test_rows_are_counted_without_a_copy_of_them_all():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(5_000, 3)) * (rng.random((5_000, 3)) < 0.3)
    some = np.sort(rng.permutation(5_000)[:3_000])
    expected = np.count_nonzero(values[some], axis=0)
    for X in (values, sp.csr_matrix(values)):
        np.testing.assert_array_equal(as_rows(X).feature_counts(some), expected)
        np.testing.assert_array_equal(as_rows(X).feature_counts(), np.count_nonzero(values, axis=0))


def test_memory_is_said_by_what_is_kept():
    amortised = memory_bytes(settings(DEBIAN), DEBIAN, early_stopping=False)
    kept = memory_bytes(settings(DEBIAN, local_step="natural-gradient"), DEBIAN, early_stopping=False)
    assert amortised["per-row state"] == 0
    assert kept["per-row state"] == 12 * DEBIAN.n_rows
    cache = memory_bytes(settings(DEBIAN, class_sampling="cache-shared"), DEBIAN, early_stopping=False)
    assert cache["class sampler"] == 8 * 4 * DEBIAN.n_rows
    of_step = {m: memory_bytes(settings(BIBTEX, m), BIBTEX, early_stopping=False)["one step"] for m in NOISES}
    assert of_step["softmax"] == of_step["probit"]  # compiled loops hold no number for each node
    by_torch = memory_bytes(settings(BIBTEX, Laplace()), BIBTEX, early_stopping=False)["one step"]
    assert by_torch > of_step["probit"]
    remembered = memory_bytes(settings(DEBIAN, "probit", local_step=Grid(9, "remembered")), DEBIAN, False)
    assert remembered["per-row state"] == (3 + 9) * 4 * DEBIAN.n_rows


def test_larger_minibatches_only_where_rows_come_together():
    many = Shape(200_000, 20_000, 5_000, 2_600_000, sparse=True, repeats=5.0)
    assert default_batch_size(many, resolve_sampler("head-tail-shared")) == 1024
    assert default_batch_size(many, resolve_sampler("uniform")) == 512
    assert default_batch_size(many) == 512
    assert default_batch_size(replace(many, repeats=1.2), resolve_sampler("head-tail-shared")) == 512
