"""The main job in two processes: the first plans, builds and stores the example graphs, the second only loads them.

With a GPU the plans also run, and are compared with PyTorch. Without one they are built for the H200 of the device
file that the package ships, and nothing is executed. Run it with `make demo`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from typing import Any

from plancache import Device, PlanCache, graphs
from plancache.errors import DeviceError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--process", metavar="DIRECTORY", help=argparse.SUPPRESS)
    parser.add_argument("--no-gpu", action="store_true", help="plan for the device file even where there is a GPU")
    arguments = parser.parse_args()
    if arguments.process:
        return plan_all(arguments.process, arguments.no_gpu)
    with tempfile.TemporaryDirectory(prefix="plancache-demo-") as directory:
        print("first process: an empty cache directory")
        first = run_process(directory, arguments.no_gpu)
        print("second process: the same graphs")
        second = run_process(directory, arguments.no_gpu)
    print_table(first, second)
    return 0 if second["builds"] == 0 and all(row["right"] in (True, None) for row in second["plans"]) else 1


def run_process(directory: str, no_gpu: bool) -> dict[str, Any]:
    """Runs this file as a fresh process and returns what it reports."""
    command = [sys.executable, __file__, "--process", directory, *(["--no-gpu"] if no_gpu else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def plan_all(directory: str, no_gpu: bool) -> int:
    device = target(no_gpu)
    rows = []
    with PlanCache(directory, device=device) as cache:
        for example in graphs.examples():
            started = time.perf_counter()
            plan = cache.plan(example.graph)
            seconds = time.perf_counter() - started
            rows.append(
                {
                    "name": example.name,
                    "ms": seconds * 1e3,
                    "bytes": len(plan.entry.blob),
                    "engine": plan.entry.engine,
                    "origin": plan.origin,
                    "right": None if device.is_file else is_right(example, plan),
                }
            )
        builds = cache.statistics().builds
    print(json.dumps({"device": device.model, "executed": not device.is_file, "builds": builds, "plans": rows}))
    return 0


def target(no_gpu: bool) -> Device:
    """The GPU of this machine, or the H200 of the device file."""
    if not no_gpu:
        try:
            return Device.current()
        except DeviceError:
            pass
    return Device.from_file("h200")


def is_right(example: graphs.Example, plan: Any) -> bool:
    """Runs a plan and compares its outputs with PyTorch's, on outputs poisoned with NaN where the type has one."""
    import torch

    inputs = example.make_inputs()
    outputs = {operand.name: poisoned(operand) for operand in plan.operands if operand.is_output}
    plan.execute({**inputs, **outputs})
    for name, expected in example.reference(inputs).items():
        relative, absolute = example.tolerance(name)
        if not torch.allclose(outputs[name].float().reshape(expected.shape), expected, rtol=relative, atol=absolute):
            return False
    return True


def poisoned(operand: Any) -> Any:
    """A buffer for an output as the plan declares it, full of NaN, or of the greatest byte where there is none."""
    import torch

    kinds = {"HALF": torch.float16, "BFLOAT16": torch.bfloat16, "FLOAT": torch.float32, "FP8_E4M3": torch.float8_e4m3fn}
    buffer = torch.empty_strided(operand.dim, operand.stride, dtype=kinds[operand.data_type], device="cuda")
    extent = 1 + sum((size - 1) * step for size, step in zip(operand.dim, operand.stride, strict=True))
    torch.as_strided(buffer, (extent,), (1,)).view(torch.uint8).fill_(0xFF)
    return buffer


def print_table(first: dict[str, Any], second: dict[str, Any]) -> None:
    width = max(len(row["name"]) for row in first["plans"])
    verdict = "  PyTorch" if second["executed"] else ""
    print(f"\n{'graph':{width}} {'build ms':>9} {'load ms':>8} {'ratio':>6} {'bytes':>7}  {'engine':14} origin{verdict}")
    for built, loaded in zip(first["plans"], second["plans"], strict=True):
        right = "" if loaded["right"] is None else "   agrees" if loaded["right"] else "   DIFFERS"
        print(
            f"{built['name']:{width}} {built['ms']:9.1f} {loaded['ms']:8.2f} {built['ms'] / loaded['ms']:6.0f} {built['bytes']:7,}"
            f"  {built['engine'].partition('_k')[0]:14} {built['origin']} -> {loaded['origin']}{right}"
        )
    total = sum(row["ms"] for row in first["plans"]), sum(row["ms"] for row in second["plans"])
    print(
        f"\n{first['device']}: first process {first['builds']} builds in {total[0]:,.0f} ms, "
        f"second process {second['builds']} builds, {len(second['plans'])} plans in {total[1]:,.1f} ms"
    )
    if not second["executed"]:
        print("No GPU here: real cuDNN built these plans for the H200 of the shipped device file, and nothing was executed;")
        print("load ms is fetching and checking a plan, without the GPU that would take it.")


if __name__ == "__main__":
    sys.exit(main())
