"""Batch norm in exported PyTorch graphs: one op family, exact rewrites, the kernel chosen when the program runs."""

from torch_batchnorm.decomps import family as ops  # noqa: F401
from torch_batchnorm.decomps.backends.forcing import backend as backend
from torch_batchnorm.decomps.backends.registration import register as _register
from torch_batchnorm.decomps.backends.rules import Backend as Backend
from torch_batchnorm.decomps.backends.selection import Explanation as Explanation
from torch_batchnorm.decomps.backends.selection import explain_backend as explain_backend
from torch_batchnorm.decomps.backends.selection import select_backend as select_backend
from torch_batchnorm.decomps.forms import FORMS as FORMS
from torch_batchnorm.decomps.forms import Form as Form
from torch_batchnorm.decomps.table import decomposition_table as decomposition_table
from torch_batchnorm.errors import BatchNormError as BatchNormError
from torch_batchnorm.errors import InvalidBatchNorm as InvalidBatchNorm
from torch_batchnorm.errors import InvalidChoice as InvalidChoice
from torch_batchnorm.errors import InvalidOutput as InvalidOutput
from torch_batchnorm.errors import InvalidProgram as InvalidProgram
from torch_batchnorm.exporting import exportable as exportable
from torch_batchnorm.inspection import Report as Report
from torch_batchnorm.inspection import diff as diff
from torch_batchnorm.inspection import inspect as inspect
from torch_batchnorm.passes.folding.fold import Fold as Fold
from torch_batchnorm.passes.folding.fold import fold as fold
from torch_batchnorm.passes.graph.result import Declined as Declined
from torch_batchnorm.passes.graph.result import Edit as Edit
from torch_batchnorm.passes.graph.result import Result as Result
from torch_batchnorm.passes.inductor.options import InductorBatchNorm as InductorBatchNorm
from torch_batchnorm.passes.inductor.options import inductor_options as inductor_options
from torch_batchnorm.passes.modes.freezing import Freeze as Freeze
from torch_batchnorm.passes.modes.freezing import Unfreeze as Unfreeze
from torch_batchnorm.passes.modes.freezing import freeze as freeze
from torch_batchnorm.passes.modes.freezing import unfreeze as unfreeze
from torch_batchnorm.passes.modes.recalibration import Recalibrate as Recalibrate
from torch_batchnorm.passes.modes.recalibration import recalibrate as recalibrate
from torch_batchnorm.passes.modes.switching import SwitchMode as SwitchMode
from torch_batchnorm.passes.modes.switching import switch_mode as switch_mode
from torch_batchnorm.passes.raising.raising import RaiseDecomposed as RaiseDecomposed
from torch_batchnorm.passes.raising.raising import raise_decomposed as raise_decomposed
from torch_batchnorm.passes.rewriting.consolidation import Consolidate as Consolidate
from torch_batchnorm.passes.rewriting.consolidation import consolidate as consolidate
from torch_batchnorm.passes.rewriting.legalization import Legalize as Legalize
from torch_batchnorm.passes.rewriting.legalization import legalize as legalize
from torch_batchnorm.passes.rewriting.targets import TARGETS as TARGETS
from torch_batchnorm.passes.rewriting.verification import verify as verify
from torch_batchnorm.render import render as render

_register()
