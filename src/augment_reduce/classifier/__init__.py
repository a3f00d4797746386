"""What AugmentReduceClassifier (`estimator.py`) is made of: its methods, by what they are about."""
