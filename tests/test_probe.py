"""The probe reads this machine, and what it reads names a measurement's conditions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mhctune.autotuner import probe
from mhctune.autotuner.nvidia import Gpu
from mhctune.autotuner.protocol import PROTOCOL_VERSION
from mhctune.kernels.compiler import C_FLAGS
from mhctune.kernels.dispatch import Status
from mhctune.kernels.post_pre_delayed import PostPreDelayed

SEAM = PostPreDelayed()


def test_the_processor_has_a_name_and_free_memory() -> None:
    assert probe.cpu_name().strip()
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 2**20 < probe.free_host_bytes() <= physical


def test_a_machine_without_a_gpu_is_its_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    device = probe.detect()
    assert (device.name, device.target, device.gpu_name) == (probe.cpu_name(), "c", None)


def test_a_machine_with_a_gpu_is_its_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu("NVIDIA H200", 150_754_820_096, 13_200_000_000, "580.159.04", "", 132)
    monkeypatch.setattr("mhctune.autotuner.probe.first_gpu", lambda: gpu)
    device = probe.detect()
    assert device == probe.Device("NVIDIA H200", "cuda", 13_200_000_000)
    assert device.gpu_name == "NVIDIA H200"


def test_the_fingerprint_of_a_gpu_holds_driver_toolchain_and_pass_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu("NVIDIA H200", 150_754_820_096, 13_200_000_000, "580.159.04", "", 132)
    monkeypatch.setattr("mhctune.autotuner.probe.first_gpu", lambda: gpu)
    found = probe.fingerprint(SEAM, "cuda")
    assert (found.gpu_name, found.sm_count, found.memory_gib) == ("NVIDIA H200", 132, 140)
    assert found.driver == "580.159.04"
    assert "tl.disable_safe_memory_legalize" in found.pass_config
    assert found.compile_flags == "arch=sm_90a"
    assert found.source_hash == SEAM.source_hash("cuda") != SEAM.source_hash("c")


def test_the_fingerprint_is_the_same_twice_and_holds_the_conditions() -> None:
    found = probe.fingerprint(SEAM, "c")
    assert found == probe.fingerprint(SEAM, "c")
    assert found.gpu_name == probe.cpu_name()
    assert found.sm_count == os.cpu_count()
    assert found.compile_flags == " ".join(C_FLAGS)
    assert found.protocol == PROTOCOL_VERSION
    assert found.source_hash == SEAM.source_hash("c")
    assert found.compiler == probe.gcc_version()


@pytest.mark.parametrize(
    ("patch", "value", "status"),
    [
        ("cpu_name", "another processor", Status.FOREIGN),
        ("gcc_version", "gcc 99", Status.OTHER_TOOLCHAIN),
        ("PROTOCOL_VERSION", PROTOCOL_VERSION + 1, Status.OTHER_TOOLCHAIN),
        ("C_FLAGS", ("-O0",), Status.OTHER_TOOLCHAIN),
    ],
)
def test_what_changes_a_measurement_changes_the_fingerprint(
    monkeypatch: pytest.MonkeyPatch, patch: str, value: Any, status: Status
) -> None:
    before = probe.fingerprint(SEAM, "c")
    monkeypatch.setattr(probe, patch, (lambda: value) if callable(getattr(probe, patch)) else value)
    after = probe.fingerprint(SEAM, "c")
    assert after.digest != before.digest
    assert before.status(after) is status


def test_a_missing_compiler_is_absent_and_no_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probe.gcc_version() == "absent"


def test_a_target_without_a_probe_is_refused() -> None:
    with pytest.raises(ValueError, match="no device of target 'abacus' to read a fingerprint of"):
        probe.fingerprint(SEAM, "abacus")


def test_the_doctor_names_device_tools_arms_and_fingerprint() -> None:
    rows = dict(probe.doctor_rows(probe.Device("a processor", "c", 3 * 2**30)))
    assert rows["device"] == "a processor"
    assert rows["free memory"] == "3.0 GiB"
    assert rows["arms of post_pre_delayed"] == "fused, unfused, released"
    assert rows["fingerprint of post_pre_delayed"] == probe.fingerprint(SEAM, "c").digest
    assert rows["gcc"] == probe.gcc_version()


def test_the_doctor_says_where_a_target_has_no_arm() -> None:
    rows = dict(probe.doctor_rows(probe.Device("an abacus", "abacus", 1)))
    assert rows["arms of post_pre_delayed"] == "none on target abacus"
    assert not any(what.startswith("fingerprint") for what in rows)
