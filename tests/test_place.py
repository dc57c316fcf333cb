"""What a cache directory is: each rule of trust and use on real files, as root and as a user without rights."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plancache.settings import make_private
from plancache.store import place
from plancache.store.place import Mount, Standing, distrust, examine, local_lock_folder, locks_work, network_mount

NOBODY = 65534
FINE = Standing(exists=True, problem=None, unwritable=None, mount=None)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")
as_user = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")


def can_mount() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


may_mount = pytest.mark.skipif(not can_mount(), reason="needs root and a mount namespace of its own")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder of mode 0755 that every user can reach; pytest's own are this user's alone."""
    made = Path(tempfile.mkdtemp(prefix="plancache-test-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def made(directory: Path, mode: int = 0o700, owner: int | None = None) -> Path:
    directory.mkdir()
    if owner is not None:
        os.chown(directory, owner, owner)
    directory.chmod(mode)
    return directory


IMPORTS = """
import ctypes, json, os, pwd, sys
from pathlib import Path
from plancache.store import place
paths = [Path(argument) for argument in sys.argv[1:]]
"""  # ctypes and pwd first: nobody may be unable to read the interpreter's library


def by_nobody(expression: str, *paths: Path) -> Any:
    """What an expression of `place` and `paths` gives in a process of the user nobody."""
    drop = f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})"
    program = f"{IMPORTS}{drop}\nprint(json.dumps({expression}))"
    return in_a_process([sys.executable, "-W", "error", "-c", program, *map(str, paths)])


def in_a_process(command: list[str], **environment: str) -> Any:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


EXAMINE = "(lambda s: [s.exists, s.problem, s.unwritable])(place.examine(paths[0]))"


# ---- directories of one's own


def test_a_directory_that_only_its_owner_may_write_is_fine(tmp_path: Path) -> None:
    """0700 and 0755 are: others may read what is in there."""
    assert examine(made(tmp_path / "private")) == FINE
    assert examine(made(tmp_path / "readable", 0o755)) == FINE


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_directory_in_which_others_may_write_is_a_problem(tmp_path: Path, mode: int) -> None:
    """One bit for the group or for all is enough, the cure works, and then the directory is fine."""
    directory = made(tmp_path / "cache", mode)
    standing = examine(directory)
    assert standing.exists
    assert standing.problem is not None
    assert standing.unwritable == standing.problem
    assert f"chmod go-w {directory}, or name another directory" in standing.problem
    subprocess.run(["chmod", "go-w", directory], check=True)
    assert examine(directory) == FINE


def test_the_folder_for_temporary_files_is_no_cache_and_stays_as_it_is(tmp_path: Path) -> None:
    """Of a sticky folder nobody is told to take rights away: it is meant to be shared."""
    problem = examine(made(tmp_path / "tmp", 0o1777)).problem
    assert problem is not None
    assert "others may write" in problem
    assert "chmod" not in problem


def test_a_directory_without_its_owners_write_permission_is_not_written_by_root_either(tmp_path: Path) -> None:
    """Who took the permission away meant it; what is in there may still be used."""
    directory = made(tmp_path / "cache", 0o555)
    standing = examine(directory)
    assert (standing.exists, standing.problem) == (True, None)
    assert standing.unwritable is not None
    assert f"{directory} is not writable" in standing.unwritable
    subprocess.run(["chmod", "u+wx", directory], check=True)
    assert examine(directory) == FINE


@as_root
def test_an_owner_who_may_not_read_is_told(shared: Path) -> None:
    """Without read permission nothing in there is used."""
    directory = made(shared / "cache", 0o300, NOBODY)
    exists, problem, unwritable = by_nobody(EXAMINE, directory)
    assert exists
    assert f"{directory} cannot be read; chmod u+rx {directory}" in problem
    assert unwritable == problem


# ---- directories of others


