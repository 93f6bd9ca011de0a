from __future__ import annotations

from pathlib import Path

import pytest

from edgewise.backends.edgetpu.diagnose import Diagnosis, diagnose

SAID = "Failed to load delegate from libedgetpu.so.1"


def plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def plug_in(root: Path, vendor: str, product: str, *, bus: int = 1, device: int = 4) -> None:
    folder = "sys/bus/usb/devices/1-2"
    plant(
        root,
        {
            f"{folder}/idVendor": f"{vendor}\n",
            f"{folder}/idProduct": f"{product}\n",
            f"{folder}/busnum": f"{bus}\n",
            f"{folder}/devnum": f"{device}\n",
            f"dev/bus/usb/{bus:03d}/{device:03d}": "",
        },
    )


def hold(root: Path, pid: int, node: str, *, name: str = "frigate") -> None:
    plant(root, {f"proc/{pid}/comm": f"{name}\n", f"proc/{pid}/fd/.keep": ""})
    (root / f"proc/{pid}/fd/.keep").unlink()
    (root / f"proc/{pid}/fd/0").symlink_to("/dev/null")
    (root / f"proc/{pid}/fd/7").symlink_to(node)


def found(root: Path, said: str = SAID, *, allowed: bool = True, ours: int = 0) -> Diagnosis:
    return diagnose(said, root=root, access=lambda *_: allowed, ignore_pids=[ours])


def test_a_missing_library_is_told_from_the_loaders_own_words(tmp_path: Path) -> None:
    said = "libusb-1.0.so.0: cannot open shared object file: No such file or directory"

    diagnosis = found(tmp_path, said)

    assert diagnosis.cause == "library"
    assert "libusb-1.0.so.0" in diagnosis.problem


def test_no_device_on_usb_or_pcie_is_told(tmp_path: Path) -> None:
    plug_in(tmp_path, "046d", "c52b")  # a mouse

    assert found(tmp_path).cause == "no-device"
    assert found(tmp_path / "no such tree").cause == "no-device"


def test_a_pcie_card_without_its_driver_is_told(tmp_path: Path) -> None:
    folder = "sys/bus/pci/devices/0000:01:00.0"
    plant(tmp_path, {f"{folder}/vendor": "0x1ac1\n", f"{folder}/device": "0x089a\n"})

    diagnosis = found(tmp_path)

    assert diagnosis.cause == "no-driver"
    assert "0000:01:00.0" in diagnosis.problem
    assert "modprobe apex" in diagnosis.help


@pytest.mark.parametrize(
    ("vendor", "product"), [("1a6e", "089a"), ("18d1", "9302")], ids=["fresh", "with firmware"]
)
def test_a_stick_without_permission_is_told_with_its_file(
    tmp_path: Path, vendor: str, product: str
) -> None:
    plug_in(tmp_path, vendor, product)

    diagnosis = found(tmp_path, allowed=False)

    assert diagnosis.cause == "permission"
    assert "dev/bus/usb/001/004" in diagnosis.problem
    assert "udev" in diagnosis.help


@pytest.mark.parametrize("node", ["/dev/bus/usb/001/004", "/dev/apex_0"], ids=["usb", "pcie"])
def test_the_process_that_holds_the_device_is_named(tmp_path: Path, node: str) -> None:
    if node.endswith("apex_0"):
        plant(tmp_path, {"dev/apex_0": ""})
    else:
        plug_in(tmp_path, "18d1", "9302")
    hold(tmp_path, 77, "/dev/null", name="innocent")
    hold(tmp_path, 88, node)

    diagnosis = found(tmp_path)

    assert (diagnosis.cause, diagnosis.pid) == ("held", 88)
    assert "process 88 (frigate) holds the Edge TPU" in diagnosis.problem
    assert found(tmp_path, ours=88).cause == "unknown"


def test_a_device_that_is_there_and_free_is_not_explained_away(tmp_path: Path) -> None:
    plug_in(tmp_path, "18d1", "9302")

    diagnosis = found(tmp_path)

    assert diagnosis.cause == "unknown"
    assert SAID in diagnosis.problem
