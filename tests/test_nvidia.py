"""The GPU is the one that torch uses, whatever the order in which the driver counts them."""

from __future__ import annotations

from types import SimpleNamespace

import pynvml
import pytest

from mhctune.autotuner import nvidia

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
