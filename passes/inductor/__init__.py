"""Batch norms kept whole through Inductor."""
