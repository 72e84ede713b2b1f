"""What every test runs under."""

import logging

import pytest
import torch

pytest.register_assert_rewrite("folds")

# Tensors this small are slower on several threads, and far slower where parallel workers share the cores.
torch.set_num_threads(1)

# pytest captures every log, and torch's of what it traces is long: a quarter of the time of an export.
logging.getLogger("torch.__trace").propagate = False
