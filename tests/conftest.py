"""What every test runs under."""

import gc

import pytest
import torch

pytest.register_assert_rewrite("folds")

# Tensors this small are slower on several threads, and far slower where parallel workers share the cores.
torch.set_num_threads(1)


def pytest_collection_finish(session):
    """Spares the garbage collector the modules and tests, which stay: it took a fifth of the time that exports take."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
