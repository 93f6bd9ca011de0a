"""Runs a transformer by a dispatch plan: its modules compute on the backends that were chosen."""

from edgewise.runtime.dispatching.model import DispatchedModel, dispatch_model

__all__ = ["DispatchedModel", "dispatch_model"]
