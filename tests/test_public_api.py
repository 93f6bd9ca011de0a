from __future__ import annotations

import subprocess
import sys

import edgewise

RUNTIMES = {"torch", "onnx", "onnxruntime", "openvino", "transformers"}
HEAVY = RUNTIMES | {"sklearn", "scipy", "rich", "typer", "matplotlib", "PIL", "jinja2"}


def imported_by(statement: str) -> set[str]:
    """Top-level modules that a fresh process has loaded after a statement."""
    program = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


def test_importing_edgewise_loads_no_runtime() -> None:
    assert imported_by("import edgewise").isdisjoint(HEAVY)


def test_deciders_and_records_load_no_runtime() -> None:
    heavy = HEAVY - {"scipy"}
    modules = "exits predict profiles model device data"
    statement = "".join(f"import edgewise.{name}\n" for name in modules.split())

    assert imported_by(statement).isdisjoint(heavy)


def test_the_list_of_commands_loads_no_runtime() -> None:
    statement = "from edgewise.cli.main import main\nimport io, sys\n"
    statement += "sys.stdout, out = io.StringIO(), sys.stdout\nmain(['--help'])\nsys.stdout = out"

    assert imported_by(statement).isdisjoint(HEAVY - {"rich"})


def test_the_public_names_are_sorted_and_exist() -> None:
    names = getattr(edgewise, "__all__", [])

    assert list(names) == sorted(names)
    assert [name for name in names if not hasattr(edgewise, name)] == []
