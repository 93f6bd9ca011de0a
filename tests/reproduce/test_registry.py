from __future__ import annotations

import importlib
import inspect

import pytest

from edgewise.errors import ConfigError
from edgewise.reproduce import Reproduction, Setup, Verdict, claim_ids, claim_title, run_claim


def reproduction(*holds: bool | None) -> Reproduction:
    return Reproduction(
        title="t",
        source="s",
        setting={},
        figures=(),
        verdicts=tuple(Verdict(claim="something", holds=h, detail="") for h in holds),
    )


@pytest.mark.parametrize("claim_id", claim_ids())
def test_every_claim_has_a_title_and_takes_a_setup(claim_id: str) -> None:
    module = importlib.import_module(f"edgewise.reproduce.{claim_id.replace('-', '_')}")

    assert claim_title(claim_id).strip()
    assert "\n" not in claim_title(claim_id)
    assert len(inspect.signature(module.run).parameters) == 1


def test_the_claims_of_the_paper_are_found_by_the_names_of_their_files() -> None:
    assert {"uniexit-table6", "uniexit-fig9", "uniexit-fig5"} <= set(claim_ids())
    assert "registry" not in claim_ids()


def test_an_unknown_claim_gets_the_nearest_names() -> None:
    with pytest.raises(ConfigError, match="uniexit-table6"):
        run_claim("uniexit-tabel6", Setup())


@pytest.mark.parametrize(
    ("holds", "wanted"),
    [
        ((True, True), True),
        ((True, False, None), False),
        ((True, None), None),
        ((), None),
    ],
    ids=["all hold", "one fails", "one cannot be said", "nothing was judged"],
)
def test_a_claim_holds_where_all_its_verdicts_do(
    holds: tuple[bool | None, ...],
    *,
    wanted: bool | None,
) -> None:
    assert reproduction(*holds).holds is wanted
