"""What NVML and nvcc say of an NVIDIA GPU, read without a CUDA context."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Gpu:
    """The GPU that torch calls device 0, as the driver reports it; `mig` is empty unless it is a slice."""

    name: str
    memory_bytes: int
    free_bytes: int
    driver: str
    mig: str
    sm_count: int


def first_gpu() -> Gpu | None:
    """Return torch's device 0, or None where torch sees none.

    NVML counts every GPU of the host in an order of its own; torch obeys CUDA_VISIBLE_DEVICES. So torch says
    which, by its UUID, and NVML what it is, since asking CUDA for free memory would make a context.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    import pynvml

    properties = torch.cuda.get_device_properties(0)
    pynvml.nvmlInit()
    try:
        handle, mig = _handle(str(properties.uuid))
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return Gpu(
            name=properties.name,
            memory_bytes=int(memory.total),
            free_bytes=int(memory.free),
            driver=pynvml.nvmlSystemGetDriverVersion(),
            mig=properties.name if mig else "",
            sm_count=properties.multi_processor_count,
        )
    finally:
        pynvml.nvmlShutdown()


def _handle(uuid: str) -> tuple[object, bool]:
    """Return NVML's handle of a device by torch's UUID, and whether it is a slice of a GPU."""
    import pynvml

    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{bare}"), False
    except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
        return pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{bare}"), True


def nvcc_version() -> str:
    """Return nvcc's release, or `absent`."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).exists():
        return "absent"
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"release (\S+), (\S+)", done.stdout)
    return f"nvcc {found.group(2)}" if found else "absent"