@as_root
def test_root_refuses_the_directory_of_another_user(shared: Path) -> None:
    """Being root gets nobody past ownership, and each cure that is named is one."""
    directory = made(shared / "cache", 0o700, NOBODY)
    standing = examine(directory)
    assert standing.problem is not None
    assert standing.unwritable == standing.problem
    assert all(part in standing.problem for part in ("belongs to", "not to root", "name another directory", "plancache seal"))
    assert f"chown -R root {directory}" in standing.problem
    subprocess.run(["chown", "-R", "root", directory], check=True)
    assert examine(directory) == FINE


@as_root
def test_a_user_refuses_the_directory_of_another_user(shared: Path) -> None:
    """Readable for all is not enough: its owner may be anybody."""
    directory = made(shared / "cache", 0o755, NOBODY - 1)
    exists, problem, unwritable = by_nobody(EXAMINE, directory)
    assert exists
    assert f"{directory} belongs to user {NOBODY - 1}, not to" in problem
    assert "name another directory" in problem
    assert unwritable == problem


@as_root
def test_of_a_directory_of_roots_a_user_may_use_what_is_sealed_and_write_nothing(shared: Path) -> None:
    """`problem` is None, so that sealed files are read; `unwritable` says whose it is and the cure."""
    directory = made(shared / "cache", 0o755)
    exists, problem, unwritable = by_nobody(EXAMINE, directory)
    assert (exists, problem) == (True, None)
    assert "belongs to root" in unwritable
    assert "plancache seal" in unwritable


@as_root
def test_a_directory_of_roots_in_which_others_may_write_is_a_problem_for_all(shared: Path) -> None:
    """Root as its owner makes nothing sealed where others may replace it."""
    directory = made(shared / "cache", 0o777)
    _, problem, _ = by_nobody(EXAMINE, directory)
    assert f"others may write in {directory}" in problem
    assert "chmod" not in problem  # not nobody's to change


@as_root
def test_what_cannot_be_reached_is_a_problem(shared: Path) -> None:
    """Below a private folder of another user there is nothing to use."""
    made(made(shared / "private", 0o700) / "cache")
    exists, problem, unwritable = by_nobody(EXAMINE, shared / "private" / "cache")
    assert not exists
    assert "cannot be reached: Permission denied" in problem
    assert unwritable == problem


# ---- folders above


def test_a_folder_above_in_which_all_may_write_is_no_problem(tmp_path: Path) -> None:
    """A volume that a cluster mounts is such a folder; what others put in the directory's place would be theirs, and is refused."""
    above = made(tmp_path / "above")
    directory = made(above / "cache")
    above.chmod(0o777)
    assert examine(directory) == FINE
    assert examine(above / "new").problem is None


def test_a_link_is_judged_by_what_it_names(tmp_path: Path) -> None:
    """A link to a fine directory is fine, one to another's is not."""
    real = made(made(tmp_path / "real") / "cache")
    link = made(tmp_path / "links") / "cache"
    link.symlink_to(real)
    assert examine(link) == FINE
    assert examine(link / "new").problem is None
    real.chmod(0o770)
    assert examine(link).problem is not None


# ---- no directory, or none yet


def test_a_missing_directory_is_fine_where_it_can_be_made(tmp_path: Path) -> None:
    """It is judged by the folder above, whichever levels are missing, and is what was foretold once it is made."""
    directory = tmp_path / "missing" / "too" / "cache"
    assert examine(directory) == Standing(exists=False, problem=None, unwritable=None, mount=None)
    assert list(tmp_path.iterdir()) == []
    make_private(directory)
    assert examine(directory) == FINE


@as_root
def test_a_missing_directory_is_unwritable_where_the_folder_above_is(shared: Path) -> None:
    """A user cannot make it in a folder of root's, and is told which folder that is."""
    exists, problem, unwritable = by_nobody(EXAMINE, shared / "missing" / "cache")
    assert (exists, problem) == (False, None)
    assert f"{shared} is not writable, so nothing can be stored; name another directory" in unwritable


