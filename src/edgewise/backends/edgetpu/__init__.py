"""The Edge TPU behind a supervised child process, and what is wrong where there is none."""

from edgewise.backends.edgetpu.device import EdgeTpuDevice
from edgewise.backends.edgetpu.diagnose import Diagnosis, diagnose
from edgewise.backends.edgetpu.probe import Versions, probe

__all__ = ["Diagnosis", "EdgeTpuDevice", "Versions", "diagnose", "probe"]
