from __future__ import annotations

import json
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from edgewise.backends.threads import Coresidency, Interference, ThreadState
from edgewise.cli.doctor import Diagnosis, InterferenceStatus, Missing, examine, show
from edgewise.cli.main import main
from edgewise.cli.runtimes import PACKAGES, Package, examine_runtimes, install_command
from edgewise.profiles.records import ThreadPolicy

ROOT = Path(__file__).parents[2]


def broken(program: str) -> Package:
    """A runtime that is installed (pytest is) and does this when asked for its devices."""
    return Package("pytest", ("pytest",), "onnx", "nothing", program, quick=True)


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    return examine()


def test_json_is_one_object_with_the_documented_fields(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--json"]) == 0

    said = capsys.readouterr()
    found = json.loads(said.out)
    assert said.err == ""
    assert list(found) == list(Diagnosis.__dataclass_fields__)
    assert {"host", "affinity", "quota_cores", "usable"} <= set(found["cores"])
    assert found["cores"]["usable"] > 0
    assert found["device"]["id"]
    assert found["store"]["path"]
    assert found["ready"] in (True, False)
    assert found["interference"] is None  # only where it is asked for
    assert found["threads"][0]["what"] == "cores"
    for each in found["runtimes"]:
        assert each["status"] in ("ok", "missing", "broken")
        assert (each["version"] is None) == (each["status"] == "missing")
    for each in found["clocks"]:
        assert (each["current_hz"] is None) == bool(each["reason"])


def test_a_person_sees_every_part_and_what_comes_next(
    diagnosis: Diagnosis, capsys: pytest.CaptureFixture[str]
) -> None:
    show(diagnosis)

    shown = capsys.readouterr().out
    for part in ("Machine", "Cores", "Memory", "Clocks", "Load", "Meters", "Store", "Runtimes"):
        assert f"\n{part} " in shown
    assert shown.rstrip().splitlines()[-1].startswith(("Ready.", "Not ready:"))


def test_a_bare_machine_is_shown_with_reasons_instead_of_zeros(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show(examine(tmp_path))

    shown = capsys.readouterr().out
    assert "unknown: the kernel lists no CPU" in shown
    assert "unknown: the kernel shows no CPU counters" in shown
    assert "none found: energy stays unknown" in shown


def interference(policy: ThreadPolicy, ratio: float) -> Interference:
    return Interference(
        policy=policy,
        torch_s=1e-3,
        onnxruntime_s=1e-3,
        torch_in_turn_s=(2 * ratio - 1) * 1e-3,
        onnxruntime_in_turn_s=1e-3,
        ratio=ratio,
        low=ratio,
        high=ratio,
        idle_cores=0.0,
        rounds=1,
    )


def test_interference_is_told_with_what_to_do(
    diagnosis: Diagnosis, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Coresidency(
        governed=interference(ThreadPolicy(threads=1), 1.1),
        naive=interference(ThreadPolicy(threads=2, spinning=True), 20.0),
    )
    status = InterferenceStatus(target_ratio=1.3, found=found, findings=found.findings())

    show(replace(diagnosis, interference=status))

    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "Together governed (1 thread, no spin): torch and ONNX Runtime in turn take 1.10" in shown
    )
    assert "set OMP_WAIT_POLICY=PASSIVE and one thread each" in shown


def test_a_test_of_interference_that_cannot_run_says_why(
    diagnosis: Diagnosis, capsys: pytest.CaptureFixture[str]
) -> None:
    status = InterferenceStatus(target_ratio=1.3, found=None, findings=("unknown: no torch",))

    show(replace(diagnosis, interference=status))

    assert "unknown: no torch" in capsys.readouterr().out


def test_cores_that_a_runtime_took_away_are_shown(
    diagnosis: Diagnosis, capsys: pytest.CaptureFixture[str]
) -> None:
    state = ThreadState(
        runtime="process",
        what="cores",
        found="1 (0)",
        wanted="2 (0 1)",
        fits=False,
        help="unset OMP_PLACES=cores",
    )

    show(replace(diagnosis, threads=(state,)))

    shown = capsys.readouterr().out
    assert "process cores: 1 (0), not 2 (0 1); unset OMP_PLACES=cores" in shown


def test_a_missing_package_names_its_extra() -> None:
    absent = Package("nosuch", ("no-such-distribution",), "onnx", "runs stages", "", quick=True)

    (status,) = examine_runtimes([absent])

    assert (status.status, status.version, status.backends) == ("missing", None, None)
    assert status.help == install_command(extra="onnx")
    assert status.help is not None
    assert "[onnx]" in status.help


def test_nobody_is_told_to_install_what_nothing_uses() -> None:
    absent = Package("nosuch", ("no-such-distribution",), None, "no backend uses it yet", "")

    (status,) = examine_runtimes([absent])

    assert status.help is None
    assert status.reason == "not installed; no backend uses it yet"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "crashed with SIGILL"),
        ("raise ImportError('libfoo.so: not found')", "ImportError: libfoo.so: not found"),
        ("print('no list')", "exited with code 0"),
        ("", "exited with code 0"),
    ],
    ids=["illegal instruction", "missing library", "nonsense", "silence"],
)
def test_a_runtime_that_breaks_does_not_take_the_doctor_with_it(program: str, reason: str) -> None:
    (status,) = examine_runtimes([broken(program)])

    assert status.status == "broken"
    assert status.reason.startswith(reason)
    assert status.help is not None
    assert "--force-reinstall" in status.help


def test_a_runtime_that_chatters_is_still_understood() -> None:
    (status,) = examine_runtimes([broken("print('hello'); print('[[\"x:CPU\", \"a chip\"]]')")])

    assert status.backends is not None
    assert [(each.name, each.device_name) for each in status.backends] == [("x:CPU", "a chip")]


def test_an_install_command_names_the_python_that_runs() -> None:
    assert install_command(package="onnx").endswith(" -m pip install onnx")
    assert Path(sys.executable).name in install_command(package="onnx")


def test_every_package_of_an_extra_is_looked_for() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    wanted = {
        re.split("[>=]", requirement)[0]
        for extra, requirements in extras.items()
        if extra not in {"all", "dev"}
        for requirement in requirements
    }

    assert wanted <= {name for package in PACKAGES for name in package.distributions}
    assert {package.extra for package in PACKAGES} - {None} <= set(extras)


def test_what_is_missing_comes_with_its_effect_and_command(diagnosis: Diagnosis) -> None:
    for gap in diagnosis.missing:
        assert isinstance(gap, Missing)
        assert gap.what
        assert gap.effect
        assert gap.command
