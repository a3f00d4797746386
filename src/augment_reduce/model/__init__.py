"""The maths: noise, bounds, quadrature, scores and predictions."""
