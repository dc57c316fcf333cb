"""A device, and everything that planning for it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plancache.backend import CudnnBackend
from plancache.environment import Device, variables_of_this_process
from plancache.key import Place

if TYPE_CHECKING:
    from plancache.compiler import Compiler


class DeviceTarget:
    """Backend, builder and the parts of keys that stay the same for one device in one process."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.backend = CudnnBackend(device)
        self.place = Place.of(device, self.backend.libraries)
        self.unknown = self.backend.libraries.unknown
        self.variables = variables_of_this_process()
        self.builder: CudnnBackend | Compiler = self.backend
        if device.is_file:
            from plancache.compiler import Compiler

            self.builder = Compiler(device, b"" if self.unknown else self.place.cudnn)

    def close(self) -> None:
        self.builder.close()
        self.backend.close()
