"""coef_ and intercept_ are the model: whoever writes to them, or replaces them, changes what it predicts."""

import copy
import pickle

import numpy as np
import pytest
import scipy.sparse as sp

from augment_reduce import AugmentReduceClassifier

COPIES = {
    "fitted": lambda clf, folder: clf,
    "deepcopy": lambda clf, folder: copy.deepcopy(clf),
    "pickle": lambda clf, folder: pickle.loads(pickle.dumps(clf)),
    "file": lambda clf, folder: (clf.save(folder / "m"), AugmentReduceClassifier.load(folder / "m"))[1],
    "sparse": lambda clf, folder: clf.sparsify(),
    "dense again": lambda clf, folder: clf.sparsify().densify(),
}
each_copy = pytest.mark.parametrize("made", COPIES.values(), ids=COPIES)
WRITES = {
    "in place": lambda clf: (values(clf.coef_).fill(0), clf.intercept_.fill(0)),
    "replaced": lambda clf: (setattr(clf, "coef_", clf.coef_ * 0), setattr(clf, "intercept_", clf.intercept_ * 0)),
    "integers": lambda clf: (
        setattr(clf, "coef_", np.zeros(clf.coef_.shape, np.int64)),
        setattr(clf, "intercept_", [0] * len(clf.intercept_)),
    ),
}  # fmt: skip
each_write = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)


def values(coef):
    return coef.data if sp.issparse(coef) else coef


def fitted(K, dtype=np.float64, **settings):
    generator = np.random.default_rng(0)
    X = generator.normal(size=(90, 4)).astype(dtype)
    y = (X @ generator.normal(size=(4, K)) + generator.gumbel(size=(90, K))).argmax(1)
    return AugmentReduceClassifier(**{"max_iter": 40, "random_state": 0, "warm_start": True} | settings).fit(X, y), X, y


@pytest.mark.parametrize("K", [2, 3, 7])
@each_copy
@each_write
def test_zeros_are_honoured(K, made, write, tmp_path):
    """scikit-learn's test_write_parameters, in every state that a model may be in."""
    clf, X, y = fitted(K)
    clf = made(clf, tmp_path)
    write(clf)
    np.testing.assert_array_equal(clf.decision_function(X), 0.0)
    np.testing.assert_allclose(clf.predict_proba(X), 1.0 / K, atol=1e-15)
    np.testing.assert_allclose(clf.predict_topk(X, 1)[1], 1.0 / K, atol=1e-15)
    assert clf.log_likelihood(X, y) == pytest.approx(-np.log(K))
    assert (clf.predict(X) == clf.classes_[0]).all()
    for way in COPIES.values():  # and wherever it goes from there
        np.testing.assert_array_equal(way(clf, tmp_path).decision_function(X), 0.0)


@pytest.mark.parametrize("K", [2, 3])
@each_copy
def test_what_is_predicted_is_what_they_say(K, made, tmp_path):
    clf, X, _ = fitted(K)
    clf = made(clf, tmp_path)
    clf.coef_ = clf.coef_ * 3.0
    clf.intercept_ = clf.intercept_ - 0.25
    expected = np.asarray(X @ clf.coef_.T + clf.intercept_)
    np.testing.assert_allclose(clf.decision_function(X), expected[:, 0] if K == 2 else expected, atol=1e-12)
    again = pickle.loads(pickle.dumps(clf))
    np.testing.assert_allclose(values(again.coef_), values(clf.coef_), rtol=1e-14)  # kept in units of training
    np.testing.assert_allclose(again.intercept_, clf.intercept_, rtol=1e-14)
    np.testing.assert_array_equal(again.predict_proba(X), clf.predict_proba(X))


@pytest.mark.parametrize("K", [2, 3])
@pytest.mark.parametrize("how", ["fit", "partial_fit"])
def test_training_goes_on_from_what_was_written(K, how):
    clf, X, y = fitted(K)
    clf.coef_ = np.full_like(clf.coef_, 5.0)
    clf.set_params(learning_rate=1e-9, max_iter=1, prior_variance=None)
    getattr(clf, how)(X, y)
    np.testing.assert_allclose(clf.coef_, 5.0, atol=1e-6)


