"""Decomposed batch norm back into the family."""
