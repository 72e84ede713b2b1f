"""The tensors that a program holds anew, and those that it holds no longer: written once, into whatever holds them."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from .result import Program


class Holding:
    """Changes to the tensors of a program, by name. lost: what nothing reads any more."""

    def __init__(self) -> None:
        self._gained: dict[str, torch.Tensor] = {}  # some of them under names that were there
        self._behind: dict[str, list[str]] = defaultdict(list)  # new names, by the one that they come after
        self.lost: set[str] = set()

    def hold(self, name: str, tensor: torch.Tensor, beside: str = "") -> None:
        """The program has this tensor under this name, new or not; a new one right behind another."""
        self._gained[name] = tensor
        if beside:
            self._behind[beside].append(name)

    def write(self, program: Program, shared: bool) -> None:
        """shared: whether the program's modules may be another's too."""
        if not self._gained and not self.lost:
            return
        if isinstance(program, ExportedProgram):
            self._keep_state(program._state_dict, program._constants)
        else:
            _keep_attributes(program, self._gained, self.lost, shared)

    def _keep_state(self, state: dict[str, Any], constants: dict[str, Any]) -> None:
        # in order: a layer's new bias comes right behind its weight, as if the module had been made with it
        old, gained = dict(state), self._gained
        state.clear()
        for name, tensor in old.items():
            if name in gained or name not in self.lost:
                state[name] = gained.get(name, tensor)
            state.update((new, gained[new]) for new in self._behind.get(name, ()))
        for name in self.lost - gained.keys():
            constants.pop(name, None)
        for name, tensor in gained.items():
            if name not in state:
                (state if isinstance(tensor, torch.nn.Parameter) else constants)[name] = tensor


def _keep_attributes(top: torch.nn.Module, gained: dict[str, torch.Tensor], lost: set[str], shared: bool) -> None:
    """Puts tensors into a module's attributes by name and takes others out, with the modules that then hold nothing.

    shared: whether its modules may be another program's too; those on the way are then replaced by copies.
    """
    owned: dict[int, torch.nn.Module] = {}

    def owner_of(name: str) -> tuple[torch.nn.Module, list[torch.nn.Module], str]:
        *path, last = name.split(".")
        owners = [top]
        for atom in path:
            child = owners[-1]._modules.get(atom)
            child = torch.nn.Module() if child is None else child
            if shared and id(child) not in owned:  # a graph module is the draft's own copy already
                new = child if isinstance(child, GraphModule) else _shallow(child)
                owned.update({id(child): new, id(new): new})
            owners[-1]._modules[atom] = owned[id(child)] if shared else child
            owners.append(owners[-1]._modules[atom])  # type: ignore[arg-type]
        return owners[-1], owners, last

    for name, tensor in gained.items():
        owner, _, last = owner_of(name)
        held = next((d for d in (owner._parameters, owner._buffers) if last in d), None)
        if held is None:
            setattr(owner, last, tensor)
        else:
            held[last] = tensor  # type: ignore[assignment]
    for name in lost - gained.keys():
        owner, owners, last = owner_of(name)
        for held in (owner._parameters, owner._buffers, owner.__dict__):
            held.pop(last, None)
        atoms = name.split(".")[:-1]
        while atoms and _is_bare(owners[-1]):
            owners.pop()
            owners[-1]._modules.pop(atoms.pop())


def _is_bare(module: torch.nn.Module) -> bool:
    """Whether a module holds nothing, and is no more than a place for something."""
    held = any((module._parameters, module._buffers, module._modules))
    return not held and vars(module).keys() <= vars(torch.nn.Module()).keys()


def _shallow(module: torch.nn.Module) -> torch.nn.Module:
    """A module with containers of its own around the same tensors."""
    new = copy.copy(module)  # which shares the containers: a tensor put into one would be the original's too
    for name in ("_parameters", "_buffers", "_modules"):
        new.__dict__[name] = dict(module.__dict__[name])
    return new
