"""What a cache directory is, and whether it may be trusted and used.

A plan is code, so only what nobody else can have written is used: a directory or file of the effective user in which
nobody else may write; sealed ones may be root's too. Being root gets nobody past that.
"""

from __future__ import annotations

import functools
import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

NAME_ANOTHER = "name another directory (PLANCACHE_DIR or --cache-dir)"


class Mount(NamedTuple):
    """Where a file system is mounted, and its type: `/home`, `nfs4`."""

    point: str
    kind: str


@dataclass(frozen=True)
class Standing:
    """What a cache directory is good for.

    `exists`: there is a directory. `problem`: why nothing in there may be used, sealed files included, with the cure.
    `unwritable`: why nothing can or may be written there, a `problem` included; where it is set alone, sealed files
    may be used. `mount`: of the network file system it is on, or would be. One that does not exist is judged by the
    nearest folder above it; another user can still make it first, so look again once it is made.
    """

    exists: bool
    problem: str | None
    unwritable: str | None
    mount: Mount | None


def examine(directory: Path) -> Standing:
    """Judges a cache directory; changes nothing."""
    path = directory.absolute()
    try:
        status = path.stat()
    except FileNotFoundError:
        return _examine_missing(path)
    except OSError as error:
        return _refused(_unreachable(path, error))
    if not stat.S_ISDIR(status.st_mode):
        return _refused(_not_a_directory(path))
    problem = _distrust(path, status, sealed=True) or _unreadable(path, status)
    unwritable = problem or _foreign(path, status) or _unwritable(path, status)
    return Standing(True, problem, unwritable, network_mount(path))


def distrust(path: Path, *, sealed: bool = False) -> str | None:
    """Why the content of a file or directory may not be used, with the cure, or None; a link counts as what it names.

    `sealed`: root as owner is fine too.
    """
    try:
        status = path.stat()
    except OSError as error:
        return _unreachable(path.absolute(), error)
    return _distrust(path.absolute(), status, sealed=sealed)


def _examine_missing(path: Path) -> Standing:
    parent = path
    while not parent.exists():
        if parent.is_symlink():
            target = os.path.realpath(parent)
            return _refused(f"{parent} is a link to {target}, which does not exist; mkdir -p {target}, or {NAME_ANOTHER}")
        parent = parent.parent
    return Standing(False, None, _no_access(parent), network_mount(parent))


def _refused(problem: str) -> Standing:
    return Standing(False, problem, problem, None)


# ---- the rules, each a reason with its cure


def _distrust(path: Path, status: os.stat_result, *, sealed: bool) -> str | None:
    if not (sealed and status.st_uid == 0) and (reason := _foreign(path, status)):
        return reason
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):  # an access list that lets others write shows as the group's
        cure = NAME_ANOTHER if status.st_mode & stat.S_ISVTX else _chmod("go-w", path, status)  # /tmp is meant to be so
        return f"others may write in {path}, and a plan is code that runs on your GPU; {cure}"
    return None


def _foreign(path: Path, status: os.stat_result) -> str | None:
    owner, user = status.st_uid, os.geteuid()
    if owner == user:
        return None
    if owner == 0:
        cure = f"let root seal it (plancache seal), or {NAME_ANOTHER}"
    elif user == 0:
        cure = f"{NAME_ANOTHER}, or take it over: chown -R root {path} (and plancache seal, where others are to go on reading it)"
    else:
        cure = f"{NAME_ANOTHER}, or let root give it to you: chown -R {user_name(user)} {path}"
    return f"{path} belongs to {user_name(owner)}, not to {user_name(user)}, and a plan is code that runs on your GPU; {cure}"


def _unreadable(path: Path, status: os.stat_result) -> str | None:
    if _may(path, os.R_OK | os.X_OK):
        return None
    return f"{path} cannot be read; {_chmod('u+rx', path, status)}"


def _unwritable(path: Path, status: os.stat_result) -> str | None:
    if not status.st_mode & stat.S_IWUSR:  # root could write all the same, but somebody meant it
        return _not_writable(path, status)
    return _no_access(path)


def _no_access(folder: Path) -> str | None:
    """Why nothing can be made in a folder. Its mode alone says nothing: root's home is 0550 on some systems."""
    if _may(folder, os.W_OK | os.X_OK):
        return None
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return f"{folder} is on a read-only file system, so nothing can be stored; {NAME_ANOTHER}"
    return _not_writable(folder, folder.stat())


def _may(path: Path, access: int) -> bool:
    # access() as itself where it says the same: older container runtimes refuse the newer call, which asks for effective ids
    effective = (os.getuid(), os.getgid()) != (os.geteuid(), os.getegid())
    return os.access(path, access, effective_ids=effective)


def _not_writable(folder: Path, status: os.stat_result) -> str:
    return f"{folder} is not writable, so nothing can be stored; {_chmod('u+wx', folder, status)}"


def _chmod(change: str, path: Path, status: os.stat_result) -> str:
    return f"chmod {change} {path}, or {NAME_ANOTHER}" if status.st_uid == os.geteuid() else NAME_ANOTHER


def _unreachable(path: Path, error: OSError) -> str:
    if isinstance(error, NotADirectoryError):
        return _not_a_directory(next((folder for folder in path.parents if folder.is_file()), path))
    return f"{path} cannot be reached: {error.strerror}; {NAME_ANOTHER}"


def _not_a_directory(path: Path) -> str:
    return f"{path} is not a directory; remove it, or {NAME_ANOTHER}"


def user_name(user: int) -> str:
    """The name of a user id, `user 1234` where it has none."""
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"


