"""The scikit-learn face: odd input that must work, bad input that must be refused."""

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from augment_reduce import AugmentReduceClassifier, FrequencyShared, Gumbel, Normal
from augment_reduce.sampling import SAMPLERS
from tests.helpers.user_noises import Laplace, StudentT3


def rows(n=150, K=5, D=4, seed=0, dtype=np.float64):
    generator = np.random.default_rng(seed)
    X = generator.normal(size=(n, D))
    y = (X @ generator.normal(size=(D, K)) * 2 + generator.gumbel(size=(n, K))).argmax(1)
    return X.astype(dtype), y


def small(**parameters):
    return AugmentReduceClassifier(**{"max_iter": 60, "batch_size": 32, "random_state": 0, **parameters})


MODELS = ["softmax", "probit", "logistic", Laplace(), StudentT3(), Gumbel()]


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("method", ["augment-reduce", "exact"])
def test_every_model_fits_and_predicts(model, method):
    X, y = rows()
    clf = small(model=model, method=method).fit(X, y)
    P = clf.predict_proba(X)
    np.testing.assert_allclose(P.sum(1), 1.0, atol=1e-8)
    assert (clf.classes_[P.argmax(1)] == clf.predict(X)).mean() > 0.99
    assert clf.score(X, y) > 0.45
    _, probabilities = clf.predict_topk(X, 3)
    np.testing.assert_allclose(probabilities, np.sort(P, 1)[:, ::-1][:, :3], atol=1e-7)
    assert clf.log_likelihood(X, y) == pytest.approx(np.log(P[np.arange(len(y)), y]).mean(), abs=1e-7)


@pytest.mark.parametrize("method", ["one-vs-each", "sampled-softmax"])
def test_softmax_only_methods(method):
    X, y = rows()
    assert small(method=method).fit(X, y).score(X, y) > 0.45
    with pytest.raises(ValueError, match="about the softmax only"):
        small(method=method, model="probit").fit(X, y)


@pytest.mark.parametrize("sampling", [*(name for name in SAMPLERS if name != "all"), FrequencyShared(0.5)])
def test_every_sampler_by_name_or_object(sampling):
    X, y = rows()
    X = sp.csr_matrix(X) if sampling == "candidates-shared" else X
    assert small(class_sampling=sampling, n_sampled_classes=2).fit(X, y).score(X, y) > 0.45


@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise-adagrad", "adam", "section4"])
@pytest.mark.parametrize("prior_variance", [None, 1.0])
def test_every_optimizer_with_and_without_prior(optimizer, prior_variance):
    X, y = rows()
    rate = 0.5 if optimizer == "section4" else None
    clf = small(optimizer=optimizer, prior_variance=prior_variance, learning_rate=rate, max_iter=200).fit(X, y)
    assert clf.score(X, y) > 0.45


@pytest.mark.parametrize("preset", ["paper", "paper-text"])
@pytest.mark.parametrize("model", ["softmax", "probit", "logistic"])
def test_presets_run(preset, model):
    X, y = rows()
    clf = small(preset=preset, model=model, max_iter=400, n_sampled_classes=2, prior_variance=10.0).fit(X, y)
    assert clf.score(X, y) > 0.35
    assert np.abs(clf.coef_).max() > 0.1


def test_two_classes_follow_scikit_learns_conventions():
    X, y = rows(K=2)
    clf = small(max_iter=300).fit(X, np.array(["no", "yes"])[y])
    assert clf.coef_.shape == (1, 4)
    assert clf.intercept_.shape == (1,)
    decision = clf.decision_function(X)
    assert decision.shape == (150,)
    np.testing.assert_allclose(decision, (X @ clf.coef_.T + clf.intercept_)[:, 0], atol=1e-10)
    np.testing.assert_allclose(clf.predict_proba(X)[:, 1], 1 / (1 + np.exp(-decision)), atol=1e-10)
    assert ((decision > 0) == (clf.predict(X) == "yes")).all()


