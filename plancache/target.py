"""A device, and everything that planning for it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plancache.backend import CudnnBackend
from plancache.environment import Device, result_changing_variables
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
        # cuDNN reads some variables once in a process: what they were then is what builds in this process are made under
        self.variables = result_changing_variables()
        self.builder: CudnnBackend | Compiler = self.backend
        if device.is_file:
            from plancache.compiler import Compiler

            self.builder = Compiler(device, b"" if self.unknown else self.place.cudnn)

    def close(self) -> None:
        self.builder.close()
        self.backend.close()
