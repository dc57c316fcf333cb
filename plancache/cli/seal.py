"""`plancache seal`: makes the database a read-only file that can be carried, and back."""

from __future__ import annotations

import argparse

from plancache.cli.command import Command, print_json, settings_of
from plancache.cli.tables import count, size


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--undo", action="store_true", help="make it a database again, in which plans are stored")


def _run(args: argparse.Namespace) -> int:
    from plancache.store.sealed import is_sealed, seal, unseal

    settings = settings_of(args)
    path = settings.database
    was_sealed = is_sealed(path)
    entries = None
    if args.undo:
        unseal(path, lock_timeout_s=settings.lock_timeout_s)
    else:
        entries = seal(path, lock_timeout_s=settings.lock_timeout_s)
    size_bytes = path.stat().st_size
    if args.json:
        changed = was_sealed is args.undo
        print_json({"path": str(path), "sealed": not args.undo, "changed": changed, "entries": entries, "size_bytes": size_bytes})
    elif entries is None:
        print(f"unsealed {path}: plans are stored there again" if was_sealed else f"{path} is not sealed, nothing to undo")
    else:
        print(f"{'already sealed' if was_sealed else 'sealed'}: {count(entries, 'plan')}, {size(size_bytes)}, in {path}")
        print(f"\nas a file that you copy: PLANCACHE_BUNDLES={path}")
        print(f"as a directory, read-only mounts and images included: PLANCACHE_DIR={settings.directory}")
        print("new plans are not stored there; to go on storing them: plancache seal --undo")
    return 0


COMMAND = Command(
    "seal",
    "make the database a read-only file, to be carried in images, mounts and bundles",
    "Stop the programs that use it first. What is sealed needs no lock and no writable place, and is never written again: "
    "another file takes its place. Needs neither a GPU nor cuDNN.",
    "plancache seal\nplancache seal --undo",
    _configure,
    _run,
)
