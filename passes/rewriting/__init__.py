"""Batch norms of a graph: found, read as records, written as another form, and what a consumer takes."""
