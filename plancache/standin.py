"""What takes the place of a graph's lowered form where its plan comes from the cache.

The frontend asks its lowered graph by name only. The operands of the program's graph have uids of their own: buffers come
in the order of those, and go to cuDNN in the order of the copy's.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

from plancache.course import Course, resolve

if TYPE_CHECKING:
    from plancache.entry import Entry

_OTHER = "another plan is executed"


class StandIn:
    """Answers from what is stored; what it cannot answer sends the graph down the frontend's own road."""

    def __init__(self, graph: Any, course: Course) -> None:
        self._graph = ref(graph)  # which holds this: a cycle would free cuDNN's objects at some garbage collection
        self._course = course
        self._entry: Entry | None = None
        self._native: Any = None
        self._place = -1
        self._uids: list[int] = []
        self._canonical: dict[int, int] = {}
        self._permutation: list[int] = []

    def seat(self, entry: Entry, native: Any, place: int) -> None:
        """Takes the plan that executions run."""
        tensors = self._course.request.tensors
        callers = [tensors[uid - 1].uid for uid in entry.operands]
        self._entry, self._native, self._place = entry, native, place
        self._uids = sorted(callers)
        self._canonical = dict(zip(callers, entry.operands, strict=True))
        self._permutation = [self._uids.index(uid) for uid in callers]

    # ---- described and planned

    def build_operation_graph(self) -> None:
        """What lowering resolves is known."""
        if self._course.served is not None:
            resolve(self._course, self._course.served.entry.layouts)

    def check_support(self) -> None:
        if not self._course.plans:
            self._lowered("it is asked whether it is supported before it is planned").check_support()
            return
        graph = self._graph()
        if graph is not None and not self._course.interceptor.is_supported(graph, self._course):
            self._lowered("no plan is known to pass its filters").check_support()

    def get_execution_plan_count(self) -> int:
        """Zero before planning. After it the frontend answers by itself, unless it is to add a plan."""
        return int(self._lowered("a plan is added").get_execution_plan_count()) if self._course.plans else 0

    def get_plan_name_at_index(self, index: int) -> str:
        return self._course.plans[index].name

    def _recorded(self, *_: Any) -> None:
        """A filter: the frontend has noted it on the graph, where it is read when a plan is built."""

    def deselect_engines(self, names: Sequence[str]) -> None:
        """As the others."""
        self._course.untold -= frozenset(names)

    deselect_workspace_greater_than = _recorded
    select_behavior_notes = deselect_behavior_notes = select_numeric_notes = deselect_numeric_notes = _recorded

    # ---- built

    def get_workspace_size_plan_at_index(self, index: int, *overrides: Any) -> int:
        if index != self._place:
            return int(
                self._lowered("another plan's workspace is asked for").get_workspace_size_plan_at_index(self._there(index), *overrides)
            )
        return self.get_workspace_size(*overrides)

    def get_workspace_size(self, handle: Any = None, uids: Any = None, shapes: Any = None, strides: Any = None) -> int:
        if self._entry is None:
            return int(self._lowered("its workspace is asked for before it is built").get_workspace_size(handle, uids, shapes, strides))
        if uids is None and shapes is None and strides is None:
            return self._entry.workspace_size
        return int(self._native.get_workspace_size(handle, self._mapped(uids), shapes, strides))

    def get_behavior_notes(self) -> list[Any]:
        if self._entry is None:
            return list(self._lowered("notes are asked for before it is built").get_behavior_notes())
        notes = sys.modules["cudnn"].behavior_note.__members__
        return [notes[name] for name in self._entry.behavior_notes]

    def get_behavior_notes_for_plan_at_index(self, index: int) -> list[Any]:
        if index == self._place:
            return self.get_behavior_notes()
        return list(self._lowered("another plan's notes are asked for").get_behavior_notes_for_plan_at_index(self._there(index)))

    def get_cuda_graph_retention(self) -> Any:
        graph = self._graph()
        given = graph._cpp_graph_kwargs.get("cuda_graph_retention") if graph is not None else None
        return sys.modules["cudnn"]._pybind_module._effective_cuda_graph_retention(given)

    # ---- executed

    def _prepare_variant_pack_template(self) -> None:
        """The order of operands is known from the start."""

    def _get_variant_pack_uids_sorted(self) -> list[int]:
        return self._uids

    def _execute_with_raw_ptrs(self, address: int, count: int, workspace: int, handle: int, index: int) -> None:
        if index != self._place:
            self._lowered(_OTHER)._execute_with_raw_ptrs(address, count, workspace, handle, self._there(index))
            return
        given = (ctypes.c_uint64 * count).from_address(address)
        ordered = (ctypes.c_uint64 * count)(*[given[at] for at in self._permutation])
        self._native._execute_with_raw_ptrs(ctypes.addressof(ordered), count, workspace, handle, -1)

    def _execute_ordered(self, schema: Any, buffers: Any, uids: Any, bound: Any, workspace: Any, *rest: Any) -> Any:
        """The buffers as read, for `_execute_ordered_pack`."""
        if rest[-1] != self._place:
            return self._lowered(_OTHER)._execute_ordered(schema, buffers, uids, bound, workspace, *rest[:-1], self._there(rest[-1]))
        return schema.read(buffers, uids, bound, workspace, *rest[:3])

    def _execute_ordered_pack(self, pack: Any, workspace: int, handle: int, index: int) -> None:
        self._execute_with_raw_ptrs(pack.address, len(self._uids), workspace, handle, index)

    def _execute_plan_at_index(
        self, pack: Mapping[int, int], workspace: int, index: int, handle: Any, uids: Any = None, shapes: Any = None, strides: Any = None
    ) -> None:
        if index != self._place:
            self._lowered(_OTHER)._execute_plan_at_index(pack, workspace, self._there(index), handle, uids, shapes, strides)
            return
        mine = {self._canonical[uid]: pointer for uid, pointer in pack.items() if uid in self._canonical}
        self._native._execute(mine, workspace, handle, self._mapped(uids), shapes, strides)

    def _execute(self, pack: Mapping[int, int], workspace: int, handle: Any, *overrides: Any) -> None:
        self._execute_plan_at_index(pack, workspace, self._place, handle, *overrides)

    def populate_cuda_graph(self, handle: Any, pack: Mapping[Any, Any], workspace: Any, cuda_graph: Any) -> Any:
        return self._native.populate_cuda_graph(handle, self._by_canonical(pack), workspace, cuda_graph)

    def update_cuda_graph(self, handle: Any, pack: Mapping[Any, Any], workspace: Any, cuda_graph: Any) -> Any:
        return self._native.update_cuda_graph(handle, self._by_canonical(pack), workspace, cuda_graph)

    def _by_canonical(self, pack: Mapping[Any, Any]) -> dict[int, Any]:
        return {self._canonical[uid]: data for uid, data in pack.items() if uid in self._canonical}

    def _mapped(self, uids: Sequence[int] | None) -> list[int] | None:
        return None if uids is None else [self._canonical[uid] for uid in uids]

    # ---- the frontend's own road

    def _lowered(self, reason: str) -> Any:
        """The graph's own lowered form."""
        graph = self._graph()
        if graph is None:
            raise RuntimeError("the graph is gone")
        if graph._lowered_graph is self:
            self._course.interceptor.leave(graph, reason)
        return graph._lowered_graph

    def _there(self, index: int) -> int:
        """Where a plan of the graph's list lies in cuDNN's own."""
        graph = self._graph()
        found = graph._materialize_backend_plan(index).cpp_index if graph is not None else None
        return index if found is None else int(found)

    def __getattr__(self, name: str) -> Any:
        """Methods that nothing stored can answer, by name: called, they are the lowered graph's."""
        if name.startswith("__") or not hasattr(sys.modules["cudnn"]._pybind_module.backend_graph, name):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(self._lowered(f"{name}() is called"), name)(*args, **kwargs)

        return call

    def __repr__(self) -> str:
        return repr(self._lowered("it is printed"))
