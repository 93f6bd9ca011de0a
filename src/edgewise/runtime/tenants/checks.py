"""What is refused before anything is loaded, and how errors are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edgewise.backends.piece import Array
from edgewise.errors import BackendError, ConfigError, EdgeError, ShapeError
from edgewise.placement.plan import Placement
from edgewise.runtime.tenants.records import TenantModel


def uses_device(placement: Placement) -> bool:
    """Whether a plan has prefixes."""
    return any(share.place > 0 for share in placement.shares)


def check_tenants(tenants: Sequence[TenantModel]) -> None:
    """Refuse tenants that cannot be told apart, or whose profiles are of other cuts.

    Raises:
        ConfigError: As said.
    """
    if not tenants:
        raise ConfigError("expected at least one tenant, found none")
    names = [t.name for t in tenants]
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise ConfigError(f"two tenants are called {twice!r}", help="give each a name of its own")
    for tenant in tenants:
        if tenant.profile.last != tenant.model.last:
            raise ConfigError(
                f"tenant {tenant.name!r}: its model has the places 0 to {tenant.model.last}, its"
                f" profile 0 to {tenant.profile.last}",
                help="measure it again: edgewise profile MODEL --segments",
            )


def check_placement(
    placement: Placement, tenants: Mapping[str, TenantModel], *, has_device: bool
) -> None:
    """Refuse a plan that cannot be carried out.

    Raises:
        ConfigError: It is of other tenants, cuts where a model has no place, gives no worker to a
            suffix, predicts nothing for a tenant, or needs a device and there is none.
    """
    found = {s.tenant: s for s in placement.shares}
    if set(found) != set(tenants) or len(found) != len(placement.shares):
        raise ConfigError(
            f"the plan is for {', '.join(s.tenant for s in placement.shares)}, the engine's tenants"
            f" are {', '.join(tenants)}"
        )
    predicted = {p.tenant for p in placement.predicted}
    for name, share in found.items():
        last = tenants[name].model.last
        if not 0 <= share.place <= last:
            raise ConfigError(
                f"the plan cuts tenant {name!r} at place {share.place}; its places are 0 to {last}"
            )
        if share.place < last and (share.workers < 1 or share.threads < 1):
            raise ConfigError(
                f"the plan leaves tenant {name!r} a suffix after place {share.place} and no core"
                " to run it",
                help="plan for fewer tenants, more cores, or all of it on the accelerator",
            )
        if name not in predicted:
            raise ConfigError(f"the plan predicts nothing for tenant {name!r}")
    if uses_device(placement) and not has_device:
        raise ConfigError(
            "the plan has prefixes on an accelerator, and the engine has none",
            help="pass device=..., or plan with accelerator=None",
        )


def check_array(tenant: TenantModel, x: Array) -> None:
    """Refuse an array that does not fit a tenant's model.

    Raises:
        ShapeError: As said.
    """
    place = tenant.model.places[0]
    given: object = x
    fits = isinstance(given, np.ndarray) and given.shape == tuple(place.shape)
    if not fits or x.dtype != place.dtype:
        raise ShapeError(
            f"tenant {tenant.name!r}: expected an array of {place.dtype} {tuple(place.shape)},"
            f" found {getattr(x, 'dtype', type(x).__name__)} {getattr(x, 'shape', '')}"
        )


def why(error: BaseException) -> str:
    """An error as the reason of an answer."""
    if isinstance(error, EdgeError):
        return error.message if error.help is None else f"{error.message} ({error.help})"
    return f"{type(error).__name__}: {error}"


def said(error: Exception, what: str) -> EdgeError:
    """An error of the same kind that says what it kept from happening."""
    if isinstance(error, EdgeError):
        kind = ConfigError if isinstance(error, ConfigError) else BackendError
        return kind(f"{what}: {error.message}", help=error.help)
    return BackendError(f"{what}: {why(error)}")
