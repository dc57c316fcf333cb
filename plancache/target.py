"""A device, and everything that planning for it needs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from plancache.environment import Device, current_ordinal, variables_of_this_process
from plancache.key import Place

if TYPE_CHECKING:
    from plancache.backend import CudnnBackend
    from plancache.compiler import Compiler
    from plancache.workbench import Builders


class DeviceTarget:
    """Backend, builder and the parts of keys that stay the same for one device in one process."""

    def __init__(self, device: Device) -> None:
        from plancache.backend import CudnnBackend  # not before something is planned

        self.device = device
        self.backend = CudnnBackend(device)
        self.place = Place.of(device, self.backend.libraries)
        self.unknown = self.backend.libraries.unknown
        self.variables = variables_of_this_process()
        self._builders: tuple[tuple[dict[str, str], int | None], Builders] | None = None
        self.builder: CudnnBackend | Compiler = self.backend
        if device.is_file:
            from plancache.compiler import Compiler

            self.builder = Compiler(device, b"" if self.unknown else self.place.cudnn)

    def builders(self, variables: Mapping[str, str], jobs: int | None) -> Builders:
        """The child processes that compile candidates for this device; they stay until `close`."""
        from plancache.workbench import Builders

        asked = dict(variables), jobs
        if self._builders is None or self._builders[0] != asked:
            if self._builders is not None:
                self._builders[1].close()
            self._builders = asked, Builders(self.device, self.place.cudnn, variables, jobs)
        return self._builders[1]

    def close(self) -> None:
        if self._builders is not None:
            self._builders[1].close()
        self.builder.close()
        self.backend.close()


class Targets:
    """The devices that one cache plans for: the one that was named, or whichever is current."""

    def __init__(self, device: Device | None, warn: Callable[[str, str], None]) -> None:
        self._device = device
        self._warn = warn
        self._targets: dict[int | None, DeviceTarget] = {}
        self._inherited: list[DeviceTarget] = []
        self._guard = threading.Lock()

    def current(self, ordinal: int | None = None) -> DeviceTarget:
        """What plans for the device that was named, or this one, or the one that is current in this thread.

        Raises `DeviceError`, `LibraryError`.
        """
        if self._device is not None:
            return self._of(self._device)
        ordinal = current_ordinal() if ordinal is None else ordinal
        return self._targets.get(ordinal) or self._of(Device.current(ordinal))

    def _of(self, device: Device) -> DeviceTarget:
        target = self._targets.get(device.ordinal)
        if target is None:
            with self._guard:
                target = self._targets.get(device.ordinal)
                if target is None:
                    target = self._targets[device.ordinal] = DeviceTarget(device)
            if target.unknown:
                self._warn("unknown", f"{target.unknown}: plans are kept in memory only, since what they depend on is not known")
        return target

    def after_fork(self) -> None:
        """Leaves the parent's handles and child processes alone, and begins anew."""
        self._guard = threading.Lock()
        self._inherited += self._targets.values()
        self._targets.clear()

    def close(self) -> None:
        """Destroys handles and ends child processes."""
        with self._guard:
            targets, self._targets = list(self._targets.values()), {}
        for target in targets:
            target.close()