# ---- network file systems

_LOCAL_MAGIC = frozenset(
    {
        0xEF53,  # ext2, ext3, ext4
        0x58465342,  # xfs
        0x9123683E,  # btrfs
        0x01021994,  # tmpfs
        0x794C7630,  # overlay: what is written goes to its upper layer, which cannot be nfs
        0x2FC12FC1,  # zfs
        0xF2F52010,  # f2fs
        0xCA451A4E,  # bcachefs
        0x858458F6,  # ramfs
    }
)
"""`f_type` of common local file systems (statfs(2), linux/magic.h): the mounts need not be read for them."""

_NETWORK_KINDS = frozenset(
    "nfs nfs4 cifs smb smb2 smb3 smbfs lustre gpfs ceph glusterfs beegfs fhgfs afs coda 9p virtiofs pvfs2 orangefs "
    "wekafs panfs juicefs dvs cvfs ocfs2 gfs2 vboxsf".split()
)

_LOCAL_FUSE = frozenset("fuse-overlayfs mergerfs unionfs bindfs ntfs ntfs-3g exfat gocryptfs encfs cryfs squashfuse lxcfs".split())


def is_network(kind: str) -> bool:
    """Whether a type of mount is a network's. An unknown kind of FUSE counts as one: that costs speed, the reverse plans."""
    if kind == "fuse" or kind.startswith("fuse."):
        return kind.removeprefix("fuse.") not in _LOCAL_FUSE
    return kind in _NETWORK_KINDS


def network_mount(directory: Path, *, mountinfo: str | None = None) -> Mount | None:
    """The mount of the network file system that a directory is on (or would be), or None.

    `mountinfo`: text in the form of /proc/self/mountinfo, in place of asking this machine.
    """
    if mountinfo is None:
        if _magic(directory.absolute()) in _LOCAL_MAGIC:
            return None
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text("utf-8", errors="surrogateescape")
        except OSError:  # no /proc, nothing is known
            return None
    mount = _mount_of(os.path.realpath(directory), mountinfo)
    return mount if mount and is_network(mount.kind) else None


def _magic(path: Path) -> int:
    """`f_type` of the file system that holds a path or the nearest folder above it."""
    import ctypes

    answer = bytearray(512)  # struct statfs takes 120 bytes, f_type comes first; an array type of ctypes' own costs 30 us
    f_type = ctypes.c_ulong.from_buffer(answer)
    while _statfs()(os.fsencode(path), ctypes.byref(f_type)) != 0 and path != path.parent:
        path = path.parent
    return f_type.value & 0xFFFFFFFF


@functools.cache
def _statfs() -> Any:
    """statfs(2). Taken from the interpreter, which has libc loaded, by a prototype that lets go of the GIL: a server may be away."""
    import ctypes

    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(("statfs", ctypes.pythonapi))


def _mount_of(path: str, mountinfo: str) -> Mount | None:
    """The mount that holds a path without links, found as the kernel walks: down from the root, from mount to mount.

    The longest mount point that fits may be hidden under a later mount, and the lines are in no useful order (proc(5)).
    """
    mounts = [_parse(line) for line in mountinfo.splitlines()]
    numbers = {number for number, _, _ in mounts}
    found, here = None, ""
    while True:
        on_the_way = [
            (mount, number)
            for number, parent, mount in mounts
            if here == (parent if parent in numbers and parent != number else "") and _holds(mount.point, path)
        ]
        if not on_the_way:
            return found
        found, here = min(on_the_way, key=lambda each: len(each[0].point))


def _parse(line: str) -> tuple[str, str, Mount]:
    """`36 35 98:0 /of/device /mount/point rw,noatime master:1 - ext3 /dev/root rw`: number, parent's number, mount."""
    place, _, file_system = line.partition(" - ")
    number, parent, _, _, point, *_ = place.split(" ")
    point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), point)  # a space is \040
    return number, parent, Mount(point, file_system.split(" ")[0])


def _holds(point: str, path: str) -> bool:
    return point in ("/", path) or path.startswith(f"{point}/")


# ---- locks


def locks_work(directory: Path) -> bool:
    """Whether kernel locks exclude one another in a directory, tried with a file that is gone afterwards."""
    import fcntl

    probe = directory / f".lock-probe-{os.urandom(8).hex()}"
    try:
        with open(probe, "x+b") as first, open(probe, "r+b") as second:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False
    except OSError:
        return False
    finally:
        with suppress(OSError):
            probe.unlink()


def local_lock_folder(directory: Path) -> Path | None:
    """A folder of this node for the locks of a cache directory, made with mode 0700; None where there is no safe one.

    Below XDG_RUNTIME_DIR where that is this user's, else below the folder for temporary files.
    """
    import hashlib

    digest = hashlib.sha256(os.fsencode(os.path.realpath(directory))).hexdigest()[:16]
    try:
        mine = _node_local() / f"plancache-{os.geteuid()}"
        folder = mine / digest
        if not (_made_private(mine) and _made_private(folder)):
            return None
    except OSError:
        return None
    return folder if network_mount(folder) is None else None


def _made_private(folder: Path) -> bool:
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or _distrust(folder, status, sealed=False):
        return False  # in /tmp somebody may have been faster, with a link too
    folder.chmod(0o700)  # whoever may read a lock file may lock it
    return True


def _node_local() -> Path:
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if runtime.is_absolute():
        standing = examine(runtime)
        if standing.exists and not standing.unwritable and not standing.mount:
            return runtime
    import tempfile

    return Path(tempfile.gettempdir())
