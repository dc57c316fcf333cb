"""The state of a GPU, from a management library that is made up here: what is found, what is left out, what counts as quiet."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from plancache import conditions as module
from plancache.conditions import conditions, is_quiet

NOT_SUPPORTED, TOO_SMALL = 3, 7  # nvml.h


class Library:
    """NVML's functions as a GPU in a known state answers them; `refused`: those that it does not support, `missing`: has not."""

    def __init__(
        self, *, processes: int = 1, reasons: int = 0, mig: int = 0, refused: tuple[str, ...] = (), missing: tuple[str, ...] = ()
    ) -> None:
        self.processes, self.reasons, self.mig, self.refused, self.missing = processes, reasons, mig, refused, missing

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml"):
            if name in self.missing:
                raise AttributeError(name)
            if name in self.refused:
                return lambda *_: NOT_SUPPORTED
        return super().__getattribute__(name)

    def nvmlDeviceGetClockInfo(self, _handle: Any, kind: int, value: Any) -> int:  # noqa: N802
        value._obj.value = {1: 1755, 2: 2619}[kind]
        return 0

    def nvmlDeviceGetMaxClockInfo(self, _handle: Any, kind: int, value: Any) -> int:  # noqa: N802
        value._obj.value = {1: 1980, 2: 3201}[kind]
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _handle: Any, value: Any) -> int:  # noqa: N802
        value._obj.value = self.reasons
        return 0

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: Any, count: Any, infos: Any) -> int:  # noqa: N802
        assert infos is None
        assert count._obj.value == 0  # with room for none, the number is all that it writes
        count._obj.value = self.processes
        return TOO_SMALL if self.processes else 0

    def nvmlDeviceGetMigMode(self, _handle: Any, mode: Any, _pending: Any) -> int:  # noqa: N802
        mode._obj.value = self.mig
        return 0


