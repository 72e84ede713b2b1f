"""Batch norm in exported PyTorch graphs: one op family, exact rewrites, the kernel chosen when the program runs."""

from torch_batchnorm.errors import BatchNormError as BatchNormError
from torch_batchnorm.passes.consolidation import Consolidate as Consolidate
from torch_batchnorm.passes.consolidation import consolidate as consolidate
from torch_batchnorm.passes.program import Result as Result
