"""What every test runs under, and what makes torch's own work in them cheaper without changing what it does."""

import functools
import gc
import os
from contextlib import suppress

import pytest
import torch
from torch._export import utils

pytest.register_assert_rewrite("contracts", "folds")

# Tensors this small are slower on several threads, and far slower where parallel workers share the cores.
torch.set_num_threads(1)

# Inductor asks the compiler about every instruction set that the CPU has, for ten seconds in each new process or cache.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


class _Unwritten(type):
    """`Callable` where it is only an annotation: no type is built, and what may be called is an instance of it."""

    def __getitem__(cls, _):
        return cls

    def __instancecheck__(cls, value):
        return callable(value)


# Half of what a small program's `run_decompositions` takes goes into two things that do not depend on the program.
# For each of its 26 namespaces torch looks up the composite ops of all of them: those that tests add are looked up when
# the tests call them. And it builds the annotations of `py_impl` anew at each of its 11,000 calls.
with suppress(AttributeError):  # another torch may have neither
    utils._materialize_cpp_cia_ops = functools.cache(utils._materialize_cpp_cia_ops)
torch._ops.Callable = _Unwritten("Callable", (), {})


def pytest_collection_modifyitems(items):
    """What shares an expensive program comes first, in one worker: so parallel workers end together."""
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


def pytest_collection_finish(session):
    """Spares the garbage collector the modules and tests, which stay: it took a fifth of the time that exports take."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
