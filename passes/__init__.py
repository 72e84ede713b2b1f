"""How graphs are edited: finding batch norms, the one edit surface, and one pass a file."""
