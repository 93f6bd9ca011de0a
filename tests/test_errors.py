from __future__ import annotations

import inspect
import pickle

import pytest

from edgewise import errors
from edgewise.errors import (
    ConfigError,
    DataError,
    EdgeError,
    Infeasible,
    ShapeError,
    nearest_names,
)

KINDS = [e for _, e in inspect.getmembers(errors, inspect.isclass) if issubclass(e, EdgeError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_is_ours_and_carries_its_help(kind: type[EdgeError]) -> None:
    error = kind("expected a, found b", help="do c")

    assert isinstance(error, EdgeError)
    assert error.message == "expected a, found b"
    assert str(error) == "expected a, found b\nhelp: do c"


def test_without_help_the_message_stands_alone() -> None:
    assert str(EdgeError("expected a, found b")) == "expected a, found b"


@pytest.mark.parametrize("kind", [ConfigError, DataError, ShapeError])
def test_mistakes_in_arguments_and_data_are_value_errors_too(kind: type[EdgeError]) -> None:
    assert issubclass(kind, ValueError)


def test_an_infeasible_request_names_what_comes_nearest() -> None:
    assert Infeasible("nothing fits", closest=3).closest == 3
    assert Infeasible("nothing fits").closest is None


def test_the_tree_in_the_documentation_is_the_tree_in_the_code() -> None:
    drawn = {line.split()[-1] if "──" not in line else line.split("── ")[1].split()[0]
             for line in (errors.__doc__ or "").splitlines() if "──" in line}  # fmt: skip

    assert drawn | {"EdgeError"} == {kind.__name__ for kind in KINDS}


def test_errors_cross_process_borders() -> None:
    again = pickle.loads(pickle.dumps(ConfigError("expected a", help="do b")))  # noqa: S301

    assert (type(again), again.message) == (ConfigError, "expected a")


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("statictable", "did you mean 'static_table'?"),
        ("zzz", "known names: branchynet, oracle, static_table"),
        ("", "known names: branchynet, oracle, static_table"),
    ],
)
def test_the_nearest_names_are_told_or_all_of_them(name: str, answer: str) -> None:
    assert nearest_names(name, ["oracle", "branchynet", "static_table"]) == answer


def test_several_near_names_are_told() -> None:
    assert nearest_names("cpu", ["cpu0", "cpu1", "gpu"]).startswith("did you mean 'cpu")
    assert " or " in nearest_names("cpu", ["cpu0", "cpu1"])
