"""The probe: what device this machine has, and its fingerprint."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mhctune.autotuner.budget import size
from mhctune.autotuner.nvidia import first_gpu, nvcc_version
from mhctune.autotuner.protocol import PROTOCOL_VERSION
from mhctune.configs.loader import recognise
from mhctune.kernels.compiler import C_FLAGS, Passes, cuda_arch, pass_config
from mhctune.kernels.dispatch import Fingerprint
from mhctune.kernels.optional import OPTIONAL_ARMS
from mhctune.kernels.registry import SEAMS
from mhctune.kernels.seam import Seam


@dataclass(frozen=True, slots=True)
class Device:
    """The device that a sweep would run on: the first GPU, or the processor."""

    name: str
    target: str
    free_bytes: int

    @property
    def gpu_name(self) -> str | None:
        """The GPU's name, or None without one."""
        return self.name if self.target == "cuda" else None


def cpu_name() -> str:
    """Return the processor's name as the operating system reports it."""
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def free_host_bytes() -> int:
    """Return the memory that can be taken without swapping."""
    match = re.search(r"^MemAvailable:\s*(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(match.group(1)) * 1024 if match else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def gcc_version() -> str:
    """Return gcc's version line, or `absent`."""
    try:
        done = subprocess.run(["gcc", "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "absent"
    return done.stdout.splitlines()[0]


def detect() -> Device:
    """Return the first GPU, else the processor; makes no CUDA context."""
    gpu = first_gpu()
    if gpu is not None:
        return Device(gpu.name, "cuda", gpu.free_bytes)
    return Device(cpu_name(), "c", free_host_bytes())


def optional_arms(device: Device) -> list[tuple[str, str]]:
    """Return the arms that need another project, and whether they could run here."""
    target = recognise(device.gpu_name)
    capability = target.compute_capability if target else None
    rows = []
    for arm in OPTIONAL_ARMS:
        absence = arm.absence(capability)
        offered = "importable, not offered: it was never run by this project"
        rows.append((arm.name, f"absent: {absence}" if absence else offered))
    return rows


def doctor_rows(device: Device) -> list[tuple[str, str]]:
    """Return what a person needs to know of this machine, as (what, found)."""
    gpu = first_gpu()
    rows = [
        ("device", device.name),
        ("driver", gpu.driver if gpu else "no NVIDIA driver or GPU"),
        ("free memory", size(device.free_bytes)),
        ("cores", str(os.cpu_count())),
        ("gcc", gcc_version()),
        ("nvcc", nvcc_version()),
        ("torch", importlib.metadata.version("torch")),
        ("tilelang", importlib.metadata.version("tilelang")),
    ]
    rows.extend((f"optional arm {name}", reason) for name, reason in optional_arms(device))
    for seam in SEAMS.values():
        arms = ", ".join(arm.name for arm in seam.arms(device.target))
        rows.append((f"arms of {seam.name}", arms or f"none on target {device.target}"))
        if arms:
            rows.append((f"fingerprint of {seam.name}", fingerprint(seam, device.target).digest))
    return rows


def _json(config: dict[str, bool]) -> str:
    return json.dumps(config, sort_keys=True, separators=(",", ":"))


def fingerprint(seam: Seam, target: str, passes: Passes | None = None) -> Fingerprint:
    """Read the fingerprint of this machine for a seam's arms on a target, compiled with `passes`.

    Raises:
        ValueError: there is no GPU here to read one of the target `cuda`, or the target is unknown.
    """
    configured = _json(pass_config(target, passes))
    common: dict[str, Any] = {
        "torch": importlib.metadata.version("torch"),
        "tilelang": importlib.metadata.version("tilelang"),
        "protocol": PROTOCOL_VERSION,
        "source_hash": seam.source_hash(target),
    }
    if target == "c":
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Fingerprint(
            gpu_name=cpu_name(),
            sm_count=os.cpu_count() or 1,
            memory_gib=round(pages / 2**30),
            mig="",
            driver=f"{platform.system()} {platform.release()}",
            cuda="",
            compiler=gcc_version(),
            pass_config=configured,
            compile_flags=" ".join(C_FLAGS),
            **common,
        )
    gpu = first_gpu()
    if target != "cuda" or gpu is None:
        raise ValueError(f"no device of target {target!r} to read a fingerprint of")
    import torch

    return Fingerprint(
        gpu_name=gpu.name,
        sm_count=gpu.sm_count,
        memory_gib=round(gpu.memory_bytes / 2**30),
        mig=gpu.mig,
        driver=gpu.driver,
        cuda=torch.version.cuda or "",
        compiler=nvcc_version(),
        pass_config=configured,
        compile_flags=f"arch={cuda_arch()}",
        **common,
    )