@as_user
def test_a_missing_directory_is_unwritable_in_a_read_only_folder_of_ones_own(tmp_path: Path) -> None:
    """The cure names the folder above."""
    folder = made(tmp_path / "folder", 0o500)
    standing = examine(folder / "cache")
    assert (standing.exists, standing.problem) == (False, None)
    assert standing.unwritable is not None
    assert f"chmod u+wx {folder}" in standing.unwritable


@as_root
def test_root_may_make_a_directory_in_a_home_without_write_permission(tmp_path: Path) -> None:
    """Root's home is 0550 on some systems: that says nothing about what root makes in there."""
    assert examine(made(tmp_path / "root", 0o550) / ".cache" / "plancache") == Standing(False, None, None, None)


@pytest.mark.parametrize("below", ["", "cache", "cache/below"])
def test_a_file_in_place_of_the_directory_or_above_it_is_named(tmp_path: Path, below: str) -> None:
    """Nothing exists there, nothing can be written, and the file to remove is named."""
    file = tmp_path / "file"
    file.write_text("in the way")
    standing = examine(file / below)
    assert not standing.exists
    assert standing.problem is not None
    assert standing.problem.startswith(f"{file} is not a directory; remove it")
    assert standing.unwritable == standing.problem


@pytest.mark.parametrize("below", ["", "cache/below"])
def test_a_link_to_nothing_is_named_with_its_target(tmp_path: Path, below: str) -> None:
    """A directory cannot be made there; the cure makes it one."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    problem = examine(link / below).problem
    assert problem is not None
    assert f"mkdir -p {tmp_path / 'gone'}" in problem
    made(tmp_path / "gone")
    assert examine(link / below).problem is None


@pytest.mark.parametrize("below", ["", "cache"])
def test_a_link_to_itself_is_a_problem(tmp_path: Path, below: str) -> None:
    """It is refused, and ends."""
    (tmp_path / "link").symlink_to(tmp_path / "link")
    problem = examine(tmp_path / "link" / below).problem
    assert problem is not None
    assert os.strerror(errno.ELOOP) in problem


def test_a_relative_directory_is_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cure can be used from anywhere."""
    made(tmp_path / "cache", 0o777)
    monkeypatch.chdir(tmp_path)
    assert f"chmod go-w {tmp_path / 'cache'}" in str(examine(Path("cache")).problem)
    assert f"chmod go-w {tmp_path / 'cache'}" in str(distrust(Path("cache")))


# ---- files


def test_a_file_of_ones_own_is_trusted_unless_others_may_write_it(tmp_path: Path) -> None:
    """Sealed or not, and the cure works."""
    file = tmp_path / "plans.sqlite3"
    file.write_bytes(b"")
    for sealed in (False, True):
        file.chmod(0o644)
        assert distrust(file, sealed=sealed) is None
        file.chmod(0o664)
        assert f"chmod go-w {file}" in str(distrust(file, sealed=sealed))


@as_root
@pytest.mark.parametrize(
    ("owner", "sealed", "trusted"),
    [(0, False, False), (0, True, True), (NOBODY - 1, True, False), (NOBODY, False, True), (NOBODY, True, True)],
)
def test_a_sealed_file_may_be_roots_or_ones_own_and_an_unsealed_one_ones_own_only(
    shared: Path, owner: int, sealed: bool, trusted: bool
) -> None:
    """Another user's file is never trusted, whatever its mode."""
    file = shared / "plans.sqlite3"
    file.write_bytes(b"")
    file.chmod(0o644)
    os.chown(file, owner, owner)
    reason = by_nobody(f"place.distrust(paths[0], sealed={sealed})", file)
    assert (reason is None) == trusted
    assert trusted or (str(file) in reason and "name another directory" in reason)


@as_root
def test_root_distrusts_another_users_sealed_file(shared: Path) -> None:
    """Sealing one's file does not make others run it."""
    file = shared / "plans.sqlite3"
    file.write_bytes(b"")
    os.chown(file, NOBODY, NOBODY)
    assert "belongs to" in str(distrust(file, sealed=True))