def test_two_class_probit_is_the_textbook_one():
    from scipy.stats import norm

    X, y = rows(K=2)
    clf = small(model="probit").fit(X, y)
    np.testing.assert_allclose(clf.predict_proba(X)[:, 1], norm.cdf(clf.decision_function(X) / np.sqrt(2)), atol=1e-9)


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "lil", "bsr", "int64", "duplicates", "fortran", "strided"])
def test_any_form_of_the_same_rows_gives_the_same_model(form):
    X, y = rows(dtype=np.float64)
    X[np.abs(X) < 0.5] = 0.0
    if form in ("fortran", "strided"):
        expected = small().fit(X, y)
        given = np.asfortranarray(X) if form == "fortran" else np.repeat(X, 2, axis=1)[:, ::2]
    else:
        expected = small().fit(sp.csr_matrix(X), y)
        given = sp.csr_matrix(X)
        if form == "int64":
            given.indices, given.indptr = given.indices.astype(np.int64), given.indptr.astype(np.int64)
        elif form == "duplicates":
            coo = sp.coo_matrix(X)
            data, row, col = (np.concatenate([a, a]) for a in (coo.data / 2, coo.row, coo.col))
            order = np.argsort(row, kind="stable")
            indptr = np.searchsorted(row[order], np.arange(len(y) + 1))
            given = sp.csr_matrix((data[order], col[order], indptr), shape=X.shape)
        elif form != "csr":
            given = given.asformat(form)
    np.testing.assert_allclose(small().fit(given, y).coef_, expected.coef_, rtol=1e-9, atol=1e-12)


def test_sparse_and_dense_rows_give_the_same_model():
    """Where most numbers are zero; else the means of dense columns are taken out, and those of sparse ones not."""
    X, y = rows()
    X[np.abs(X) < 1.0] = 0.0
    np.testing.assert_allclose(small().fit(sp.csr_matrix(X), y).coef_, small().fit(X, y).coef_, rtol=1e-6, atol=1e-9)


def test_float32_stays_float32_and_float64_stays_float64():
    X, y = rows()
    assert small().fit(X.astype(np.float32), y).coef_.dtype == np.float32
    assert small().fit(X, y).coef_.dtype == np.float64
    assert small(dtype="float32").fit(X, y).coef_.dtype == np.float32


def test_empty_rows_and_unseen_features():
    X, y = rows(D=6)
    X[:, 5] = 0.0  # never seen in training
    X[3] = 0.0  # an empty row
    clf = small().fit(sp.csr_matrix(X), y)
    assert (clf.coef_[:, 5] == 0).all()
    Z = np.zeros((2, 6))
    Z[1, 5] = 100.0
    np.testing.assert_allclose(clf.predict_proba(Z)[0], clf.predict_proba(Z)[1])


def test_no_features_at_all_fits_the_frequencies():
    y = np.repeat(np.arange(4), [10, 20, 30, 40])
    clf = AugmentReduceClassifier(max_epochs=400, batch_size=25, random_state=0)
    clf.fit(sp.csr_matrix((100, 1)), y)
    np.testing.assert_allclose(clf.predict_proba(sp.csr_matrix((1, 1)))[0], [0.1, 0.2, 0.3, 0.4], atol=0.02)


def test_memory_mapped_read_only_rows(tmp_path):
    X, y = rows(dtype=np.float32)
    csr = sp.csr_matrix(X)
    parts = []
    for name in ("data", "indices", "indptr"):
        np.save(tmp_path / f"{name}.npy", getattr(csr, name))
        parts.append(np.load(tmp_path / f"{name}.npy", mmap_mode="r"))
    mapped = sp.csr_matrix(tuple(parts), shape=X.shape, copy=False)
    assert np.array_equal(small().fit(mapped, y).coef_, small().fit(csr, y).coef_)


@pytest.mark.parametrize("labels", ["text", "bool", "float", "negative"])
def test_any_label_type(labels):
    X, y = rows(K=2 if labels == "bool" else 5)
    given = {"text": np.array(list("vwxyz"))[y], "bool": y == 1, "float": y + 0.0, "negative": y - 7}[labels]
    clf = small().fit(X, given)
    assert set(clf.predict(X)) <= set(given)
    assert clf.score(X, given) > 0.45


def test_pipeline_and_grid_search():
    X, y = rows()
    search = GridSearchCV(
        make_pipeline(StandardScaler(), AugmentReduceClassifier(max_iter=30, random_state=0)),
        {"augmentreduceclassifier__prior_variance": [0.01, 10.0]}, cv=2,
    )  # fmt: skip
    search.fit(X, y)
    assert search.best_params_["augmentreduceclassifier__prior_variance"] in (0.01, 10.0)


