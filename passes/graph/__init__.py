"""Editing graphs of programs: memory, signature, nested graphs, state. Nothing here knows batch norm."""
