"""q of each row: remembered, cross-fitted or amortised."""