def test_what_nobody_wrote_to_is_left_as_it_was():
    """Two classes have one row of coefficients: made from the weights, it must not be made into them."""
    clf, X, y = fitted(2)
    weight = clf._fitted.parameters.weight.clone()
    clf.decision_function(X)
    pickle.dumps(clf)
    copy.deepcopy(clf)
    assert (clf._fitted.parameters.weight == weight).all()
    one, _, _ = fitted(2, max_iter=80)
    assert np.array_equal(clf.fit(X, y).coef_, one.coef_)


@pytest.mark.parametrize("K", [2, 5])
def test_other_shapes_are_refused(K):
    clf, X, _ = fitted(K)
    clf.coef_ = clf.coef_[:, :2]
    with pytest.raises(ValueError, match=rf"coef_ of shape \({1 if K == 2 else K}, 4\).*found.*2\)"):
        clf.predict(X)
    clf, X, _ = fitted(K)
    clf.intercept_ = np.zeros(9)
    with pytest.raises(ValueError, match=r"intercept_ of shape.*found \(9,\)"):
        clf.predict(X)


@pytest.mark.parametrize("K", [3, 40])
def test_they_are_centred_over_the_classes_unless_somebody_wrote_them(K):
    clf, X, _ = fitted(K, batch_size=10)
    assert abs(clf._fitted.parameters.weight.mean(0)).max() > 1e-4  # Adagrad's own are not
    np.testing.assert_allclose(clf.coef_.sum(0), 0.0, atol=1e-12)
    assert clf.intercept_.sum() == pytest.approx(0.0, abs=1e-12)
    np.testing.assert_allclose(clf.decision_function(X), X @ clf.coef_.T + clf.intercept_, atol=1e-12)
    before = clf.predict_proba(X)
    clf.coef_ = clf.coef_ + 1.0
    np.testing.assert_allclose(clf.decision_function(X), X @ clf.coef_.T + clf.intercept_, atol=1e-12)
    np.testing.assert_allclose(clf.predict_proba(X), before, atol=1e-12)
    preset, _, _ = fitted(K, preset="paper")  # whose weights are compared with those of the authors' code
    assert np.shares_memory(preset.coef_, preset._fitted.parameters.weight.numpy())


def test_a_pickle_holds_the_weights_once():
    clf, _, _ = fitted(40, optimizer="rowwise-adagrad", feature_scaling=False)
    big = copy.deepcopy(clf)
    big._fitted.parameters.weight = big._fitted.parameters.weight.new_zeros(40, 10_000)
    big.n_features_in_ = 10_000
    big._publish()
    assert len(pickle.dumps(big)) < 1.1 * 40 * 10_000 * 8


@pytest.mark.parametrize("K", [2, 6])
@pytest.mark.parametrize("model", ["softmax", "probit", "logistic"])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_float32_model_answers_in_float32(K, model, sparse):
    clf, X, _ = fitted(K, dtype=np.float32, model=model)
    wide, _, _ = fitted(K, model=model)
    answers = ["predict_proba", "predict_log_proba", "decision_function", lambda c, X: c.predict_topk(X, 2)[1]]
    if sparse:
        clf.sparsify(), wide.sparsify()
    for answer in answers:
        ask = answer if callable(answer) else lambda c, X, name=answer: getattr(c, name)(X)
        for rows in (X, X.astype(np.float64), sp.csr_matrix(X)):
            assert ask(clf, rows).dtype == np.float32
            assert ask(wide, rows).dtype == np.float64
    np.testing.assert_allclose(clf.predict_proba(X).sum(1), 1.0, atol=3e-7)
    np.testing.assert_allclose(clf.predict_proba(X), np.exp(clf.predict_log_proba(X)), rtol=1e-5)
