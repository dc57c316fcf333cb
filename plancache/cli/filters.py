"""Which of the stored plans a command is about, as arguments."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from plancache.cli.amounts import seconds, size_bytes
from plancache.entry import QUALITIES

if TYPE_CHECKING:
    from plancache.listing import Filter


def add_filters(parser: argparse.ArgumentParser) -> None:
    only = parser.add_argument_group("which plans (those that fit all of it)")
    only.add_argument("--operation", metavar="NAME", action="append", default=[], help="with this operation, such as matmul; repeatable")
    only.add_argument("--dtype", metavar="TYPE", help="with this type among what goes in and comes out, such as bfloat16")
    only.add_argument("--shape", metavar="DIMS", type=_shape, help="with these dims likewise, such as 8x64x56x56; '*' is any extent")
    only.add_argument("--quality", choices=QUALITIES, action="append", default=[], help="of this quality; repeatable")
    only.add_argument("--cudnn", metavar="VERSION", help="for this cuDNN, such as 9.19 or 9.19.0")
    only.add_argument("--device-model", metavar="TEXT", help="for devices with this in their names, such as H200")
    only.add_argument("--tag", metavar="NAME", help="that the program of this name asked for (PLANCACHE_TAG)")
    only.add_argument("--newer-than", metavar="D", type=seconds, help="built no longer ago than this, such as 30d, 12h or 90min")
    only.add_argument("--older-than", metavar="D", type=seconds, help="built longer ago")
    only.add_argument("--larger-than", metavar="N", type=size_bytes, help="that take more than this as they are stored, such as 100kB")
    only.add_argument("--min-hits", metavar="N", type=int, help="that were loaded at least so often")


def filter_of(args: argparse.Namespace) -> Filter:
    from plancache.listing import Filter

    return Filter(
        operations=tuple(args.operation),
        data_type=args.dtype,
        shape=args.shape,
        qualities=tuple(args.quality),
        cudnn=args.cudnn,
        device=args.device_model,
        tag=args.tag,
        newer_than_s=args.newer_than,
        older_than_s=args.older_than,
        larger_than_bytes=args.larger_than,
        min_hits=args.min_hits,
    )


def _shape(text: str) -> str:
    if not re.fullmatch(r"(\d+|\*)(x(\d+|\*))*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: give extents, such as 8x64x56x56, or '8x*x*x*'")
    return text
