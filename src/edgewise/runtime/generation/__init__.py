"""Text, token by token, on one decoder that many requests share."""

from edgewise.runtime.generation.costs import LanguageCosts, RowCosts
from edgewise.runtime.generation.generation import Generation
from edgewise.runtime.generation.records import Summary, Token
from edgewise.runtime.generation.session import LanguageSession

__all__ = ["Generation", "LanguageCosts", "LanguageSession", "RowCosts", "Summary", "Token"]
