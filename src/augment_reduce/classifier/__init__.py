"""The base classes of AugmentReduceClassifier (`estimator.py`): its methods, by purpose."""
