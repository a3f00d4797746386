"""Shared by all layers above: atomic writes, ranges of numbers, memory limits, seeds."""
