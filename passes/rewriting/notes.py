"""Notes: what a node remembers of what it was, under `meta["custom"]`, the one key that torch saves, loads and carries
through a retrace. Anyone can write there, so what is read back is input.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from ...decomps.forms import FIELDS, UPDATED
from ..graph.journal import ENTRY, fits, is_count, is_name, is_text, one_of

ORIGIN = "torch_batchnorm"

# Written into every note. What 0.1.0 wrote has none and is format 0; both are read alike.
FORMAT = 1

_CONSTANT = {
    "name": is_name,
    "place": is_count,
    "target": is_text,
    "dtype": lambda value: isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype),
}
_COUNTER = {**ENTRY, "one?": {"wraps": [{**ENTRY, "op": is_text}], "constant?": _CONSTANT, "node?": is_text}}

_SITE = {"form": is_text, "updates?": [{**ENTRY, "role": one_of(*UPDATED)}], "counter?": _COUNTER}
_DRAWS = {"was": lambda value: isinstance(value, bool | int | float | str)}

# What a note may hold. form, filled: the overload that it was before it was written as another one, and what was filled
# in then. train: how it trained, while it is in eval: its form, its updates and its counter's add as entries of the
# journal; of what draws random numbers the literal that said so. depth: the nodes of its stochastic depth. frozen: it
# stays in eval, because that was asked for or because it was exported so. detached: those of its weight
# and bias that do not learn, True of 0.1.0 for both.
_SHAPES: dict[str, Any] = {
    "form": is_text,
    "filled": [one_of(*FIELDS[1:5])],
    "train": lambda value: fits(value, _SITE) or fits(value, _DRAWS),
    "depth": lambda value: fits(value, [is_name]) and len(value) > 1,
    "frozen": one_of("asked", "exported"),
    "detached": lambda value: value is True or fits(value, [one_of("weight", "bias")]),
}


def note_of(node: Node) -> dict[str, Any]:
    """What a node remembers, without what is no note. Metadata is copied freely: whether it is this node's own is for
    the reader to judge.
    """
    custom = node.meta.get("custom")
    note = custom.get(ORIGIN) if custom and isinstance(custom, dict) else None
    if not isinstance(note, dict) or note.get("format", 0) not in (0, FORMAT):
        return {}
    return {key: note[key] for key, shape in _SHAPES.items() if key in note and fits(note[key], shape)}


def write_note(node: Node, **changes: Any) -> None:
    """Adds to what a node remembers; None makes it forget. Copies share metadata: nothing is changed in place."""
    note = note_of(node)
    for key, value in changes.items():
        if value is not None:
            note[key] = value
        else:
            note.pop(key, None)
    if custom := with_note(node.meta.get("custom"), note):
        node.meta["custom"] = custom
    else:
        node.meta.pop("custom", None)


def with_note(custom: Any, note: dict[str, Any]) -> dict[str, Any]:
    """`meta["custom"]` with this note in place of the one it had; without any where there is nothing to note."""
    others = dict(custom) if isinstance(custom, dict) else {}
    others.pop(ORIGIN, None)
    if note:
        others[ORIGIN] = {"format": FORMAT, **note}
    return others


def forget(call: Node, *keys: str) -> None:
    """Drops what a call remembers, and what loading made the reads of its outputs remember with it."""
    readers = (user for user in call.users if user.target is operator.getitem and note_of(user))
    for node in (call, *readers):
        write_note(node, **dict.fromkeys(keys))