FUNCTIONS = {
    "nvmlDeviceGetClockInfo": {"sm_clock_mhz", "memory_clock_mhz"},
    "nvmlDeviceGetMaxClockInfo": {"sm_clock_max_mhz"},
    "nvmlDeviceGetCurrentClocksThrottleReasons": {"throttled"},
    "nvmlDeviceGetComputeRunningProcesses": {"other_processes"},
    "nvmlDeviceGetMigMode": {"mig"},
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a GPU in some state under device 0."""

    def install(**state: Any) -> None:
        monkeypatch.setattr(module, "_nvml", lambda: Library(**state))
        monkeypatch.setattr(module, "_handle", lambda _library, ordinal: ctypes.c_void_p(1) if ordinal == 0 else None)

    return install


def test_all_facts_of_a_gpu(gpu: Callable[..., None]) -> None:
    """Clocks in MHz by their kind, throttling, processes besides this program's, MIG."""
    gpu(processes=3, mig=1)
    assert conditions(0) == {
        "sm_clock_mhz": 1755,
        "memory_clock_mhz": 2619,
        "sm_clock_max_mhz": 1980,
        "throttled": False,
        "other_processes": 2,
        "mig": True,
    }


@pytest.mark.parametrize(("processes", "own", "others"), [(0, 1, 0), (1, 1, 0), (3, 1, 2), (3, 3, 0), (2, 5, 0)])
def test_this_programs_own_processes_are_not_others(gpu: Callable[..., None], processes: int, own: int, others: int) -> None:
    """Children that compile count as its own; fewer than expected are none."""
    gpu(processes=processes)
    assert conditions(0, own_processes=own)["other_processes"] == others


@pytest.mark.parametrize(
    ("reasons", "throttled"),
    [
        (0, False),
        (0x1, False),
        (0x2, False),
        (0x10, False),
        (0x100, False),
        (0x4, True),
        (0x8, True),
        (0x20, True),
        (0x40, True),
        (0x80, True),
    ],
)
def test_which_reasons_are_throttling(gpu: Callable[..., None], reasons: int, throttled: bool) -> None:
    """Idle, clocks that somebody set, synchronized boost and display clocks are not; power and heat are, beside others too."""
    for others in (0, 0x1):
        gpu(reasons=reasons | others)
        assert conditions(0)["throttled"] is throttled


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("how", ["refused", "missing"])
def test_what_a_gpu_or_library_cannot_tell_is_left_out(gpu: Callable[..., None], name: str, how: str) -> None:
    """A GPU without MIG, a guest that may not see processes, an older library: the other facts are there."""
    gpu(**{how: (name,)})
    assert conditions(0).keys() == set().union(*FUNCTIONS.values()) - FUNCTIONS[name]


def test_without_a_library_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """No driver, as in CI: no facts, and the question is not an error."""
    monkeypatch.setattr(module, "_nvml", lambda: None)
    assert conditions(0) == {}


def test_without_a_device_nothing_is_known(gpu: Callable[..., None]) -> None:
    """A device file has no ordinal; a device that the library does not find has no handle."""
    gpu()
    assert conditions(None) == {}
    assert conditions(1) == {}


def test_libraries_that_cannot_be_loaded_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader's error, and a library without the functions, both end in not knowing."""

    def absent(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    for load in (absent, lambda _: object()):
        monkeypatch.setattr(module.ctypes, "CDLL", load)
        assert module._nvml.__wrapped__() is None
        assert module._handle(Library(), 0) is None


def test_a_library_that_does_not_start_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is there and the driver is not loaded."""

    class Broken:
        nvmlInit_v2 = staticmethod(lambda: 9)  # noqa: N815

    monkeypatch.setattr(module.ctypes, "CDLL", lambda _: Broken())
    assert module._nvml.__wrapped__() is None


class Driver:
    """CUDA's devices, renumbered: device 0 lies at the second address."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        device._obj.value = 7 + ordinal
        return 100 if self.failing == "cuDeviceGet" else 0

    def cuDeviceGetPCIBusId(self, address: Any, size: int, device: Any) -> int:  # noqa: N802
        assert size == len(address)
        address.value = b"0000:1B:00.0" if device.value == 7 else b"?"
        return 1 if self.failing == "cuDeviceGetPCIBusId" else 0


class ByAddress:
    def nvmlDeviceGetHandleByPciBusId_v2(self, address: Any, handle: Any) -> int:  # noqa: N802
        if address.value != b"0000:1B:00.0":
            return 6
        handle._obj.value = 42
        return 0


def test_a_device_is_found_by_its_pci_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's number is not the library's; one that the library does not know has no handle."""
    monkeypatch.setattr(module.ctypes, "CDLL", lambda _: Driver())
    assert module._handle(ByAddress(), 0).value == 42
    assert module._handle(ByAddress(), 1) is None


@pytest.mark.parametrize("failing", ["cuDeviceGet", "cuDeviceGetPCIBusId"])
def test_a_driver_that_is_not_initialized_gives_no_handle(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    """No address, no facts."""
    monkeypatch.setattr(module.ctypes, "CDLL", lambda _: Driver(failing))
    assert module._handle(ByAddress(), 0) is None


QUIET = {"throttled": False, "other_processes": 0, "mig": True, "sm_clock_mhz": 1980}


@pytest.mark.parametrize("change", [{"throttled": True}, {"other_processes": 1}])
def test_noise_before_or_after_is_noise(change: dict[str, Any]) -> None:
    """Seen at one end is enough."""
    assert is_quiet(QUIET, QUIET)
    assert not is_quiet(QUIET | change, QUIET)
    assert not is_quiet(QUIET, QUIET | change)


def test_what_nobody_can_tell_is_no_noise() -> None:
    """Facts are missing where there is no library: timings are taken as they are."""
    assert is_quiet({}, {})
    assert is_quiet({"mig": True}, {"sm_clock_mhz": 1200})
