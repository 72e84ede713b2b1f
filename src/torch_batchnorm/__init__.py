"""Batch norm in exported PyTorch graphs: one op family, exact rewrites, the kernel chosen when the program runs."""

from torch_batchnorm.decomps import family as ops  # noqa: F401
from torch_batchnorm.decomps.backend import Backend as Backend
from torch_batchnorm.decomps.backend import Explanation as Explanation
from torch_batchnorm.decomps.backend import backend as backend
from torch_batchnorm.decomps.backend import explain_backend as explain_backend
from torch_batchnorm.decomps.backend import select_backend as select_backend
from torch_batchnorm.decomps.forms import FORMS as FORMS
from torch_batchnorm.decomps.forms import Form as Form
from torch_batchnorm.decomps.table import decomposition_table as decomposition_table
from torch_batchnorm.errors import BatchNormError as BatchNormError
from torch_batchnorm.errors import InvalidBatchNorm as InvalidBatchNorm
from torch_batchnorm.errors import InvalidChoice as InvalidChoice
from torch_batchnorm.errors import InvalidOutput as InvalidOutput
from torch_batchnorm.errors import InvalidProgram as InvalidProgram
from torch_batchnorm.passes.consolidation import Consolidate as Consolidate
from torch_batchnorm.passes.consolidation import consolidate as consolidate
from torch_batchnorm.passes.exporting import exportable as exportable
from torch_batchnorm.passes.freezing import Freeze as Freeze
from torch_batchnorm.passes.freezing import Unfreeze as Unfreeze
from torch_batchnorm.passes.freezing import freeze as freeze
from torch_batchnorm.passes.freezing import unfreeze as unfreeze
from torch_batchnorm.passes.legalization import TARGETS as TARGETS
from torch_batchnorm.passes.legalization import Legalize as Legalize
from torch_batchnorm.passes.legalization import legalize as legalize
from torch_batchnorm.passes.mode import SwitchMode as SwitchMode
from torch_batchnorm.passes.mode import switch_mode as switch_mode
from torch_batchnorm.passes.program import Declined as Declined
from torch_batchnorm.passes.program import Edit as Edit
from torch_batchnorm.passes.program import Result as Result
from torch_batchnorm.passes.recalibration import Recalibrate as Recalibrate
from torch_batchnorm.passes.recalibration import recalibrate as recalibrate
from torch_batchnorm.passes.verification import verify as verify
from torch_batchnorm.render import render as render
from torch_batchnorm.report import Report as Report
from torch_batchnorm.report import diff as diff
from torch_batchnorm.report import inspect as inspect
