"""What chose a rule, or what a rule is worth: ablations, exact optima, calibration, variances."""
