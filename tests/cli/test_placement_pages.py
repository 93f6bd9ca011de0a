"""What the pages on placement say is what the program does."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from edgewise.cli.main import main
from edgewise.device.accelerator import Accelerator, parse_accelerator
from edgewise.placement.workload import load_workload, parse_workload
from edgewise.placement.workload_schema import workload_schema

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/guides/several-models.md"
WORKLOAD_PAGE = ROOT / "docs/reference/workload-file.md"
ACCELERATOR_PAGE = ROOT / "docs/reference/accelerators.md"
EXAMPLES = sorted((ROOT / "examples/workloads").glob("*.toml"))


def between(path: Path, mark: str) -> str:
    text = path.read_text(encoding="utf-8")
    return text.split(f"<!-- {mark}:begin -->\n")[1].split(f"<!-- {mark}:end -->")[0]


def toml_blocks(path: Path) -> list[str]:
    return re.findall(
        r"^```toml\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def test_the_page_on_workload_files_is_the_schema() -> None:
    assert between(WORKLOAD_PAGE, "schema") == workload_schema()


def test_the_page_on_accelerators_names_every_key_with_its_default() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| .* \| (needed|`[^`]*`) \|",
        ACCELERATOR_PAGE.read_text("utf-8"),
        re.MULTILINE,
    )
    keys = {name: default for name, default in rows if name not in {"token", "pinned", "lru"}}
    expected = {
        field.name: "needed"
        if field.default is dataclasses.MISSING
        else f"`{_toml(field.default)}`"
        for field in dataclasses.fields(Accelerator)
    }
    assert keys == expected


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"


@pytest.mark.parametrize("path", [WORKLOAD_PAGE, GUIDE], ids=lambda p: p.stem)
def test_files_on_the_pages_are_read(path: Path) -> None:
    blocks = toml_blocks(path)
    assert blocks
    for block in blocks:
        if "[device]" in block:
            assert parse_workload(block, where=path.name, folder=ROOT / "examples").tenants
        else:
            assert parse_accelerator(block, where=path.name).name


def test_the_guides_workload_is_the_example() -> None:
    example = (ROOT / "examples/workloads/two_cameras.toml").read_text(encoding="utf-8")
    assert any(example.endswith(block) for block in toml_blocks(GUIDE))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_workloads_are_read(path: Path) -> None:
    assert load_workload(path).tenants


def test_the_readme_shows_what_place_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where this fails because profiles or formulas changed, paste what the command prints now."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["place", "examples/workloads/cameras.toml"]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    shown = between(ROOT / "README.md", "place").splitlines()
    assert shown[0] == "```"
    assert shown[1] == "$ edgewise place examples/workloads/cameras.toml"
    assert shown[2:-1] == printed
