"""A fit: one step (START HERE: step.py), the loop around it, and what finds prior, rate and units first."""
