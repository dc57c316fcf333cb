"""The doctor's look at the cache directory and at environment variables."""

from __future__ import annotations

import difflib
import os
import stat
from collections import Counter
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from plancache.cli import usability
from plancache.cli.command import source_of
from plancache.cli.report import Report
from plancache.cli.tables import count, size
from plancache.environment import result_changing_variables
from plancache.errors import DamagedStoreError, StoreError
from plancache.settings import VARIABLES as SETTINGS
from plancache.settings import Settings
from plancache.store.place import NAME_ANOTHER, Standing, distrust, examine, user_name

if TYPE_CHECKING:
    from plancache.store.database import Database


def look_at_store(report: Report, settings: Settings) -> None:
    directory = settings.directory
    report.section("store")
    report.fact("directory", str(directory), f"{directory} ({source_of(settings, 'directory')})")
    if settings.mode != "readwrite":
        report.fact("mode", settings.mode, f"{settings.mode} ({source_of(settings, 'mode')}): nothing is stored")
    standing = examine(directory)
    _look_at_standing(report, settings, standing)
    if standing.exists and standing.problem is None:
        _look_at_database(report, settings)
    for bundle in settings.bundles:
        _look_at_sealed(report, f"bundle {bundle.name}", bundle)
    mount = standing.mount
    report.fact("network_file_system", mount and mount.kind, f"{mount.kind}, mounted at {mount.point}" if mount else "no")
    if mount:
        report.warning(
            f"{directory} is on a network file system ({mount.kind}), where SQLite is slow and its locks are not to be trusted; "
            f"{NAME_ANOTHER}, on a local disk"
        )


def _look_at_standing(report: Report, settings: Settings, standing: Standing) -> None:
    if standing.exists:
        status = settings.directory.stat()
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        report.fact("owner", user_name(status.st_uid))
        report.fact("permissions", mode, f"{mode} ({stat.filemode(status.st_mode)})")
    elif standing.problem is None:
        report.fact("exists", False, "not yet: the first plan that is kept makes it")
    report.fact("writable", standing.unwritable is None, "no" if standing.unwritable else "yes")
    if standing.problem is not None:
        report.problem(standing.problem)
    elif standing.unwritable is not None and settings.mode == "readwrite":
        report.problem(standing.unwritable)


def _look_at_database(report: Report, settings: Settings) -> None:
    from plancache.store.database import Database
    from plancache.store.sealed import is_sealed

    file = settings.database
    bytes_used = sum(file.stat().st_size for file in settings.directory.glob(f"{file.name}*"))
    report.fact("database", str(file) if bytes_used else None, file.name if bytes_used else "none yet")
    report.fact("bytes", bytes_used, size(bytes_used))
    if is_sealed(file):
        _look_at_sealed(report, "sealed", file)
        if settings.mode == "readwrite":
            report.note(f"{file} is sealed: what is built stays in memory; to store there: plancache seal --undo")
        return
    database = Database(file, lock_timeout_s=settings.lock_timeout_s)
    try:
        problem = distrust(file) if file.exists() else None
        if problem is not None:
            report.problem(problem)
            return
        revision = database.revision()
        report.fact("revision", revision, revision or "none")
        report.fact("entries", sum(1 for _ in database.listing()))
        _look_beside(report, database)
    except DamagedStoreError as error:
        report.problem(f"the database cannot be read: {error}; move it away, and plans are built anew: mv {file} /tmp/")
    except StoreError as error:
        report.problem(f"the database cannot be read: {error}")
    finally:
        database.close()


def _look_beside(report: Report, database: Database) -> None:
    verdicts = Counter(verdict.kind for verdict in database.verdicts())
    told = ", ".join(f"{number} {kind}" for kind, number in verdicts.items())
    report.fact("verdicts", dict(verdicts), f"{told} ('plancache ls --verdicts' says why)" if told else "none")
    damaged_bytes = database.aside_bytes()
    if damaged_bytes is not None:
        wish = f"once nobody wants to look at it: rm {database.path}.damaged*"
        report.note(f"a damaged database was put aside, {size(damaged_bytes)}; {wish}")


def _look_at_sealed(report: Report, name: str, file: Path) -> None:
    """Opens it as look-ups do: what they refuse is a problem."""
    from plancache.carrying import Judge
    from plancache.store.sealed import SealedFile
    from plancache.target import Targets

    try:
        with closing(SealedFile(file)) as sealed, closing(Targets(None, lambda *_: None)) as targets:
            found = Judge(targets)(sealed.listing())
    except StoreError as error:
        report.fact(name, {"path": str(file), "entries": None}, f"{file}, cannot be used")
        report.problem(f"{name}: {error}")
    else:
        report.fact(name, {"path": str(file), "entries": found.entries}, f"{count(found.entries, 'plan')}, {file}")
        report.fact(f"{name}: usable", asdict(found), usability.in_short(found))


def look_at_variables(report: Report, settings_error: Exception | None) -> None:
    report.section("environment")
    changing = result_changing_variables()
    for name, value in changing.items():
        report.fact(name, value, f"{value}  (part of every key: it can change what cuDNN computes)")
    if changing:
        report.note(
            f"{', '.join(changing)}: plans built with other values are not found; set the same where plans are built and where they run"
        )
    known = {variable for variable, _ in SETTINGS.values()}
    for name in sorted(os.environ):
        if name.startswith("PLANCACHE_"):
            report.fact(name, os.environ[name])
            if name not in known:
                report.problem(f"{name} is not a variable that plancache reads: {_cure(name, known)}")
    if settings_error is not None:
        report.problem(str(settings_error))


def _cure(name: str, known: set[str]) -> str:
    """What was meant; compared without the part that all names share."""
    near = difflib.get_close_matches(name.partition("_")[2], [variable.partition("_")[2] for variable in known], 1)
    return f"did you mean PLANCACHE_{near[0]}?" if near else f"unset it, or use one of {', '.join(sorted(known))}"
