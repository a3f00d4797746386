"""One seed gives one result, whatever the number of threads."""

import numpy as np

from augment_reduce import AugmentReduceClassifier


def rows(n=300, K=6, D=4, seed=0):
    generator = np.random.default_rng(seed)
    X = generator.normal(size=(n, D))
    return X, (X @ generator.normal(size=(D, K)) + generator.gumbel(size=(n, K))).argmax(1)


def test_same_seed_same_model_and_two_seeds_differ():
    X, y = rows()
    fits = [AugmentReduceClassifier(max_iter=40, random_state=seed).fit(X, y).coef_ for seed in (1, 1, 2)]
    assert np.array_equal(fits[0], fits[1])
    assert not np.array_equal(fits[0], fits[2])


def test_threads_do_not_change_the_result():
    X, y = rows()
    one, two = (AugmentReduceClassifier(max_iter=40, random_state=0, n_jobs=n).fit(X, y).coef_ for n in (1, 2))
    assert np.array_equal(one, two)
