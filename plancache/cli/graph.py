"""A stored plan's graph as a listing: one line an operation, one line a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plancache.cli.tables import table
from plancache.encoding import Enum

if TYPE_CHECKING:
    from plancache.entry import Entry


def operations(entry: Entry) -> list[dict[str, Any]]:
    """The operations in order; `inputs` and `outputs` map ports to tensor numbers."""
    description = entry.description
    return [
        {
            "operation": name,
            "inputs": node["inputs"],
            "outputs": node["outputs"],
            "parameters": {key: _plain(value) for key, value in node["params"].items() if (key, value) != ("mode", name)},
            "compute_type": _plain(node["compute_data_type"]),
        }
        for name, node in zip(description.operations, description.nodes, strict=True)
    ]


def tensors(entry: Entry) -> list[dict[str, Any]]:
    """The tensors by number, with dims, strides and types as lowering resolved them."""
    made = {uid for node in entry.description.nodes for uid in node["outputs"].values()}
    rows = []
    for uid, tensor in enumerate(entry.description.tensors, 1):
        layout = entry.layouts.get(uid)
        rows.append(
            {
                "tensor": uid,
                "role": _role(tensor, uid, made),
                "dim": list(layout.dim if layout else tensor["dim"]),
                "stride": list(layout.stride if layout else tensor["stride"]),
                "data_type": layout.data_type if layout else _plain(tensor["data_type"]),
                "ragged_offset": tensor["ragged_offset"],
                "ragged_offset_multiplier": tensor["ragged_offset_multiplier"],
                "remarks": _remarks(tensor),
            }
        )
    return rows


def _role(tensor: dict[str, Any], uid: int, made: set[int]) -> str:
    if tensor["is_virtual"]:
        return "virtual"
    if uid in made:
        return "output"
    if tensor["pass_by_value"] is not None:
        return "constant"
    return "scalar input" if tensor["is_pass_by_value"] else "input"


def _remarks(tensor: dict[str, Any]) -> list[str]:
    remarks = []
    if tensor["pass_by_value"] is not None:
        remarks.append(f"value {tensor['pass_by_value']}")
    elif tensor["is_pass_by_value"]:
        remarks.append("read on the host")
    if tensor["reordering_type"] is not None:
        remarks.append(f"reordered {_plain(tensor['reordering_type'])}")
    if tensor["alignment_value"] != 1:
        remarks.append(f"aligned to {tensor['alignment_value']}")
    return remarks


def _plain(value: Any) -> Any:
    """A decoded value as JSON has it."""
    if isinstance(value, Enum):
        return value.member
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    return value


def print_graph(entry: Entry) -> None:
    """Prints operations, then tensors, whose names say what comes in (`in1`) and goes out (`out6`)."""
    known = tensors(entry)
    names = {row["tensor"]: f"{_PREFIXES.get(row['role'], 't')}{row['tensor']}" for row in known}
    print("\noperations")
    rows = [_operation(index, row, names) for index, row in enumerate(operations(entry), 1)]
    print(table((">#", "operation", "ports", "parameters", "computes in"), rows, indent="  "))
    print("\ntensors")
    print(table(("tensor", "role", "dims", "strides", "type", ""), [_tensor(row, names) for row in known], indent="  "))


_PREFIXES = {"input": "in", "scalar input": "in", "output": "out", "constant": "const"}


def _operation(index: int, row: dict[str, Any], names: dict[int, str]) -> tuple[str, ...]:
    inputs, outputs = (" ".join(f"{port}={names[uid]}" for port, uid in row[ports].items()) for ports in ("inputs", "outputs"))
    parameters = " ".join(f"{name}={_compact(value)}" for name, value in row["parameters"].items())
    return str(index), row["operation"], f"{inputs} -> {outputs}", parameters, str(row["compute_type"] or "").lower()


def _tensor(row: dict[str, Any], names: dict[int, str]) -> tuple[str, ...]:
    remarks = list(row["remarks"])
    if row["ragged_offset"] is not None:
        remarks.append(f"ragged by {names[row['ragged_offset']]} times {row['ragged_offset_multiplier']}")
    dims, strides = "x".join(map(str, row["dim"])), ",".join(map(str, row["stride"]))
    return names[row["tensor"]], row["role"], dims, strides, str(row["data_type"] or "").lower(), "; ".join(remarks)


def _compact(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ",".join(map(_compact, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)
