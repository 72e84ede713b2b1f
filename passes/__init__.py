"""PASSES: one row a pass. The command line, the reference page, the public names and the contract tests follow it.

The modules below import each other, never a name from here: any of them may be what starts the import of this one.
"""

from .folding.fold import Fold
from .graph.options import Pass
from .modes.freezing import Freeze, Unfreeze
from .modes.recalibration import Recalibrate
from .modes.switching import SwitchMode
from .raising.raising import RaiseDecomposed
from .rewriting.consolidation import Consolidate
from .rewriting.legalization import Legalize

PASSES: tuple[type[Pass], ...] = (
    Consolidate,
    Legalize,
    SwitchMode,
    Freeze,
    Unfreeze,
    Recalibrate,
    Fold,
    RaiseDecomposed,
)
