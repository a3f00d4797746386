"""Measures, figures and the demo."""