def test_a_file_that_is_not_there_is_a_reason(tmp_path: Path) -> None:
    """No exception: the reason says so."""
    assert os.strerror(errno.ENOENT) in str(distrust(tmp_path / "missing"))


# ---- mounts


def in_mounts_of_its_own(script: str, expression: str, *paths: Path) -> Any:
    """What an expression gives where a script has mounted something; nobody else sees the mounts, which go with the process."""
    shell = f'set -e; {script}\nexec "$PYTHON" -W error -c "$PROGRAM" "$@"'
    program = f"{IMPORTS}\nprint(json.dumps({expression}))"
    command = ["unshare", "--mount", "sh", "-c", shell, "sh", *map(str, paths)]
    return in_a_process(command, PYTHON=sys.executable, PROGRAM=program)


@may_mount
@pytest.mark.parametrize("below", ["", "cache"])
def test_a_read_only_mount_is_noticed_by_root_too(tmp_path: Path, below: str) -> None:
    """What is in there may be used; nothing can be written, and the reason is the mount."""
    script = (
        'mount -t tmpfs -o mode=700 none "$1"; mount -o remount,ro "$1"' if not below else 'mount -t tmpfs -o ro,mode=700 none "${1%/*}"'
    )
    exists, problem, unwritable = in_mounts_of_its_own(script, EXAMINE, tmp_path / below)
    assert (exists, problem) == (not below, None)
    assert f"{tmp_path} is on a read-only file system" in unwritable
    assert examine(tmp_path) == FINE


@may_mount
def test_the_mount_that_is_found_is_the_one_that_the_kernel_uses(tmp_path: Path) -> None:
    """Mounts inside mounts, twice on one place, with a space, and hidden by a later one above: as the kernel says of each folder."""
    script = """
        mount -t tmpfs none "$1"; mkdir "$2"; mount -t ramfs none "$2"; mount -t tmpfs none "$2"; mkdir "$3"
        mkdir "$5"; mount -t ramfs none "$5"; mount -t tmpfs none "$4"; mkdir "$5"
        mount -t ramfs none "$6"
    """
    one, two, three = (made(tmp_path / name) for name in ("one", "two", "three"))
    asked = [one, one / "in side", one / "in side" / "deep", two, two / "hidden", three, tmp_path, Path("/proc/sys"), Path("/")]
    number = 'open(f"/proc/self/fdinfo/{os.open(path, os.O_PATH)}").read().partition("mnt_id:")[2].split()[0]'
    numbers, mountinfo = in_mounts_of_its_own(script, f'[[{number} for path in paths], open("/proc/self/mountinfo").read()]', *asked)
    mounts = {number: mount for number, _, mount in map(place._parse, mountinfo.splitlines())}
    found = [place._mount_of(str(path), mountinfo) for path in asked]
    assert found == [mounts[number] for number in numbers]
    assert found[1] == found[2] == Mount(str(one / "in side"), "tmpfs")
    assert found[4] == Mount(str(two), "tmpfs")  # the longest mount point that fits is that of a hidden ramfs


MOUNTINFO = """\
30 27 0:40 / /home rw,relatime shared:5 master:1 - nfs4 server:/home rw,vers=4.2
27 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
31 30 0:41 / /home/me/local rw - tmpfs tmpfs rw
32 27 0:42 / /big\\040scratch rw - lustre scratch@tcp:/x rw
33 27 0:43 / /covered/deep rw - nfs server:/old rw
34 27 8:2 / /covered rw - xfs /dev/sdb1 rw
35 27 0:44 / /drive rw - fuse.sshfs me@server:/ rw
36 27 0:45 / /layers rw - fuse.fuse-overlayfs fuse-overlayfs rw
37 27 8:3 / /stick rw - fuseblk /dev/sdc1 rw
38 27 8:4 / /twice rw - ext4 /dev/sdd1 rw
39 38 0:46 / /twice rw - cifs //server/share rw
"""


