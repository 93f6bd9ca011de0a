from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgewise.device.accelerator import (
    Accelerator,
    accelerator_names,
    load_accelerator,
    parse_accelerator,
)
from edgewise.errors import ConfigError

CHIP = Accelerator(name="chip", sram_bytes=8_000, in_bytes_per_s=1e6, out_bytes_per_s=1e5)
_LEAST = 'name = "a"\nsram_bytes = 1\nin_bytes_per_s = 1.0\nout_bytes_per_s = 1.0\n'


@pytest.mark.parametrize("name", accelerator_names())
def test_a_shipped_description_can_be_read_and_says_where_it_is_from(name: str) -> None:
    found = load_accelerator(name)

    assert found.name == name
    assert found.source
    assert found.provenance == "estimated"


def test_the_part_that_fits_is_loaded_once_and_the_rest_streams_with_every_call() -> None:
    assert CHIP.load_s(5_000) == pytest.approx(5e-3)
    assert CHIP.stream_s(5_000) == 0.0
    # Together they move every byte once.
    assert CHIP.load_s(12_000) + CHIP.stream_s(12_000) == pytest.approx(12e-3)
    assert CHIP.load_s(12_000) == pytest.approx(8e-3)


def test_a_compilers_figure_replaces_the_devices_own_and_a_switch_adds_its_cost() -> None:
    chip = replace(CHIP, switch_s=1e-3)

    assert chip.load_s(5_000, sram_bytes=2_000) == pytest.approx(3e-3)
    assert chip.stream_s(5_000, sram_bytes=2_000) == pytest.approx(3e-3)


def test_a_file_of_ones_own_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(_LEAST + 'cache_policy = "lru"\n')

    assert load_accelerator(path).cache_policy == "lru"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (_LEAST.replace("sram_bytes = 1", "sram_bytes = 0"), "sram_bytes of at least 1, found 0"),
        (_LEAST.replace("sram_bytes = 1", "sram_bytes = true"), "sram_bytes"),
        (_LEAST.replace("sram_bytes = 1\n", ""), "'sram_bytes' is missing"),
        (_LEAST + "in_bytes = 1", "did you mean 'in_bytes_per_s'"),
        (_LEAST + "fixed_s = -1.0", "fixed_s of at least 0"),
        (_LEAST + "fixed_s = nan", "fixed_s"),
        (_LEAST + 'cache_policy = "mru"', "unknown cache_policy 'mru'"),
        (_LEAST + "cache_policy = [1]", "unknown cache_policy"),
        ("name =", "is not TOML"),
    ],
)
def test_a_description_that_cannot_be_is_refused_with_its_place(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_accelerator(text, where="mine.toml")


def test_no_memory_at_all_says_to_plan_for_the_cpu() -> None:
    with pytest.raises(ConfigError, match="plan for the CPU alone"):
        replace(CHIP, sram_bytes=0)


def test_an_unknown_name_is_told_its_neighbours(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'coral-usb'"):
        load_accelerator("coral-usv")
    with pytest.raises(ConfigError, match="no such file"):
        load_accelerator(tmp_path)
