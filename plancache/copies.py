"""Signature -> copy: fresh graphs for one device, and the proof that they are exact.

Only copies are built, loaded and executed. Sources: the frontend's `_pygraph.py` (1.32).
"""

from __future__ import annotations

import json
import os
import threading
from typing import TYPE_CHECKING, Any

from plancache.encoding import Enum
from plancache.environment import Device, load_frontend
from plancache.errors import DeviceFileError
from plancache.signature import OWN, Reading, Uncacheable, canonical_order, inferred, read

if TYPE_CHECKING:
    from plancache.description import Description

_LABEL = "plancache"

# The frontend dies in an import cycle when several threads build first, and builds hold the GIL anyway.
BUILDING = threading.RLock()
os.register_at_fork(after_in_child=BUILDING._at_fork_reinit)  # type: ignore[attr-defined]  # whoever holds it is not in the child


class Copies:
    """Makes copies for a device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._properties: Any = None

    def copy(self, description: Description, *, handle: Any = None) -> Any:
        """A fresh graph of a description, with canonical uids and labels and this device's sm_version."""
        cudnn = load_frontend()
        options = {name: _value(cudnn, value) for name, value in description.options.items()}
        options["sm_version"] = options["sm_version"] or self.device.sm_version
        place = {"handle": handle} if handle is not None else {"device_property": self.properties()}
        context = {name: _value(cudnn, value) for name, value in description.context.items()}
        graph = cudnn.pygraph(name=_LABEL, **context, **options, **place)
        graph._plancache = OWN
        tensors: dict[int, Any] = {}
        for uid, record in enumerate(description.tensors, 1):
            attributes = {name: _value(cudnn, value) for name, value in record.items() if name != "ragged_offset"}
            attributes.update(dim=list(record["dim"]), stride=list(record["stride"]))
            tensors[uid] = cudnn.Tensor(name=f"t{uid}", uid=uid, uid_assigned=True, **attributes)
        for uid, record in enumerate(description.tensors, 1):
            if record["ragged_offset"] is not None:
                tensors[uid].ragged_offset = tensors[record["ragged_offset"]]
            graph._register_tensor(tensors[uid])
        graph._reserved_uids.update(tensors)
        for index, record in enumerate(description.nodes):
            node = cudnn.Node(f"n{index}", cudnn.NodeType[record["node_type"]], _value(cudnn, record["compute_data_type"]))
            node.inputs = {port: tensors[uid] for port, uid in record["inputs"].items()}
            node.outputs = {port: tensors[uid] for port, uid in record["outputs"].items()}
            node.params = {name: _value(cudnn, value) for name, value in record["params"].items()}
            graph._nodes.append(node)
        return graph

    def check_copy(self, reading: Reading) -> None:
        """Raises `Uncacheable` where the copy lowers to something else than the caller's graph, labels and uids aside."""
        from plancache.description import decode

        copy = self.copy(decode(reading.signature))
        if read(copy, self.device).signature != reading.signature:
            raise Uncacheable("its copy reads back differently")
        try:
            theirs = self._lowered(reading.graph)
        except load_frontend().cudnnGraphNotSupportedError as error:
            if self.device.is_file:
                raise
            raise Uncacheable(f"cuDNN's backend does not take it, a Python engine may: {error}") from error
        mine = self._lowered(copy)
        if mine != theirs:
            raise Uncacheable(f"its copy lowers differently: {_first_difference(mine, theirs)}")

    def _lowered(self, graph: Any) -> Any:
        """The lowered form of a graph as cuDNN's JSON, made on a scratch graph with canonical uids and labels."""
        scratch = inferred(graph)
        scratch._handle = None
        scratch._cpp_graph_kwargs.update(name=_LABEL, device_property=self.properties(), sm_version=self.device.sm_version)
        scratch._tensor_by_uid = dict(enumerate(canonical_order(scratch), 1))
        for uid, tensor in scratch._tensor_by_uid.items():
            tensor.uid, tensor.name = uid, f"t{uid}"
        for index, node in enumerate(scratch._nodes):
            node.name = f"n{index}"
        with BUILDING:
            lowered = scratch._lower_to_cpp()
            lowered.validate()
            lowered.build_operation_graph()
        form = json.loads(repr(lowered))
        form.pop("gid", None)  # counts the graphs of the process
        return form

    def properties(self) -> Any:
        """cuDNN's property object of the device."""
        if self._properties is None:
            cudnn = load_frontend()
            source = self.device.properties_json if self.device.ordinal is None else self.device.ordinal
            try:
                self._properties = cudnn.create_device_properties(source)
            except RuntimeError as error:
                raise DeviceFileError(
                    f"cuDNN {cudnn.backend_version()} refuses the device's properties ({error}); "
                    "write a device file with this version: plancache doctor --write-device FILE"
                ) from error
        return self._properties


def _value(cudnn: Any, value: Any) -> Any:
    """A decoded value as the frontend's."""
    if isinstance(value, Enum):
        return member(cudnn, *value)
    if type(value) in (list, tuple):
        return type(value)(_value(cudnn, item) for item in value)
    if type(value) is dict:
        return {name: _value(cudnn, item) for name, item in value.items()}
    return value


def member(cudnn: Any, kind: str, name: str) -> Any:
    members = getattr(cudnn._pybind_module, kind).__members__
    if name not in members:
        raise ValueError(f"{name!r} is not one of cudnn.{kind}: {', '.join(members)}")
    return members[name]


def _first_difference(mine: Any, theirs: Any, at: str = "graph") -> str:
    if isinstance(mine, dict) and isinstance(theirs, dict) and mine.keys() == theirs.keys():
        name = next(name for name in mine if mine[name] != theirs[name])
        return _first_difference(mine[name], theirs[name], f"{at}.{name}")
    if isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        index = next(index for index, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1])
        return _first_difference(mine[index], theirs[index], f"{at}[{index}]")
    return f"{at} is {str(mine)[:60]} in place of {str(theirs)[:60]}"
