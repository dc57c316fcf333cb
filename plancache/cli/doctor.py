"""`plancache doctor`: what is here, what is wrong with it, and the cure."""

from __future__ import annotations

import argparse
from pathlib import Path

from plancache.cli.command import Command, UsageError, print_json, settings_of


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device-ordinal", metavar="N", type=int, help="the CUDA device to look at (default: the current one)")
    parser.add_argument("--write-device", metavar="FILE", help="write a device file of the GPU, for building where there is none, and end")
    parser.add_argument("--force", action="store_true", help="let --write-device overwrite a file")


def _run(args: argparse.Namespace) -> int:
    if args.write_device is not None:
        return _write_device(args)
    if args.force:
        raise UsageError("--force goes with --write-device FILE")
    from plancache.cli import machine, place
    from plancache.cli.report import Report
    from plancache.errors import SettingsError

    report, libraries = Report(), machine.load_libraries()
    machine.look_at_versions(report, libraries)
    machine.look_at_libraries(report, libraries)
    machine.look_at_device(report, libraries, args.device_ordinal)
    machine.look_at_building(report, libraries)
    wrong = None
    try:
        place.look_at_store(report, settings_of(args))
    except SettingsError as error:
        wrong = error
    place.look_at_variables(report, wrong)
    if args.json:
        print_json(report.to_dict())
    else:
        print(report.text())
    return 1 if report.problems else 0


def _write_device(args: argparse.Namespace) -> int:
    from plancache.environment import Device

    device = Device.current(args.device_ordinal).described()
    path = Path(args.write_device)
    try:
        with open(path, "w" if args.force else "x") as file:
            file.write(device.to_json())
    except FileExistsError:
        raise FileExistsError(f"{path} exists; --force overwrites it") from None
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no folder {path.parent}; make it first: mkdir -p {path.parent}") from None
    if args.json:
        print_json({"file": str(path), "device": device.model, "cudnn_version": device.cudnn_version})
    else:
        print(f"wrote {path}: {device.model}; elsewhere, 'plancache warm MODULE:FUNCTION --device {path.name}' plans for it")
    return 0


COMMAND = Command(
    "doctor",
    "look at this machine and the cache, and name the cure of each problem",
    "Exit code 1 where there is a problem.",
    "plancache doctor\nplancache doctor --write-device h200.json",
    _configure,
    _run,
)
