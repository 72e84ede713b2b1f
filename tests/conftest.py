"""What every test runs under."""

import pytest
import torch

pytest.register_assert_rewrite("folds")

# Tensors this small are slower on several threads, and far slower where parallel workers share the cores.
torch.set_num_threads(1)
