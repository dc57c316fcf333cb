"""`plancache upgrade`: brings the database to this version's schema."""

from __future__ import annotations

import argparse

from plancache.cli.command import Command, print_json, refuse_unusable, settings_to_change, source_of


def _configure(parser: argparse.ArgumentParser) -> None:
    pass


def _run(args: argparse.Namespace) -> int:
    from plancache.cache import PlanCache
    from plancache.store.connection import HEAD, number

    settings = settings_to_change(args)
    with PlanCache(settings=settings) as cache:
        refuse_unusable(cache)
        revisions = cache.upgrade()
    before, after = revisions or (None, None)
    if args.json:
        print_json({"path": str(settings.database), "from": before, "to": after, "changed": before != after})
    elif before is None or after is None:
        where = f"{settings.directory} ({source_of(settings, 'directory')})"
        print(f"nothing to upgrade: there is no database in {where}; the first plan that is kept makes one")
    elif before != after:
        print(f"upgraded {settings.database} from {before} to {after}")
    elif number(after) > number(HEAD):
        print(f"nothing to upgrade: a newer plancache made {settings.database} ({after}); this one ({HEAD}) can use it as it is")
    else:
        print(f"nothing to upgrade: {settings.database} is at {after}, this version's")
    return 0


COMMAND = Command(
    "upgrade",
    "bring the database to this version's schema",
    "The first program that stores a plan does so too; plans and counts stay. Versions that can share a file go on doing so.",
    "plancache upgrade",
    _configure,
    _run,
)
