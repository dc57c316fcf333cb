"""The doctor's look at the cache directory and at environment variables."""

from __future__ import annotations

import difflib
import os
import pwd
import re
import stat
from pathlib import Path

from plancache.cli.command import source_of
from plancache.cli.report import Report
from plancache.cli.tables import size
from plancache.environment import result_changing_variables
from plancache.errors import StoreError
from plancache.settings import VARIABLES as SETTINGS
from plancache.settings import Settings

_NETWORK = re.compile(
    r"(fuse\.)?(nfs4?|cifs|smb3?|smbfs|lustre|gpfs|ceph|glusterfs|beegfs|sshfs|afs|9p|pvfs2|orangefs|weka\w*|panfs|juicefs)"
)


def look_at_store(report: Report, settings: Settings) -> None:
    directory = settings.directory
    report.section("store")
    report.fact("directory", str(directory), f"{directory} ({source_of(settings, 'directory')})")
    if settings.mode != "readwrite":
        report.fact("mode", settings.mode, f"{settings.mode} ({source_of(settings, 'mode')}): nothing is stored")
    if directory.is_dir():
        _look_at_directory(report, settings)
        _look_at_database(report, settings)
    elif directory.exists():
        report.problem(f"{directory} is not a directory; remove it, or name another directory ({_NAME_ONE})")
    else:
        _look_at_parent(report, settings)
    kind = network_file_system(directory, Path("/proc/mounts").read_text())
    report.fact("network_file_system", kind, kind or "no")
    if kind:
        report.warning(
            f"{directory} is on a network file system ({kind}), where SQLite is slow and its locks are not to be trusted; "
            f"name a local directory ({_NAME_ONE})"
        )


_NAME_ONE = "PLANCACHE_DIR or --cache-dir"


def _look_at_directory(report: Report, settings: Settings) -> None:
    directory, status = settings.directory, settings.directory.stat()
    owner, mode = _user(status.st_uid), stat.S_IMODE(status.st_mode)
    report.fact("owner", owner)
    report.fact("permissions", f"{mode:04o}", f"{mode:04o} ({stat.filemode(status.st_mode)})")
    if status.st_uid != os.geteuid():
        report.problem(f"{directory} belongs to {owner}, not to {_user(os.geteuid())}; name a directory of your own ({_NAME_ONE})")
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        report.problem(f"others may write in {directory}, and a plan is code that runs on your GPU; chmod go-w {directory}")
    _look_at_access(report, settings, directory)


def _look_at_parent(report: Report, settings: Settings) -> None:
    report.fact("exists", False, "not yet: the first plan that is kept makes it")
    parent = next(parent for parent in settings.directory.parents if parent.exists())
    _look_at_access(report, settings, parent)


def _look_at_access(report: Report, settings: Settings, folder: Path) -> None:
    writable = os.access(folder, os.W_OK | os.X_OK)
    report.fact("writable", writable, "yes" if writable else "no")
    if not writable and settings.mode == "readwrite":
        report.problem(f"{folder} is not writable, so nothing can be stored; name another directory ({_NAME_ONE}), or chmod u+w {folder}")


def _look_at_database(report: Report, settings: Settings) -> None:
    from plancache.store.database import HEAD, Database

    database = Database(settings.database, lock_timeout_s=settings.lock_timeout_s)
    try:
        revision, entries = database.revision(), sum(1 for _ in database.listing())
    except StoreError as error:
        report.problem(f"the database cannot be read: {error}; move it away, and plans are built anew: mv {settings.database} /tmp/")
        return
    finally:
        database.close()
    bytes_used = sum(file.stat().st_size for file in settings.directory.glob(f"{settings.database.name}*"))
    report.fact("database", str(settings.database) if bytes_used else None, settings.database.name if bytes_used else "none yet")
    report.fact("revision", revision, revision or "none")
    report.fact("entries", entries)
    report.fact("bytes", bytes_used, size(bytes_used))
    if revision not in (None, HEAD):
        report.problem(
            f"the database has revision {revision}, this version reads {HEAD}; use the plancache that made it, or another directory"
        )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def network_file_system(directory: Path, mounts: str) -> str | None:
    """The type of the network file system that holds a directory, or None; `mounts` is the text of /proc/mounts."""
    real, best, found = directory.resolve(), -1, ""
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split(" ")
        point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), point)  # fstab(5): a space is \040
        if real.is_relative_to(point) and len(point) >= best:  # of two at one place the later one is on top
            best, found = len(point), kind
    return found if _NETWORK.fullmatch(found) else None


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
