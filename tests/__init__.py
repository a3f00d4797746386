"""Tests, in folders as those of src/augment_reduce; CONTRIBUTING.md describes the others."""