@pytest.mark.parametrize(
    ("directory", "mount"),
    [
        ("/var/cache", None),
        ("/home", ("/home", "nfs4")),
        ("/home/me/.cache/plancache", ("/home", "nfs4")),
        ("/home/me/local/plancache", None),
        ("/homes/me", None),
        ("/big scratch/plancache", ("/big scratch", "lustre")),
        ("/covered/deep/plancache", None),
        ("/drive/plancache", ("/drive", "fuse.sshfs")),
        ("/layers/plancache", None),
        ("/stick/plancache", None),
        ("/twice/plancache", ("/twice", "cifs")),
    ],
)
def test_a_network_file_system_is_told_by_the_mount_that_holds_the_directory(directory: str, mount: tuple[str, str] | None) -> None:
    """The mount is found in the text of mountinfo, in any order, nested, covered and doubled."""
    assert network_mount(Path(directory), mountinfo=MOUNTINFO) == mount


@pytest.mark.parametrize("kind", "nfs nfs4 cifs smb3 lustre gpfs ceph beegfs afs 9p virtiofs wekafs glusterfs fuse fuse.gcsfuse".split())
def test_kinds_of_network_file_systems(kind: str) -> None:
    """The ones that people keep their homes and data on, and every FUSE that is not known to be local."""
    text = f"27 1 8:1 / / rw - ext4 /dev/sda1 rw\n30 27 0:40 / /data rw - {kind} somewhere rw\n"
    assert network_mount(Path("/data/plancache"), mountinfo=text) == Mount("/data", kind)


@pytest.mark.parametrize("kind", "ext4 xfs btrfs zfs tmpfs overlay fuseblk fuse.mergerfs fuse.fuse-overlayfs f2fs nfsd".split())
def test_kinds_of_local_file_systems(kind: str) -> None:
    """Those of disks, memory, containers and layers over local folders."""
    assert network_mount(Path("/data"), mountinfo=f"27 1 0:1 / / rw - {kind} somewhere rw\n") is None


def test_a_directory_in_a_root_that_is_no_mount_has_none() -> None:
    """After chroot(2) the mount of / may be missing from the list."""
    text = "30 27 0:40 / /data rw - nfs server:/data rw\n"
    assert network_mount(Path("/cache"), mountinfo=text) is None
    assert network_mount(Path("/data/cache"), mountinfo=text) == Mount("/data", "nfs")


def test_a_link_counts_as_the_place_that_it_leads_to(tmp_path: Path) -> None:
    """A link on a local disk to a folder of the network is on the network."""
    (tmp_path / "link").symlink_to(made(tmp_path / "far"))
    text = f"27 1 8:1 / / rw - ext4 /dev/sda1 rw\n30 27 0:40 / {tmp_path / 'far'} rw - nfs4 server:/ rw\n"
    assert network_mount(tmp_path / "link" / "cache", mountinfo=text) == Mount(str(tmp_path / "far"), "nfs4")
    assert network_mount(tmp_path / "near", mountinfo=text) is None


def test_the_mounts_are_read_for_unknown_file_systems_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A usual local file system is known by its number, for a directory and one not made yet; /proc is not, and is no network."""
    read: list[Path] = []
    monkeypatch.setattr(Path, "read_text", lambda path, *_, **__: (read.append(path), MOUNTINFO)[1])
    if place._magic(tmp_path) in place._LOCAL_MAGIC:
        assert network_mount(tmp_path) is None
        assert network_mount(tmp_path / "missing" / "cache") is None
        assert read == []
    assert network_mount(Path("/proc/self")) is None
    assert read == [Path("/proc/self/mountinfo")]


def test_examine_reports_the_network_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a fact beside the others, for a directory that is there and one that will be: the cache decides what follows."""
    monkeypatch.setattr(place, "_magic", lambda _: 0x6969)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "27 1 0:1 / / rw - nfs4 server:/ rw\n")
    mount = Mount("/", "nfs4")
    assert examine(tmp_path) == Standing(exists=True, problem=None, unwritable=None, mount=mount)
    assert examine(tmp_path / "missing") == Standing(exists=False, problem=None, unwritable=None, mount=mount)


