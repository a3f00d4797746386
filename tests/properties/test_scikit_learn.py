"""scikit-learn's own `check_estimator` passes."""

from sklearn.utils.estimator_checks import parametrize_with_checks

from augment_reduce import AugmentReduceClassifier


@parametrize_with_checks(
    [
        AugmentReduceClassifier(prior_variance=None),
        AugmentReduceClassifier(model="probit", max_iter=50, prior_variance=None),
        AugmentReduceClassifier(),
    ],
)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)
