"""Tests of the settings of the allocator, the number of threads, and the host's memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from megatrain.runtime import host, machine
from megatrain.runtime.execution import executor


def test_a_processor_has_the_name_that_linux_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, the machine of a shared calibration would only be called x86_64."""
    text = "processor\t: 0\nmodel name\t:  Some  Processor : 2 GHz \n\nmodel name\t: other\n"
    monkeypatch.setattr(Path, "read_text", lambda *_: text)
    assert host.processor() == "Some Processor : 2 GHz"
    monkeypatch.setattr(Path, "read_text", lambda *_: "Features\t: fp\n")
    monkeypatch.setattr(host.platform, "processor", lambda: "")
    assert host.processor() == host.platform.machine()


@pytest.mark.parametrize(
    "name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"]
)
def test_the_user_s_settings_of_the_allocator_are_kept(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for other in machine._ALLOCATOR:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:128")
    machine.grow_segments()
    assert {other: os.environ[other] for other in machine._ALLOCATOR if other in os.environ} == {
        name: "max_split_size_mb:128"
    }


def test_the_allocator_gets_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    machine.grow_segments()
    assert os.environ == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("cores", "cpu", "cuda"),
    [(1, 1, 1), (2, 1, 2), (4, 3, 4), (8, 7, 7), (16, 15, 14), (64, 63, 56)],
)
def test_some_of_many_cores_are_left_to_the_threads_that_enqueue(
    monkeypatch: pytest.MonkeyPatch, cores: int, cpu: int, cuda: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert executor.lane_threads(torch.device("cpu"))["cpu"] == cpu
    assert executor.lane_threads(torch.device("cuda"))["cpu"] == cuda


def test_only_a_gpu_is_described_with_a_version_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(machine, "device_bytes", lambda _: 2**37)
    cpu, gpu = (machine.describe(torch.device(kind)) for kind in ("cpu", "cuda"))
    assert str(cpu["device"]).endswith(", RAM in place of GPU memory")
    assert "cuda" not in cpu
    assert (gpu["device"], gpu["cuda"]) == ("NVIDIA H200", "13.0")


def test_this_machine_s_own_memory_and_cores_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan leaves 2 GiB and 2 % of the host's memory to the system, but at most an eighth."""
    assert 2**20 < host.host_bytes() < 2**60
    assert 0 < host.free_host_bytes() <= host.host_bytes()
    for total, usable in ((100, 96), (8, 7)):
        monkeypatch.setattr(host, "host_bytes", lambda total=total: total * 2**30)
        assert host.usable_host_bytes() == usable * 2**30
    assert host.cores() >= 1
