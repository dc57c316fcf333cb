"""How many of a bundle's plans may run here, or on the GPU of a device file."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from plancache.cli.target import refuse_slip

if TYPE_CHECKING:
    from plancache.carrying import Usability
    from plancache.environment import Device


def add_device(parser: argparse.ArgumentParser) -> None:
    file = "a device file, or the name of a shipped one such as h200: say what that GPU can use, which need not be here"
    parser.add_argument("--device", metavar="FILE", help=file)


def device_of(args: argparse.Namespace) -> Device | None:
    """The device that was named; None for the one that is here, if any."""
    if args.device is None:
        return None
    from plancache.environment import Device

    refuse_slip(args.device)
    return Device.from_file(args.device)


def in_short(usability: Usability) -> str:
    """In one line."""
    if usability.unknown:
        return f"cannot be judged: {usability.unknown}"
    others = ", ".join(f"{number} {reason}" for reason, number in usability.reasons.items())
    return f"{usability.usable} of {usability.entries}{f'; not: {others}' if others else ''}"


def text(usability: Usability) -> str:
    """In one line where all can be used, else with a line for each reason."""
    if usability.unknown:
        return f"how many of them can be used cannot be judged: {usability.unknown}"
    total = f"{usability.usable} of {usability.entries} can be used on {usability.device}"
    width = len(str(max(usability.reasons.values(), default=0)))
    reasons = [f"  {number:{width}}  {reason}" for reason, number in usability.reasons.items()]
    return "\n".join([f"{total}, not:" if reasons else total, *reasons])
