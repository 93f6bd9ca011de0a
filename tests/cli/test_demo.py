from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgewise.cli.main import main

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")


def test_the_demo_prints_each_policy_in_each_scene_and_writes_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "demo.html"

    code = main(
        ["demo", "--backend", "onnxruntime", "--seconds", "0.6", "--json", "--html", str(page)]
    )

    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert found["provenance"] == "measured"
    assert set(found["scenes"]) == {"calm", "load", "tightening"}
    for scene in found["scenes"].values():
        assert set(scene) == {"full_depth", "static_table", "branchynet", "edgewise"}
        for figures in scene.values():
            assert figures["requests"] >= 1
            assert 0 <= figures["dsr"] <= 1
            assert {"accuracy", "mean_exit_depth_ratio", "p50_s", "p99_s"} <= set(figures)
    text = page.read_text(encoding="utf-8")
    assert text.lower().startswith("<!doctype html>")
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert not list(tmp_path.glob("*.part"))


def test_a_model_that_is_not_there_is_told_with_the_nearest_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(["demo", "--model", "fashion-lite1"])

    assert code == 2
    assert "fashion-lite0" in capsys.readouterr().err


def test_a_demo_that_is_interrupted_stops_its_loads_and_says_so(tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [
            sys.executable, "-m", "edgewise", "demo", "--backend", "onnxruntime", "--seconds", "3",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "EDGEWISE_HOME": str(tmp_path)},
        text=True,
    )  # fmt: skip
    workers = wait_for_workers(demo.pid)
    demo.send_signal(signal.SIGINT)
    _, err = demo.communicate(timeout=60)

    assert workers
    assert demo.returncode == 130
    assert "Traceback" not in err
    assert "interrupted" in err
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


def wait_for_workers(parent: int) -> list[int]:
    """The load's processes, once there are any."""
    children = Path(f"/proc/{parent}/task/{parent}/children")
    if not children.exists():
        pytest.skip("this kernel does not list children")
    give_up_s = time.monotonic() + 120
    while time.monotonic() < give_up_s:
        # A load is started by a thread of its own.
        found = [
            int(pid)
            for task in Path(f"/proc/{parent}/task").iterdir()
            for pid in (task / "children").read_text().split()
        ]
        if found:
            time.sleep(0.3)
            return found
        time.sleep(0.05)
    return []
