from __future__ import annotations

from pathlib import Path

import pytest

from edgewise.device.compiler_log import parse_compiler_log, read_compiler_log
from edgewise.errors import ConfigError

MIB = 1 << 20
KIB = 1 << 10


def block(
    name: str,
    cached: str,
    remaining: str | None,
    streamed: str,
    *,
    sizes: tuple[str, str] = ("8.00MiB", "9.30MiB"),
) -> str:
    """What the compiler prints for one model; written for this test in its public format."""
    left = (
        ""
        if remaining is None
        else f"On-chip memory remaining for caching model parameters: {remaining}\n"
    )
    return (
        f"Input model: {name}.tflite\n"
        f"Input size: {sizes[0]}\n"
        f"Output model: {name}_edgetpu.tflite\n"
        f"Output size: {sizes[1]}\n"
        f"On-chip memory used for caching model parameters: {cached}\n"
        f"{left}"
        f"Off-chip memory used for streaming uncached model parameters: {streamed}\n"
        "Number of Edge TPU subgraphs: 1\n"
        "Total number of operations: 313\n"
        f"Operation log: {name}_edgetpu.log\n"
        "See the operation log file for individual operation details.\n\n"
    )


VERSION_15 = (
    "Edge TPU Compiler version 15.0.340273435\n\nModels compiled successfully in 2988 ms.\n\n"
)
VERSION_16 = (
    "Edge TPU Compiler version 16.0.384591198\n"
    "Started a compilation timeout timer of 180 seconds.\n\n"
    "Models compiled successfully in 3000 ms.\n\n"
)


def test_several_models_and_several_runs_in_one_log_are_told_apart() -> None:
    """placement.md 1.1: one pair of models, two versions of the compiler, other shares."""
    log = (
        VERSION_15
        + block("cnn", "7.16MiB", "2.25KiB", "2.95MiB")
        + block("rnn", "0.00B", "2.25KiB", "4.53MiB", sizes=("2.97MiB", "4.74MiB"))
        + VERSION_16
        + block("cnn", "1.75MiB", "0.00B", "8.36MiB")
        + block("rnn", "5.29MiB", "0.00B", "0.00B")
    )

    found = parse_compiler_log(log, where="log")

    assert [m.name for m in found] == ["cnn.tflite", "rnn.tflite"] * 2
    assert [m.compiler for m in found] == ["15.0.340273435"] * 2 + ["16.0.384591198"] * 2
    cnn, rnn = found[:2]
    assert cnn.cached_bytes == round(7.16 * MIB)
    assert cnn.streamed_bytes == round(2.95 * MIB)
    assert cnn.remaining_bytes == round(2.25 * KIB)
    assert cnn.sram_bytes == cnn.cached_bytes
    assert cnn.weight_bytes == pytest.approx(10.11 * MIB, abs=2)
    assert (cnn.input_bytes, cnn.output_bytes) == (8 * MIB, round(9.30 * MIB))
    assert (rnn.cached_bytes, rnn.sram_bytes) == (0, 0)
    assert rnn.output == "rnn_edgetpu.tflite"
    assert [m.cached_bytes for m in found[2:]] == [round(1.75 * MIB), round(5.29 * MIB)]


@pytest.mark.parametrize(
    ("cached", "remaining", "streamed", "sram_bytes"),
    [
        ("1.92MiB", "1.75KiB", "3.23MiB", 1.92 * MIB),
        ("604.50KiB", "511.50KiB", "3.45MiB", 604.5 * KIB),
        ("1.30MiB", "6.89MiB", "0.00B", 8.19 * MIB),
        ("48.00KiB", "7.69MiB", "0.00B", 48 * KIB + 7.69 * MIB),
    ],
    ids=["issue 427", "issue 572", "issue 324", "issue 463"],
)
def test_usable_memory_is_what_is_used_and_what_is_left_unless_parameters_stream(
    cached: str, remaining: str, streamed: str, sram_bytes: float
) -> None:
    (model,) = parse_compiler_log(block("model", cached, remaining, streamed), where="log")

    assert model.sram_bytes == pytest.approx(sram_bytes, abs=2)
    assert model.compiler == ""


def test_older_logs_tell_what_was_available_or_nothing_about_the_rest() -> None:
    older = (
        "On-chip memory available for caching model parameters: 6.91MiB\n"
        "On-chip memory used for caching model parameters: 4.21MiB\n"
        "Off-chip memory used for streaming uncached model parameters: 0.00B\n"
    )

    (model,) = parse_compiler_log(older, where="log")
    (silent,) = parse_compiler_log(block("m", "1 KiB", None, "0 bytes"), where="log")

    assert model.name == ""
    assert model.sram_bytes == pytest.approx(6.91 * MIB, abs=2)
    assert (silent.remaining_bytes, silent.sram_bytes) == (None, 1024)


def test_a_log_with_other_line_ends_blanks_and_text_around_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    text = "$ edgetpu_compiler -s m.tflite\n" + block("m", "7.69MiB", "48KiB", "0.00B")
    path.write_bytes(("\t" + text.replace("\n", "  \r\n\t")).encode() + b"\xff\n")

    (model,) = read_compiler_log(path)

    assert model.cached_bytes == round(7.69 * MIB)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no log of edgetpu_compiler"),
        ("hello: 3MiB\nworld", "no log of edgetpu_compiler"),
        (
            "Edge TPU Compiler version 16.0\nInvalid model: m.tflite\nModel not quantized\n",
            "was not compiled: 'Invalid model: m.tflite'",
        ),
        (
            "Internal compiler error. Aborting!",
            "was not compiled: 'Internal compiler error. Aborting!'",
        ),
        ("Input model: m.tflite\nInput size: 1MiB\n", "on-chip memory of model 'm.tflite'"),
        (
            block("m", "1MiB", "1MiB", "").replace("Off-chip", "Odd"),
            "off-chip memory of model 'm.tflite'",
        ),
    ],
    ids=["empty", "other text", "not quantized", "compiler error", "cut short", "no stream"],
)
def test_what_is_no_log_of_a_compiled_model_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        parse_compiler_log(text, where="log")


def test_a_log_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the compiler log"):
        read_compiler_log(tmp_path / "none")