def test_warm_start_goes_on():
    X, y = rows()
    clf = small(max_iter=20, warm_start=True).fit(X, y).fit(X, y)
    assert clf.n_iter_ == 40
    assert np.array_equal(clf.coef_, small(max_iter=40).fit(X, y).coef_)
    assert clf.history_["iteration"][-1] == 40


def test_partial_fit_learns_from_a_stream():
    X, y = rows(n=3000)
    clf = AugmentReduceClassifier(batch_size=50, random_state=0)
    for start in range(0, 2500, 250):
        clf.partial_fit(X[start : start + 250], y[start : start + 250], classes=np.arange(5))
    whole = AugmentReduceClassifier(max_epochs=10, batch_size=50, random_state=0).fit(X[:2500], y[:2500])
    assert clf.log_likelihood(X[2500:], y[2500:]) > whole.log_likelihood(X[2500:], y[2500:]) - 0.05
    assert clf.n_iter_ == 50


def test_partial_fit_errors():
    X, y = rows()
    with pytest.raises(ValueError, match="needs classes"):
        small().partial_fit(X, y)
    clf = small().partial_fit(X, y, classes=np.arange(6))
    with pytest.raises(ValueError, match=r"first at row 0: y=.*9"):
        clf.partial_fit(X[:2], np.array([9, 1]))
    with pytest.raises(ValueError, match="differ from those of the first call"):
        clf.partial_fit(X, y, classes=np.arange(3))
    with pytest.raises(ValueError, match="balanced"):
        small(class_weight="balanced").partial_fit(X, y, classes=np.arange(5))


def test_sparsify_predicts_the_same_and_densify_undoes_it():
    X, y = rows(D=6)
    X[:, 5] = 0.0
    clf = small().fit(X, y)
    before, coef = clf.predict_proba(X), clf.coef_.copy()
    clf.sparsify()
    assert sp.issparse(clf.coef_)
    assert clf.coef_.nnz <= 25
    np.testing.assert_allclose(clf.predict_proba(X), before, atol=1e-12)
    np.testing.assert_allclose(clf.sparsify().predict_proba(sp.csr_matrix(X)), before, atol=1e-12)
    assert np.array_equal(clf.densify().coef_, coef)


BAD = [
    ({"prior_variance": 0.0}, "prior_variance to be a positive number or None, found 0.0"),
    ({"prior_variance": -1}, "prior_variance to be a positive number"),
    ({"model": "sofmax"}, "softmax"),
    ({"model": Normal}, "instance"),
    ({"method": "softmax"}, "'augment-reduce', 'one-vs-each'"),
    ({"n_sampled_classes": 0}, "n_sampled_classes to be a whole number >= 1"),
    ({"batch_size": 2.5}, "batch_size to be a whole number"),
    ({"max_iter": 3, "max_epochs": 2}, "Both max_iter and max_epochs"),
    ({"optimizer": "sgd"}, "'section4', 'adagrad'"),
    ({"learning_rate": -0.1}, "learning_rate to be a positive number"),
    ({"class_sampling": "frequent"}, "'frequency'"),
    ({"local_step": "natural-gradient", "model": "probit"}, "closed form"),
    ({"local_step": "newton", "method": "exact"}, "keeps nothing per row"),
    ({"preset": "papers"}, "'paper' or 'paper-text'"),
    ({"dtype": "float16"}, "'float32' or 'float64'"),
    ({"validation_fraction": 1.0}, "validation_fraction in"),
    ({"device": "tpu"}, "device"),
    ({"n_jobs": 0}, "n_jobs to be a whole number other than 0"),
]


@pytest.mark.parametrize(("parameters", "message"), BAD, ids=[str(sorted(p)) for p, _ in BAD])
def test_bad_parameters_are_refused_before_training(parameters, message):
    X, y = rows()
    clf = AugmentReduceClassifier(**{"max_iter": None if "max_epochs" in parameters else 5, **parameters})
    with pytest.raises((ValueError, TypeError), match=message):
        clf.fit(X, y)
    assert not hasattr(clf, "coef_")


