"""What this library raises: one root, so that a caller can catch all of it with one clause."""

from __future__ import annotations


class BatchNormError(Exception):
    """The root of every error this library raises on purpose."""


class InvalidProgram(BatchNormError, ValueError):
    """The program handed in is not an exported program or a graph module, or its file cannot be read as one."""


class InvalidOutput(BatchNormError, ValueError):
    """The place to write to cannot be written, or would overwrite what was read."""


class InvalidBatchNorm(BatchNormError, ValueError):
    """An argument that a batch norm cannot compute with: its `op` and name, what was `found` and `expected`."""

    def __init__(self, op: str, argument: str, found: str, expected: str) -> None:
        super().__init__(f"{op}: {argument} is {found}, expected {expected}")
        self.op, self.argument, self.found, self.expected = op, argument, found, expected


class InvalidChoice(BatchNormError, ValueError):
    """A backend, device or target was asked for that does not exist, is not installed, or cannot run a batch norm."""
