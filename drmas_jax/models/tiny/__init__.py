"""Policies small enough to be shipped and trained on two CPU cores."""
