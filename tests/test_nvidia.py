"""The GPU is the one that torch uses, whatever the order in which the driver counts them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from mhctune.autotuner import nvidia
from mhctune.autotuner.conditions import NVML, Conditions

UUID = "6f0b1c2d-0000-1111-2222-333344445555"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A host whose torch has one H200; returns the names that NVML was asked for."""
    names: list[str] = []

    def handle(name: str) -> str:
        names.append(name)
        if name not in (f"GPU-{UUID}", f"MIG-{UUID}") or (name == f"GPU-{UUID}" and "slice" in names):
            raise pynvml.NVMLError_NotFound
        return name

    properties = SimpleNamespace(name="NVIDIA H200", uuid=UUID, multi_processor_count=132)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: properties)
    memory = SimpleNamespace(total=150_754_820_096, free=13_200_000_000)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", handle)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda found: memory)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "580.159.04")
    return names


def test_nvml_is_asked_for_the_device_that_torch_calls_the_first(asked: list[str]) -> None:
    found = nvidia.first_gpu()
    assert found == nvidia.Gpu("NVIDIA H200", 150_754_820_096, 13_200_000_000, "580.159.04", "", 132)
    assert asked == [f"GPU-{UUID}"]


def test_a_slice_of_a_gpu_is_known_as_one(asked: list[str]) -> None:
    asked.append("slice")
    found = nvidia.first_gpu()
    assert found is not None
    assert found.mig == "NVIDIA H200"
    assert asked[1:] == [f"GPU-{UUID}", f"MIG-{UUID}"]


def test_a_gpu_that_torch_may_not_see_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert nvidia.first_gpu() is None


@pytest.fixture
def told(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the driver tells of that H200; an exception is raised."""
    answers: dict[str, Any] = {
        "nvmlDeviceGetClockInfo": 1755,
        "nvmlDeviceGetTemperature": 61,
        "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
        "nvmlDeviceGetComputeRunningProcesses": ["worker", "another"],
    }

    def answer(name: str) -> Any:
        if isinstance(answers[name], Exception):
            raise answers[name]
        return answers[name]

    for name in answers:
        monkeypatch.setattr(pynvml, name, lambda *handle, name=name: answer(name))
    return answers


def test_the_conditions_of_a_gpu_are_what_the_driver_tells(told: dict[str, Any], asked: list[str]) -> None:
    with nvidia.conditions_reader("cuda") as read:
        assert read() == Conditions(NVML, 1755, 61, ("sw_power_cap",), 1)
        told["nvmlDeviceGetComputeRunningProcesses"] = []  # in a container the worker may be hidden, too
        assert read().other_processes == 0
    assert asked == [f"GPU-{UUID}"]


def test_what_the_driver_does_not_tell_is_left_open(told: dict[str, Any]) -> None:
    for name in ("nvmlDeviceGetTemperature", "nvmlDeviceGetComputeRunningProcesses"):
        told[name] = pynvml.NVMLError_NotSupported()
    with nvidia.conditions_reader("cuda") as read:
        assert read() == Conditions(NVML, 1755, None, ("sw_power_cap",), None)
        told["nvmlDeviceGetClockInfo"] = pynvml.NVMLError_NotSupported()
        told["nvmlDeviceGetCurrentClocksEventReasons"] = pynvml.NVMLError_NoPermission()
        assert read() == Conditions("unreadable")


def test_on_the_cpu_no_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: pytest.fail("asked"))
    with nvidia.conditions_reader("c") as read:
        assert read() == Conditions("not applicable")
