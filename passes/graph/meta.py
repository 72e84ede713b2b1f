"""What is known of a node's value, and metadata for nodes that stand for others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.utils._mode_utils import no_dispatch


def val_of(node: Any) -> torch.Tensor | None:
    """The tensor that a node is known to make, None when it is not known or no tensor."""
    val = node.meta.get("val") if isinstance(node, Node) else None
    return val if isinstance(val, torch.Tensor) else None


def sizes_of(sizes: Iterable[Any]) -> tuple[Any, ...]:
    """Sizes as plain numbers where they are known, a dynamic one that is constant too."""
    return tuple(size if type(size) is int else _plain(size) for size in sizes)


def _plain(size: Any) -> Any:
    # `int(size)` would put a guard on a dynamic size, and make the program one for this size alone
    known = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else None
    return size if known is None else known


def same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes, or strides, are known to be equal, without a guard on what is dynamic."""
    if len(a) != len(b):
        return False
    # plain numbers are compared as such: for symbols torch simplifies an expression each time
    pairs = zip(a, b, strict=True)
    return all(x == y if type(x) is type(y) is int else statically_known_true(x == y) for x, y in pairs)


def format_of(val: torch.Tensor) -> torch.memory_format | None:
    """The memory format that a tensor lies in, dense; None when it is another layout."""
    # by strides: `is_contiguous` guards on dynamic sizes, and says yes to two formats where an axis has one entry
    formats: dict[torch.memory_format, tuple[int, ...]] = {torch.contiguous_format: tuple(range(val.ndim))}
    if val.ndim in (4, 5):
        last = torch.channels_last if val.ndim == 4 else torch.channels_last_3d
        formats[last] = (0, *range(2, val.ndim), 1)
    for kind, order in formats.items():
        dense: list[Any] = [1]
        for dim in reversed(order):
            dense.append(dense[-1] * val.shape[dim])
        if same_sizes([val.stride()[dim] for dim in reversed(order)], dense[:-1]):
            return kind
    return None


def channel_axis(val: torch.Tensor | None) -> int | None:
    """Where a tensor of one value a channel has its channels, counted from the right; None for any other tensor.

    A tensor of one value has them anywhere: -1.

    >>> channel_axis(torch.ones(1, 3, 1, 1)), channel_axis(torch.ones(3)), channel_axis(torch.ones(2, 3))
    (2, 0, None)
    """
    if val is None:
        return None
    # a dynamic size counts as wide: it is not known to be one
    wide = [i for i, size in enumerate(val.shape) if type(size) is not int or size != 1]
    if len(wide) > 1:
        return None
    return val.ndim - 1 - wide[0] if wide else -1


def set_val(node: Node, val: Any, like: Node) -> None:
    """Gives a node its value's metadata, as detailed as another node's is; None, nothing known, takes it away."""
    detailed = "tensor_meta" in like.meta
    node.meta.pop("tensor_meta", None)  # of the value before: torch does not make it anew
    if val is None:
        node.meta.pop("val", None)
        return
    node.meta["val"] = val
    if detailed:
        several = isinstance(val, tuple | list)
        node.meta["tensor_meta"] = (
            tuple(map(_extract_tensor_metadata, val)) if several else _extract_tensor_metadata(val)
        )


def carried(node: Node, val: Any) -> dict[str, Any]:
    """A node's metadata for a node that stands for it and has another value."""
    kept = {key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta")}
    return kept if val is None else {**kept, "val": val}


def empty_val(like: torch.Tensor, shape: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    """A tensor for `meta["val"]`, fake if `like` is: made directly, ten times cheaper than by `like.new_empty`."""
    # dynamic sizes need the mode that knows their symbols
    if not isinstance(like, FakeTensor) or any(type(size) is not int for size in shape):
        return like.new_empty(tuple(shape), dtype=dtype)
    with no_dispatch():
        elements = torch.empty(tuple(shape), dtype=dtype, device="meta")
    return FakeTensor(like.fake_mode, elements, like.device)