def test_bad_data_is_refused():
    X, y = rows()
    for bad in (np.nan, np.inf):
        Z = X.copy()
        Z[2, 1] = bad
        with pytest.raises(ValueError, match=r"NaN|infinity"):
            small().fit(Z, y)
        with pytest.raises(ValueError, match=r"NaN|infinity"):
            small().fit(sp.csr_matrix(Z), y)
    with pytest.raises(ValueError, match="one class"):
        small().fit(X, np.zeros(len(y)))
    with pytest.raises(ValueError, match="NaN"):
        small().fit(X, np.where(y == 0, np.nan, y))
    text = np.array(list("abcde"), dtype=object)[y]
    text[7] = None
    with pytest.raises(ValueError, match=r"1 of 150 are missing.*row 7"):
        small().fit(X, text)
    text[7] = 3
    with pytest.raises(ValueError, match=r"mix text and numbers.*row 7 has 3"):
        small().fit(X, text)
    with pytest.raises(ValueError, match=r"largest is 4e\+30.*Scale the features"):
        small(feature_scaling=False).fit(np.full_like(X, 4e30, dtype=np.float32), y)
    with pytest.raises(ValueError, match="Scale the features"):
        small(feature_scaling=False).fit(np.full_like(X, 1e200), y)
    with pytest.raises(ValueError, match="inconsistent"):
        small().fit(X, y[:-1])
    with pytest.raises(ValueError, match="zero"):
        small().fit(X, y, sample_weight=np.zeros(len(y)))
    with pytest.raises(ValueError, match=r"[Nn]egative"):
        small().fit(X, y, sample_weight=-np.ones(len(y)))


def test_bad_data_at_prediction_is_refused():
    X, y = rows()
    clf = small().fit(X, y)
    with pytest.raises(ValueError, match="features"):
        clf.predict(X[:, :2])
    with pytest.raises(ValueError, match=r"1 of 150 rows.*row 4: y=.*77.*fit with them"):
        clf.log_likelihood(X, np.where(np.arange(len(y)) == 4, 77, y))
    named = small().fit(X, np.array(list("abcde"))[y])
    with pytest.raises(ValueError, match=r"150 of 150 rows.*row 0: y=\d\."):
        named.log_likelihood(X, y)
    with pytest.raises(ValueError, match=r"y='zz'"):
        named.log_likelihood(X[:1], ["zz"])
    with pytest.raises(ValueError, match="k between 1"):
        clf.predict_topk(X, 6)


def test_a_refused_fit_leaves_the_old_model_alone():
    X, y = rows()
    clf = small().fit(X, y)
    before = clf.predict_proba(X)
    with pytest.raises(ValueError, match="one class"):
        clf.fit(X, np.zeros(len(y)))
    with pytest.raises(ValueError, match="NaN"):
        clf.fit(np.full_like(X, np.nan), y)
    assert np.array_equal(clf.predict_proba(X), before)


def test_what_cannot_fit_is_refused_before_it_is_allocated():
    X = sp.csr_matrix((np.ones(4, np.float32), ([0, 1, 2, 3], [0, 5, 10**9, 3])), shape=(4, 2 * 10**9))
    with pytest.raises(MemoryError, match=r"float32.*rowwise-adagrad"):
        AugmentReduceClassifier(max_iter=1).fit(X, np.arange(4))


def test_importance_sampling_of_the_paper_agrees_with_quadrature():
    """1,000 draws have an RMSE near 0.1 nat a row (DESIGN); the mean of 150 rows lies within 0.05."""
    X, y = rows()
    clf = small(model="probit").fit(X, y)
    assert clf.log_likelihood(X, y, integral="importance") == pytest.approx(clf.log_likelihood(X, y), abs=0.05)
    assert clf.log_likelihood(X, y, integral="importance") != clf.log_likelihood(X, y)


def test_as_many_classes_as_rows_is_nothing_to_warn_about():
    X, _ = rows(n=40)
    assert len(small().fit(X, np.arange(40)).classes_) == 40


def test_class_weight_is_sample_weight():
    X, y = rows()
    by_class = small(class_weight={0: 3.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0}).fit(X, y).coef_
    by_row = small().fit(X, y, sample_weight=np.array([3.0, 1.0, 1.0, 1.0, 2.0])[y]).coef_
    assert np.array_equal(by_class, by_row)
