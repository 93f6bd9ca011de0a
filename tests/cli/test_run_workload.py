from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from edgewise.cli.main import main
from edgewise.cli.run_workload import live_table
from edgewise.placement.workload import load_workload
from edgewise.profiles.partition import (
    PartitionProfile,
    read_partition_profile,
    write_partition_profile,
)
from edgewise.runtime.tenants.watch import EngineSnapshot, TenantSnapshot

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

WORKLOAD = """\
[device]
accelerator = "tpu.toml"
cores = 2
horizon_s = 1.5

[[tenant]]
name = "door"
model = "net.onnx"
rate = {kind = "periodic", per_s = 40}
budget = "200 ms"

[[tenant]]
name = "plate"
model = "net.onnx"
rate = {kind = "stepped", steps = [[0, 10], [0.7, 30]]}
"""
TPU = """\
name = "tpu"
sram_bytes = 100_000
in_bytes_per_s = 100e6
out_bytes_per_s = 100e6
fixed_s = 1e-3
can_pin = true
"""
LAYERS = 4


def write_net(path: Path) -> None:
    """A few layers in a row: small, but each can be cut off."""
    rng = np.random.default_rng(0)
    helper, to_tensor = onnx.helper, onnx.numpy_helper.from_array
    nodes, weights, last = [], [], "x"
    for n in range(LAYERS):
        values = rng.standard_normal((64, 64)).astype(np.float32) / 8
        weights.append(to_tensor(values, f"w{n}"))
        nodes.append(helper.make_node("MatMul", [last, f"w{n}"], [f"m{n}"]))
        last = "y" if n == LAYERS - 1 else f"r{n}"
        nodes.append(helper.make_node("Relu", [f"m{n}"], [last]))
    x, y = (
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 64]) for name in ("x", "y")
    )
    graph = helper.make_graph(nodes, "net", [x], [y], initializer=weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path.write_bytes(model.SerializeToString())


def make_profile(model: Path) -> PartitionProfile:
    from edgewise.frontends.partition import read_partitioned

    cut = read_partitioned(model)
    places = cut.places
    depth = np.array([p.depth_ratio for p in places])
    return PartitionProfile(
        model_id=cut.name,
        model_version=cut.version,
        cuts=tuple(p.tensor for p in places),
        depth_ratio=depth,
        prefix_bytes=np.array([p.prefix_bytes for p in places], dtype=np.float64),
        boundary_bytes=np.array([p.nbytes for p in places], dtype=np.float64),
        accelerator_s=2e-3 * depth,
        cpu_s=8e-3 * (1 - depth[:, None]),
        accelerator_provenance="simulated",
    )


@pytest.fixture(name="folder", scope="module")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workload")
    write_net(folder / "net.onnx")
    write_partition_profile(make_profile(folder / "net.onnx"), folder / "net.partition.json")
    (folder / "tpu.toml").write_text(TPU, encoding="utf-8")
    (folder / "shop.toml").write_text(WORKLOAD, encoding="utf-8")
    return folder


def test_a_workload_is_played_and_reported(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jinja2", reason="jinja2 is not installed")
    page, table = tmp_path / "play.html", tmp_path / "play.csv"
    command = ["run-workload", str(folder / "shop.toml"), "--json"]
    assert main([*command, "--html", str(page), "--csv", str(table)]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["provenance"] == "accelerator simulated, CPU measured"
    assert "is simulated" in said.err
    door, plate = found["tenants"]
    assert door["requests"] == pytest.approx(40 * 1.35, abs=2)
    assert plate["requests"] > 10
    for tenant in (door, plate):
        assert tenant["outcomes"]["answered"] > 0
        assert not tenant["outcomes"].get("failed")
        assert tenant["observed"]["mean_s"] > 0
        assert tenant["predicted"]["mean_s"] > 0
    with table.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["tenant"] for row in rows} == {"door", "plate"}
    assert "Predicted against observed" in page.read_text(encoding="utf-8")
    names = [t.name for t in threading.enumerate()]
    assert not [n for n in names if n.startswith("edgewise-")]


def test_a_given_plan_is_carried_out_as_it_stands(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    workload = str(folder / "shop.toml")
    assert main(["place", workload, "--method", "all-cpu", "--out", str(plan)]) == 0
    capsys.readouterr()
    command = ["run-workload", workload, "--plan", str(plan), "--no-replan"]
    assert main([*command, "--duration", "300 ms", "--queue", "fcfs"]) == 0
    out = capsys.readouterr().out
    assert "predicted by formulas" in out
    assert "no changes of plan" in out

    assert main([*command, "--duration", "300 ms", "--json"]) == 0
    (played,) = json.loads(capsys.readouterr().out)["plans"]
    assert [s["place"] for s in played["shares"]] == [0, 0]


def test_a_plan_edited_by_hand_into_nonsense_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    workload = str(folder / "shop.toml")
    assert main(["place", workload, "--method", "all-cpu", "--out", str(plan)]) == 0
    edited = json.loads(plan.read_text(encoding="utf-8"))
    edited["shares"][0]["cores"] = 7
    plan.write_text(json.dumps(edited), encoding="utf-8")
    capsys.readouterr()
    assert main(["run-workload", workload, "--plan", str(plan)]) == 2
    assert "8 cores are given away, 2 are there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGTERM, 143, id="SIGTERM"),
        pytest.param(signal.SIGINT, 130, id="Ctrl-C", marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_the_play_and_reports_what_was_done(
    folder: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    command = [sys.executable, "-m", "edgewise", "run-workload", str(folder / "shop.toml")]
    table = tmp_path / "play.csv"
    with subprocess.Popen(
        [*command, "--duration", "60 s", "--json", "--csv", str(table)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as child:
        assert child.stderr is not None
        for line in child.stderr:
            if line.startswith("playing"):
                break
        time.sleep(0.3)  # some requests
        child.send_signal(number)
        out, _ = child.communicate(timeout=60)
    assert child.returncode == code
    found = json.loads(out)
    assert found["stopped"].endswith("of 60 s")
    assert found["duration_s"] < 60
    assert "door" in table.read_text(encoding="utf-8")


def test_a_profile_without_a_model_can_be_planned_but_not_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "planned.toml"
    path.write_text(WORKLOAD.replace('"net.onnx"', '"net.partition.json"'), encoding="utf-8")
    assert main(["place", str(path), "--json"]) == 0
    assert main(["run-workload", str(path)]) == 2
    assert (
        "there is no model 'net.partition.json' to run, only a profile" in capsys.readouterr().err
    )


def test_a_profile_of_another_model_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = read_partition_profile(folder / "net.partition.json")
    write_partition_profile(replace(profile, model_version="0" * 64), folder / "other.json")
    path = folder / "foreign.toml"
    path.write_text(
        WORKLOAD.replace('model = "net.onnx"', 'model = "net.onnx"\nprofile = "other.json"', 1),
        encoding="utf-8",
    )
    assert main(["run-workload", str(path)]) == 3
    assert "tenant 'door': its profile is of another model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--queue", "fifo"], 2, "did you mean 'fcfs'|known names"),
        (["--device", "tpu"], 2, "unknown --device 'tpu'"),
        (["--duration", "10"], 2, "has no unit"),
        (["--csv", "nowhere/x.csv"], 2, "no folder"),
        (["--device", "edgetpu"], 4, "--device simulated"),
        (["--plan", "none.json"], 2, "cannot read the plan"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(
    folder: Path, options: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run-workload", str(folder / "shop.toml"), *options]) == code
    said = " ".join(capsys.readouterr().err.split())
    assert any(words in said for words in says.split("|"))


def test_the_live_table_shows_each_tenant_and_what_is_wrong(folder: Path) -> None:
    def tenant(name: str, **more: Any) -> TenantSnapshot:
        values: dict[str, Any] = dict.fromkeys(TenantSnapshot.__dataclass_fields__, 0)
        values |= {"tenant": name, "problem": "", "rate_per_s": 12.5, "waiting": 3} | more
        return TenantSnapshot(**values)

    snapshot = EngineSnapshot(
        at_s=1.0,
        plan=2,
        tenants=(
            tenant("door", response_s=0.0123, p95_s=0.02, cpu_busy=0.4, refused=2, failed=1),
            tenant("plate", rate_per_s=None, cpu_busy=None, problem="its model failed"),
        ),
        accelerator_busy=0.5,
        lost="unplugged",
    )
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured:
        console.print(live_table(snapshot, load_workload(folder / "shop.toml")))
    shown = captured.get()
    for words in (
        "shop: plan 2, accelerator busy 50 %",
        "12.5/s",
        "12.3 ms",
        "accelerator: unplugged",
        "plate: its model failed",
    ):
        assert words in shown
    assert max(map(len, shown.splitlines())) <= 80