# ---- locks


def test_locks_work_in_a_local_directory_and_nothing_is_left(tmp_path: Path) -> None:
    """The kernel's own locks pass the trial."""
    assert locks_work(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", ["none excluded", "refused"])
def test_locks_that_do_not_exclude_or_are_refused_do_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Both kinds of network file systems: those that say yes to all, and those that have no locks."""

    def flock(*_: object) -> None:
        if fault == "refused":
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert not locks_work(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_locks_do_not_work_where_nothing_can_be_made(tmp_path: Path) -> None:
    """A missing directory and a file are a no, not an error."""
    (tmp_path / "file").write_text("")
    assert not locks_work(tmp_path / "missing")
    assert not locks_work(tmp_path / "file")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /tmp, and no XDG_RUNTIME_DIR."""
    folder = made(tmp_path / "tmp", 0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return folder


def lock_folder(directory: Path) -> Path:
    folder = local_lock_folder(directory)
    assert folder is not None
    return folder


def test_locks_lie_below_the_runtime_folder_where_it_is_ones_own(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is missing, relative or open to others gives way to the folder for temporary files."""
    runtime = made(tmp_path / "runtime")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    mine = f"plancache-{os.geteuid()}"
    assert lock_folder(tmp_path / "cache").parent == runtime / mine
    runtime.chmod(0o777)
    assert lock_folder(tmp_path / "cache").parent == temporary / mine
    for unusable in (str(tmp_path / "missing"), "runtime", ""):
        monkeypatch.setenv("XDG_RUNTIME_DIR", unusable)
        assert lock_folder(tmp_path / "cache").parent == temporary / mine


@pytest.mark.usefixtures("temporary")
def test_a_directory_has_one_private_lock_folder_by_any_name(tmp_path: Path) -> None:
    """A link to a directory shares its locks, before and after it is made; another directory has others."""
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    folder = lock_folder(tmp_path / "cache")
    assert {stat.S_IMODE(each.stat().st_mode) for each in (folder, folder.parent)} == {0o700}
    made(tmp_path / "cache")
    assert local_lock_folder(tmp_path / "link") == local_lock_folder(tmp_path / "cache") == folder
    assert local_lock_folder(tmp_path / "other") != folder
    assert locks_work(folder)


def test_a_lock_folder_that_others_may_read_is_made_private(tmp_path: Path, temporary: Path) -> None:
    """Who may read a lock file may hold its lock."""
    made(temporary / f"plancache-{os.geteuid()}", 0o755)
    folder = lock_folder(tmp_path / "cache")
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("obstacle", ["link", "file", "writable"])
def test_something_else_in_place_of_the_lock_folder_is_refused(tmp_path: Path, temporary: Path, obstacle: str) -> None:
    """A link, even to a folder of one's own, a file, and a folder in which others may write."""
    first = temporary / f"plancache-{os.geteuid()}"
    if obstacle == "link":
        first.symlink_to(made(tmp_path / "own"))
    elif obstacle == "file":
        first.write_text("")
    else:
        made(first, 0o777)
    assert local_lock_folder(tmp_path / "cache") is None
    assert obstacle != "link" or list((tmp_path / "own").iterdir()) == []


@as_root
def test_a_lock_folder_that_another_user_made_first_is_refused(tmp_path: Path, temporary: Path) -> None:
    """In /tmp anybody can: its owner could take the locks away."""
    made(temporary / "plancache-0", 0o755, NOBODY)
    assert local_lock_folder(tmp_path / "cache") is None
    shutil.rmtree(temporary / "plancache-0")
    assert local_lock_folder(tmp_path / "cache") is not None


def test_a_lock_folder_on_the_network_is_refused(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node-local folder is one of this node."""
    monkeypatch.setattr(place, "network_mount", lambda _: Mount(str(temporary), "nfs4"))
    assert local_lock_folder(tmp_path / "cache") is None
