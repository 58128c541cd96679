"""What NVML and nvcc say of an NVIDIA GPU, read without a CUDA context."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mhctune.autotuner.conditions import NVML, UNREADABLE, Conditions, Reader, not_applicable, reasons_of


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


@contextmanager
def conditions_reader(target: str) -> Iterator[Reader]:
    """Yield what reads the conditions of the first GPU; on the target `c` there are none to read.

    A reading asks NVML alone, from any process. The reasons are those of the moment it is asked: a slowdown
    that began and ended within a round goes unseen, one that lasts does not.
    """
    if target != "cuda":
        yield not_applicable
        return
    import pynvml
    import torch

    pynvml.nvmlInit()
    try:
        handle, _ = _handle(str(torch.cuda.get_device_properties(0).uuid))
        yield lambda: _conditions(handle)
    finally:
        pynvml.nvmlShutdown()


def _conditions(handle: object) -> Conditions:
    """Read a device; what the driver does not tell (a MIG slice has no clocks of its own) is None."""
    import pynvml

    clock = _told(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM)
    heat = _told(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)
    mask = _told(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    found = _told(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    if clock is None and mask is None:
        return Conditions(UNREADABLE)
    # The worker is one of them; in a container the process ids are not ours, so that they are only counted.
    others = None if found is None else max(0, len(found) - 1)
    return Conditions(NVML, clock, heat, reasons_of(mask or 0), others)


def _told(ask: Callable[..., Any], *arguments: object) -> Any:
    import pynvml

    try:
        return ask(*arguments)
    except pynvml.NVMLError:
        return None


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
