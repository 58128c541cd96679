"""What NVML and nvcc say of an NVIDIA GPU, read without a CUDA context."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Gpu:
    """The first GPU as the driver reports it; `mig` is empty where it is off or unknown to the device."""

    name: str
    memory_bytes: int
    free_bytes: int
    driver: str
    mig: str


def first_gpu() -> Gpu | None:
    """Return the first GPU, or None without a driver or a GPU."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        if pynvml.nvmlDeviceGetCount() == 0:
            return None
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return Gpu(
            name=pynvml.nvmlDeviceGetName(handle),
            memory_bytes=int(memory.total),
            free_bytes=int(memory.free),
            driver=pynvml.nvmlSystemGetDriverVersion(),
            mig=_mig(handle),
        )
    finally:
        pynvml.nvmlShutdown()


def _mig(handle: object) -> str:
    import pynvml

    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError_NotSupported:
        return ""
    return "enabled" if current else ""


def nvcc_version() -> str:
    """Return nvcc's release, or `absent`."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).exists():
        return "absent"
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"release (\S+), (\S+)", done.stdout)
    return f"nvcc {found.group(2)}" if found else "absent"
