"""A loaded plan of one thread and device, as cuDNN runs it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any


class Executable:
    """A loaded plan of one thread and device. `uids` are those it binds, ascending."""

    def __init__(self, graph: Any, uids: tuple[int, ...], handle: Any) -> None:
        self._graph = graph
        self._uids = uids
        self._handle = handle
        self._pointers = (ctypes.c_uint64 * len(uids))()  # cuDNN reads them before the launch returns
        self._address = ctypes.addressof(self._pointers)
        self._launch = None if graph.plans else getattr(graph._lowered_graph, "_execute_with_raw_ptrs", None)

    def runner(self, buffers: Sequence[Any], addresses: list[int], workspace: Any, workspace_address: int) -> Callable[[int], None]:
        """A function of the stream that runs the plan on these buffers, given in the order of `uids`."""
        from cudnn import set_stream

        handle, count, launch = self._handle, len(addresses), self._launch
        if launch is None:  # a Python engine's plan reads the buffers' own descriptions
            graph, uids, buffers = self._graph, self._uids, list(buffers)

            def run_graph(stream: int) -> None:
                set_stream(handle, stream)
                graph.execute(buffers, workspace, handle, tensor_uids=uids)

            return run_graph
        pointers = (ctypes.c_uint64 * count)(*addresses)
        address, backend_handle = ctypes.addressof(pointers), handle.backend_handle

        def run(stream: int, _keep: Any = (pointers, buffers)) -> None:
            if handle.stream != stream:
                set_stream(handle, stream)
            launch(address, count, workspace_address, backend_handle, -1)

        return run

    def run(self, buffers: Sequence[Any], addresses: list[int], workspace: Any, workspace_address: int, stream: int) -> None:
        """Runs the plan once."""
        if self._launch is None:
            self.runner(buffers, addresses, workspace, workspace_address)(stream)
            return
        handle = self._handle
        if handle.stream != stream:
            from cudnn import set_stream

            set_stream(handle, stream)
        self._pointers[:] = addresses  # type: ignore[assignment]  # plain integers are what it is for
        self._launch(self._address, len(addresses), workspace_address, handle.backend_handle, -1)
