"""What units will cost: tables of measured costs, and upper quantiles learnt from residuals."""

from edgewise.predict.costs import CostTable
from edgewise.predict.horizon import HorizonMargins

__all__ = ["CostTable", "HorizonMargins"]
