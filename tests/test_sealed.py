"""Sealed files: what is refused, what a crash leaves, who may read them, and that sealing and its undo lose nothing."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from samples import make_entry

from plancache.cli.seal import COMMAND
from plancache.entry import MAX_BLOB_BYTES, Entry, pack
from plancache.errors import SealedError, StoreError
from plancache.key import COMPONENTS, PlanKey
from plancache.store import sealed as module
from plancache.store.connection import SEALED_ID
from plancache.store.database import Database, Listed
from plancache.store.sealed import SealedFile, is_sealed, seal, unseal
from plancache.store.tags import Tagged

NUMBERS = range(5)
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become, or give files to, another user")


def numbered(number: int, **changes: Any) -> Entry:
    return make_entry(key=PlanKey((b"%d" % number, *[b""] * (len(COMPONENTS) - 1))), created_at=float(number), **changes)


KEYS = [numbered(number).key.digest for number in NUMBERS]


@pytest.fixture
def path(cache_dir: Path) -> Path:
    """A database with five entries, closed."""
    place = cache_dir / "cache" / "plans-1.sqlite3"
    with closing(Database(place, lock_timeout_s=20)) as database:
        for number in NUMBERS:
            database.put(numbered(number, blob=b"%d" % number * 3000))
        database.count_uses({KEYS[0]: 3}, 7.0, "serve")
    return place


@pytest.fixture
def sealed(path: Path) -> Path:
    seal(path, lock_timeout_s=20)
    return path


def run(path: Path, *statements: str) -> Any:
    """Runs statements, as whoever may write there; returns the last one's first value."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            row = connection.execute(statement).fetchone()
    return row and row[0]


def listed(path: Path) -> list[Listed]:
    store: Any = SealedFile(path) if is_sealed(path) else Database(path, lock_timeout_s=20)
    with closing(store):
        return list(store.listing())


def keys(path: Path) -> list[bytes]:
    return [row.key for row in listed(path)]


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()} - {"write.lock"}


def python(script: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.Popen(command, env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)


# ---- there and back -------------------------------------------------------------------------------------------------


def test_a_sealed_file_has_every_row_and_says_what_it_is(path: Path) -> None:
    """Rows, sizes and counts are the database's; the form is a rollback journal's, read-only, with nothing beside it."""
    before = listed(path)
    assert seal(path, lock_timeout_s=20) == 5
    header = path.read_bytes()[:100]
    assert (header[18:20], header[68:72]) == (b"\1\1", b"PlCs")
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    assert names(path.parent) == {path.name}
    assert is_sealed(path)
    with closing(SealedFile(path)) as file:
        assert list(file.listing()) == before
        assert file.tags() == [Tagged(KEYS[0], "serve", 3, 7.0)]
        assert [file.get(key) for key in KEYS] == [pack(numbered(number, blob=b"%d" % number * 3000)) for number in NUMBERS]
        assert file.get(b"another") is None
    assert names(path.parent) == {path.name}


def test_unsealing_is_the_undo(sealed: Path) -> None:
    """The rows are there, it is a private WAL file that gives space back, and it takes writes."""
    before = listed(sealed)
    unseal(sealed, lock_timeout_s=20)
    assert not is_sealed(sealed)
    assert listed(sealed) == before
    assert stat.S_IMODE(sealed.stat().st_mode) == 0o600
    assert [run(sealed, f"PRAGMA {name}") for name in ("journal_mode", "auto_vacuum", "application_id")] == ["wal", 2, 0]
    with closing(Database(sealed, lock_timeout_s=20)) as database:
        assert database.put(numbered(9))
    assert keys(sealed) == [*KEYS, numbered(9).key.digest]
    assert names(sealed.parent) == {sealed.name}


def test_a_file_that_another_tool_made_gives_space_back_once_unsealed(path: Path) -> None:
    """Also where the source never had auto_vacuum, which cannot be set later without a VACUUM."""
    run(path, "PRAGMA journal_mode = DELETE", "PRAGMA auto_vacuum = NONE", "VACUUM", f"PRAGMA application_id = {SEALED_ID}")
    assert run(path, "PRAGMA auto_vacuum") == 0
    unseal(path, lock_timeout_s=20)
    assert run(path, "PRAGMA auto_vacuum") == 2
    assert keys(path) == KEYS


@pytest.mark.parametrize("undo", [False, True])
def test_what_is_already_as_asked_stays_byte_for_byte(path: Path, undo: bool) -> None:
    """Sealing a sealed file counts, unsealing an unsealed one does nothing; neither makes a lock."""
    if not undo:
        seal(path, lock_timeout_s=20)
    path.with_name("write.lock").unlink(missing_ok=True)
    before, inode = path.read_bytes(), path.stat().st_ino
    assert (unseal if undo else seal)(path, lock_timeout_s=20) == (None if undo else 5)
    assert (path.read_bytes(), path.stat().st_ino) == (before, inode)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("work", [seal, unseal])
def test_nothing_is_made_where_there_is_no_file(cache_dir: Path, work: Callable[..., Any]) -> None:
    """There is nothing to seal: an error with the cure, and no folder, file or lock."""
    with pytest.raises(SealedError, match=r"there is no database; .*plancache warm"):
        work(cache_dir / "folder" / "plans.sqlite3", lock_timeout_s=1)
    assert list(cache_dir.iterdir()) == []


def test_a_link_stays_a_link(sealed: Path, cache_dir: Path) -> None:
    """What the link names is sealed and read; the journals beside that file count."""
    link = cache_dir / "link.sqlite3"
    link.symlink_to(sealed)
    assert (is_sealed(link), keys(link), seal(link, lock_timeout_s=1)) == (True, KEYS, 5)
    unseal(link, lock_timeout_s=20)
    assert seal(link, lock_timeout_s=20) == 5
    assert link.is_symlink()
    Path(f"{sealed}-wal").touch()
    assert not is_sealed(link)
    with pytest.raises(SealedError, match="-wal lies beside it"):
        SealedFile(link)


def test_rows_that_a_killed_process_left_in_its_journal_are_sealed_too(path: Path) -> None:
    """The WAL of a process that was killed is taken in, and its files do not stay beside the sealed one."""
    writer = python(
        """
        import sys
        from pathlib import Path
        from test_sealed import Database, numbered
        database = Database(Path(sys.argv[1]), lock_timeout_s=20)
        database.get(b"")
        database.put(numbered(7))
        print("stored", flush=True)
        sys.stdin.read()
        """,
        path,
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "stored\n"
    writer.kill()
    writer.communicate()
    assert {f"{path.name}-wal", f"{path.name}-shm"} <= names(path.parent)
    assert seal(path, lock_timeout_s=20) == 6
    assert keys(path) == [*KEYS, numbered(7).key.digest]
    assert names(path.parent) == {path.name}


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_is_sealed_answers_for_anything(path: Path, cache_dir: Path) -> None:
    """False for no file, another file, a database; a pipe does not make it wait."""
    (cache_dir / "text").write_text("PlCs" * 100)
    os.mkfifo(cache_dir / "pipe")
    for other in (path, cache_dir / "none", cache_dir / "text" / "below", cache_dir / "text"):
        assert not is_sealed(other)
    assert not is_sealed(cache_dir / "pipe")


def refused(work: Callable[[Path], Any]) -> Callable[[Path], None]:
    def attempt(path: Path) -> None:
        with pytest.raises(SealedError):
            work(path)

    return attempt


@pytest.mark.parametrize(
    "look",
    [is_sealed, refused(SealedFile), refused(lambda path: seal(path, lock_timeout_s=0)), lambda path: unseal(path, lock_timeout_s=0)],
    ids=["is_sealed", "SealedFile", "seal", "unseal"],
)
def test_looking_at_a_database_leaves_the_locks_of_its_connections_alone(path: Path, look: Callable[[Path], Any]) -> None:
    """Closing any descriptor of a file drops a process's locks on it: then the next to leave would delete the WAL in use."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("SELECT count(*) FROM entries").fetchone()
        look(path)
        other = python("import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('DELETE FROM uses'); c.commit(); c.close()", path)
        other.communicate(timeout=60)
        assert other.returncode == 0
        assert Path(f"{path}-wal").exists()


def edit(*statements: str) -> Callable[[Path], None]:
    return lambda path: run(path, *statements)


def replaced(**columns: str | None) -> Callable[[Path], None]:
    """The table of entries made anew, with columns that are declared otherwise, or not at all."""
    declared = {"key": "BLOB PRIMARY KEY", **dict.fromkeys(("preimage", "facts", "payload", "checksum", "created_at"), "BLOB"), **columns}
    text = ", ".join(f"{name} {kind}" for name, kind in declared.items() if kind is not None)
    return edit("DROP TABLE entries", f"CREATE TABLE entries ({text})")


def lying(path: Path) -> None:
    """A view whose row in sqlite_master says that it is a table, at a page that is one's."""
    columns = ", ".join(f"x'00' AS {name}" for name in ("key", "preimage", "facts", "payload", "checksum", "created_at"))
    root = run(path, "SELECT rootpage FROM sqlite_master WHERE name = 'uses'")
    run(
        path,
        "DROP TABLE entries",
        f"CREATE VIEW entries AS SELECT {columns}",
        "PRAGMA writable_schema = ON",
        f"UPDATE sqlite_master SET type = 'table', rootpage = {root} WHERE name = 'entries'",
    )


def write(offset: int, data: bytes) -> Callable[[Path], None]:
    def overwrite(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(data)

    return overwrite


def garbled(path: Path) -> None:
    """SQLite's message quotes what stands in the schema, and that is no text."""
    path.write_bytes(path.read_bytes().replace(b"PRIMARY KEY", b"PRIMARY \xf6EY"))


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "gone": (Path.unlink, "no such file; name one"),
    "a WAL": (lambda path: Path(f"{path}-wal").touch(), "-wal lies beside it.*; stop that program, then seal it"),
    "a journal": (lambda path: Path(f"{path}-journal").touch(), "-journal lies beside it.*; stop that program, then seal it"),
    "an index of a WAL": (lambda path: Path(f"{path}-shm").touch(), "-shm lies beside it.*; stop that program, then seal it"),
    "a WAL's form": (edit("PRAGMA journal_mode = WAL"), "it is not sealed; seal it where it can be written: plancache seal --cache-dir /"),
    "not marked": (edit("PRAGMA application_id = 0"), "it is not sealed; seal it where it can be written: plancache seal --cache-dir /"),
    "group may write": (lambda path: path.chmod(0o464), "others may write in .*plans-1.sqlite3, .*; chmod go-w"),
    "others may write": (lambda path: path.chmod(0o446), "others may write in .*plans-1.sqlite3, .*; chmod go-w"),
    "others may write the folder": (lambda path: path.parent.chmod(0o777), "others may .*; chmod"),
    "group may write the folder": (lambda path: path.parent.chmod(0o770), "others may write in .*/cache, .*; chmod go-w"),
    "a folder": (lambda path: (path.unlink(), path.mkdir(mode=0o700)), "cannot be read .*; "),
    "text": (lambda path: path.write_text("not a database " * 100), "no SQLite database; copy it here again"),
    "empty": (lambda path: path.write_bytes(b""), "no SQLite database; copy it here again"),
    "half a header": (lambda path: os.truncate(path, 50), "no SQLite database; copy it here again"),
    "truncated": (lambda path: os.truncate(path, path.stat().st_size - 1), r"truncated: \d+ bytes of \d+; copy it here again"),
    "broken tables": (write(100, b"\xff" * 3000), "cannot be read .*; copy it here again"),
    "garbled tables": (garbled, "malformed .*near .*EY.*; copy it here again"),
    "no entries": (edit("DROP TABLE entries"), "no table of entries that this version reads; seal or export it with this"),
    "a view": (edit("ALTER TABLE entries RENAME TO e", "CREATE VIEW entries AS SELECT * FROM e"), "no table of entries"),
    "a view that lies": (lying, "malformed|no table of entries"),  # newer versions of SQLite see it themselves
    "a virtual table": (
        edit("DROP TABLE entries", "CREATE VIRTUAL TABLE entries USING fts5(key, preimage, facts, payload, checksum, created_at)"),
        "no table of entries",
    ),
    "no checksum": (replaced(checksum=None), "no table of entries"),
    "a computed payload": (replaced(payload="BLOB AS (zeroblob(1000))"), "no table of entries"),
    "no index": (replaced(key="BLOB"), "no table of entries"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_trustworthy_sealed_file_is_refused_with_the_cure(sealed: Path, kind: str) -> None:
    """An error that names file, reason and cure; opening leaves nothing behind."""
    change, message = REFUSED[kind]
    sealed.chmod(0o644)
    change(sealed)
    if sealed.is_file() and "may write" not in kind:
        sealed.chmod(0o444)
    before = names(sealed.parent)
    with pytest.raises(SealedError, match=message) as caught:
        SealedFile(sealed)
    assert str(caught.value).startswith(f"{sealed}: ")
    assert caught.value.path == str(sealed)
    assert caught.value.cure
    assert names(sealed.parent) == before


@needs_root
@pytest.mark.parametrize("which", ["file", "folder"])
def test_another_users_file_is_refused(sealed: Path, which: str) -> None:
    """Neither root's nor the effective user's: whoever owns it decides what runs on the GPU."""
    os.chown(sealed if which == "file" else sealed.parent, NOBODY, NOBODY)
    with pytest.raises(SealedError, match="belongs to"):
        SealedFile(sealed)


def test_triggers_views_and_other_revisions_do_not_matter(path: Path) -> None:
    """Nothing of a file is run but the look-ups, and its revision is not asked for."""
    run(path, "CREATE VIEW v AS SELECT load_extension('x')", "CREATE TRIGGER t AFTER DELETE ON entries BEGIN SELECT 1; END")
    run(path, "UPDATE alembic_version SET version_num = '9999_later'", "DROP TABLE uses")
    run(path, "CREATE VIEW uses AS SELECT key, randomblob(9) AS hits, 5.0 AS last_used_at FROM entries")
    assert seal(path, lock_timeout_s=20) == 5
    with closing(SealedFile(path)) as file:
        assert file.get(KEYS[2]) == pack(numbered(2, blob=b"2" * 3000))
        for _ in range(2):
            assert [(row.key, row.hits, row.last_used_at) for row in file.listing()] == [(key, 0, None) for key in KEYS]


@pytest.mark.parametrize(
    "tags",
    [(), ("CREATE VIEW tags AS SELECT key, 'x' AS tag, 1 AS hits, 5.0 AS last_used_at FROM entries",), ("CREATE TABLE tags (key BLOB)",)],
)
def test_a_file_without_tags_of_its_own_has_none(path: Path, tags: tuple[str, ...]) -> None:
    """One from before there were tags, or with a view or another table in their place, is read as it is."""
    run(path, "DROP TABLE tags", *tags)
    assert seal(path, lock_timeout_s=20) == 5
    with closing(SealedFile(path)) as file:
        assert file.tags() == []
        assert len(list(file.listing())) == 5


def test_a_file_without_counts_lists_with_none(path: Path) -> None:
    """A bundle carries no use counters."""
    run(path, "DROP TABLE uses")
    seal(path, lock_timeout_s=20)
    assert [(row.key, row.hits, row.last_used_at) for row in listed(path)] == [(key, 0, None) for key in KEYS]


def test_no_row_is_longer_than_a_plan_can_be(sealed: Path) -> None:
    """A row that says it holds gigabytes is an error and no allocation."""
    with closing(SealedFile(sealed)) as file:
        assert file._reader is not None
        connection = file._reader.connection
        assert connection.execute("SELECT length(zeroblob(?))", (MAX_BLOB_BYTES,)).fetchone() == (MAX_BLOB_BYTES,)
        with pytest.raises(sqlite3.DataError, match="too big"):
            connection.execute("SELECT zeroblob(?)", (2 * MAX_BLOB_BYTES,)).fetchone()
        assert connection.execute("PRAGMA cell_size_check").fetchone() == (1,)
        assert connection.execute("PRAGMA trusted_schema").fetchone() == (0,)


def test_a_damaged_page_is_an_error_and_blocks_no_other_row(path: Path) -> None:
    """What lies on it cannot be read, and says so; what lies elsewhere can."""
    blobs = [random.randbytes(20000) for _ in range(2)]
    with closing(Database(path, lock_timeout_s=20)) as database:
        for number, blob in enumerate(blobs, 20):
            database.put(numbered(number, blob=blob))
    seal(path, lock_timeout_s=20)
    path.chmod(0o644)
    data = path.read_bytes()
    page = data.index(pack(numbered(21, blob=blobs[1])).payload[10000:10100]) // 4096  # pages of 4096 bytes, chained by their first four
    path.write_bytes(data[: page * 4096] + b"\xff" * 4 + data[page * 4096 + 4 :])
    with closing(SealedFile(path)) as file:
        with pytest.raises(SealedError, match=r"cannot be read .*malformed.*; copy it here again"):
            file.get(numbered(21).key.digest)
        assert file.get(numbered(20).key.digest) == pack(numbered(20, blob=blobs[0]))


# ---- threads, forks, replacement ------------------------------------------------------------------------------------


def test_threads_share_a_sealed_file(sealed: Path) -> None:
    """Eight threads get every row, also after it was closed under them."""
    with closing(SealedFile(sealed)) as file, ThreadPoolExecutor(8) as pool:
        wanted = [file.get(key) for key in KEYS]
        assert list(pool.map(file.get, KEYS * 100)) == wanted * 100
        file.close()
        assert list(pool.map(file.get, KEYS * 100)) == wanted * 100


def test_a_connection_does_not_cross_a_fork(sealed: Path) -> None:
    """A child that is forked while a thread reads neither waits for that thread nor closes the parent's connection."""
    forking = python(
        """
        import os, sys
        from pathlib import Path
        from test_sealed import KEYS, SealedFile
        file = SealedFile(Path(sys.argv[1]))
        wanted, parents = file.get(KEYS[0]), file._reader
        parents.lock.acquire()  # as a thread that reads
        child = os.fork()
        if child == 0:
            same = file.get(KEYS[0]) == wanted and file._reader is not parents
            file.close()
            parents.connection.execute("SELECT 1")
            os._exit(0 if same and wanted else 1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        parents.lock.release()
        print(code, file.get(KEYS[0]) == wanted, file._reader is parents)
        """,
        sealed,
    )
    assert forking.communicate(timeout=60)[0] == "0 True True\n"


def test_a_file_that_is_replaced_goes_on_until_it_is_opened_again(sealed: Path, cache_dir: Path) -> None:
    """Who has it open reads the old one to the end; who opens it then reads the new one."""
    other = cache_dir / "other" / "plans-1.sqlite3"
    with closing(Database(other, lock_timeout_s=20)) as database:
        database.put(numbered(8))
    seal(other, lock_timeout_s=20)
    with closing(SealedFile(sealed)) as file:
        other.replace(sealed)
        assert [row.key for row in file.listing()] == KEYS
        assert keys(sealed) == [numbered(8).key.digest]
        unseal(sealed, lock_timeout_s=20)
        assert [row.key for row in file.listing()] == KEYS
        file.close()
        with pytest.raises(SealedError, match="not sealed"):
            file.get(KEYS[0])


# ---- writers beside it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["idle", "reading", "writing"])
def test_a_database_that_another_process_has_open_is_not_sealed(path: Path, state: str) -> None:
    """The error says what to stop; the other goes on, and the file is the WAL file that it was."""
    other = python(
        """
        import sqlite3, sys
        connection = sqlite3.connect(sys.argv[1], isolation_level=None)
        for statement in {"idle": [], "reading": ["BEGIN"], "writing": ["BEGIN IMMEDIATE", "DELETE FROM uses"]}[sys.argv[2]]:
            connection.execute(statement)
        connection.execute("SELECT * FROM uses").fetchall()
        print("open", flush=True)
        sys.stdin.readline()
        if not connection.in_transaction:
            connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO uses VALUES (x'00', 1, 1.0)")
        connection.execute("COMMIT")
        print("stored", flush=True)
        sys.stdin.readline()
        """,
        path,
        state,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "open\n"
    with pytest.raises(SealedError, match="open elsewhere; stop the programs"):
        seal(path, lock_timeout_s=0)
    with pytest.raises(SealedError, match="stop that program, then seal it where it can be written"):
        SealedFile(path)
    assert other.stdin is not None
    other.stdin.write("go on\n")
    other.stdin.flush()
    assert other.stdout.readline() == "stored\n"
    assert run(path, "SELECT count(*) FROM uses WHERE key = x'00'") == 1
    assert f"{path.name}.new" not in names(path.parent)
    other.communicate("\n", timeout=60)
    assert run(path, "PRAGMA journal_mode") == "wal"
    assert seal(path, lock_timeout_s=20) == 5


def test_a_writer_in_mid_transaction_is_seen(sealed: Path) -> None:
    """Somebody who writes into a sealed file all the same has a journal beside it: nobody opens it meanwhile."""
    sealed.chmod(0o644)
    with closing(sqlite3.connect(sealed, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("DELETE FROM entries")
        connection.execute("PRAGMA cache_spill = 1")
        assert Path(f"{sealed}-journal").exists()
        with pytest.raises(SealedError, match="a program writes there"):
            SealedFile(sealed)
        for work in (seal, unseal):
            with pytest.raises(SealedError, match=r"it is sealed, but .*-journal lies beside it.*; stop that program"):
                work(sealed, lock_timeout_s=0)
        connection.execute("ROLLBACK")
    assert keys(sealed) == KEYS


@pytest.mark.parametrize("work", [seal, unseal])
def test_a_journal_of_another_file_is_not_read_into_a_sealed_one(sealed: Path, cache_dir: Path, work: Callable[..., Any]) -> None:
    """A file that was copied over a database whose process was killed lies beside that one's WAL: nothing is applied."""
    other = cache_dir / "other" / "plans-1.sqlite3"
    database = Database(other, lock_timeout_s=20)
    database.put(numbered(8))
    with closing(sqlite3.connect(other)) as connection:  # keeps the WAL
        connection.execute("SELECT count(*) FROM entries").fetchone()
        database.put(numbered(9))
        shutil.copy(f"{other}-wal", f"{sealed}-wal")
    database.close()
    before = sealed.read_bytes()
    with pytest.raises(SealedError, match=r"it is sealed, but .*-wal lies beside it.*; stop that program, and move .*-wal away"):
        work(sealed, lock_timeout_s=1)
    assert sealed.read_bytes() == before
    Path(f"{sealed}-wal").unlink()
    assert keys(sealed) == KEYS


def test_who_opened_it_before_it_was_sealed_cannot_write_beside_it(path: Path) -> None:
    """An idle connection holds no lock on a file with a rollback journal: it reads on, and its write fails without a journal."""
    run(path, "PRAGMA journal_mode = DELETE")
    with closing(sqlite3.connect(path, isolation_level=None)) as idle:
        idle.execute("SELECT count(*) FROM entries").fetchone()
        assert seal(path, lock_timeout_s=20) == 5
        assert idle.execute("SELECT count(*) FROM entries").fetchone() == (5,)
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            idle.execute("DELETE FROM entries")
        assert names(path.parent) == {path.name}
    assert keys(path) == KEYS


@pytest.mark.parametrize("undo", [False, True])
def test_a_writer_that_hangs_delays_by_the_timeout_and_no_longer(path: Path, undo: bool) -> None:
    """The write lock is that of the database."""
    from filelock import FileLock

    if undo:
        seal(path, lock_timeout_s=20)
    with FileLock(path.with_name("write.lock")), pytest.raises(SealedError, match=r"another program has been writing there for 0\.05 s"):
        (unseal if undo else seal)(path, lock_timeout_s=0.05)
    assert is_sealed(path) == undo


# ---- failures and crashes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize("step", ["_finish", "replace"])
def test_a_failure_leaves_the_file_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch, undo: bool, step: str) -> None:
    """Whether at the copy or at the rename: the file has its form, its journal and its rows, and no copy stays."""

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    if undo:
        seal(path, lock_timeout_s=20)
    with monkeypatch.context() as patch:
        patch.setattr(module if step == "_finish" else Path, step, fail)
        with pytest.raises(StoreError, match="No space left"):
            (unseal if undo else seal)(path, lock_timeout_s=20)
    assert is_sealed(path) == undo
    assert keys(path) == KEYS
    assert names(path.parent) == {path.name}
    assert undo or run(path, "PRAGMA journal_mode") == "wal"


def test_a_file_without_entries_is_not_sealed(cache_dir: Path) -> None:
    """Another program's database, and the empty file of a process that died early, stay as they are."""
    other = cache_dir / "other.sqlite3"
    run(other, "CREATE TABLE songs (name)")
    (cache_dir / "empty.sqlite3").touch()
    (cache_dir / "text.sqlite3").write_text("not a database " * 100)
    for name in ("other", "empty", "text"):
        file = cache_dir / f"{name}.sqlite3"
        before = file.read_bytes()
        with pytest.raises(SealedError, match="; "):
            seal(file, lock_timeout_s=1)
        assert file.read_bytes() == before
    assert names(cache_dir) == {"other.sqlite3", "empty.sqlite3", "text.sqlite3"}


AT_EVERY_LINE = """
import itertools, os, shutil, signal, sys
from pathlib import Path
import filelock, plancache.store.place
from test_sealed import KEYS, is_sealed, keys, module, names, run, seal, unseal

LOOKING = "is_sealed _form _beside _is_table _refuse_content _claims _sealed_now _existing _count _copy_of".split()
pristine, undo = Path(sys.argv[1]), sys.argv[2] == "True"

def work(path):
    (unseal if undo else seal)(path, lock_timeout_s=20)

def die_at(step):
    left = itertools.count(step, -1)
    def trace(frame, event, _):
        if frame.f_code.co_filename != module.__file__ or frame.f_code.co_name in LOOKING:
            return None
        if event == "line" and next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)

def killed(path, step):
    child = os.fork()
    if child == 0:
        die_at(step)
        work(path)
        os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL

seen = set()
for step in itertools.count():
    path = Path(shutil.copytree(pristine.parent, pristine.parent.with_name(str(step)))) / pristine.name
    if not killed(path, step):
        break
    seen.add(is_sealed(path))
    assert keys(path) == KEYS, step
    assert run(path, "PRAGMA integrity_check") == "ok"
    work(path)
    assert (is_sealed(path), keys(path), names(path.parent)) == (not undo, KEYS, {path.name}), step
print(step > 30, sorted(seen))
"""


@pytest.mark.parametrize("undo", [False, True])
def test_a_crash_at_any_line_leaves_the_old_file_or_the_new_one(path: Path, undo: bool) -> None:
    """Killed before each line in turn that can change something: every row is there, and the next one finishes and cleans up."""
    if undo:
        seal(path, lock_timeout_s=20)
    crashing = python(AT_EVERY_LINE, path, undo)
    assert crashing.communicate(timeout=300)[0] == "True [False, True]\n"
    assert crashing.returncode == 0


def test_kills_at_random_moments_lose_nothing(path: Path) -> None:
    """A process that seals and unseals a larger file without end is killed, also within SQLite; every row is there."""
    with closing(Database(path, lock_timeout_s=20)) as database:
        for number in range(100, 130):
            database.put(numbered(number, blob=random.randbytes(100_000)))
    wanted = listed(path)
    script = """
    import sys
    from pathlib import Path
    from plancache.store.sealed import seal, unseal
    while True:
        seal(Path(sys.argv[1]), lock_timeout_s=20)
        print("sealed", flush=True)
        unseal(Path(sys.argv[1]), lock_timeout_s=20)
    """
    for _ in range(8):
        process = python(script, path)
        assert process.stdout is not None
        assert process.stdout.readline() == "sealed\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=random.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert listed(path) == wanted
    assert seal(path, lock_timeout_s=20) == len(wanted)
    assert names(path.parent) == {path.name}


# ---- read-only places -----------------------------------------------------------------------------------------------


@pytest.fixture
def image() -> Iterator[Path]:
    """A folder that every user can reach: pytest's own are private."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


DROPPED = """
import json, os, sys
from pathlib import Path
import filelock, pwd, plancache.store.place
from test_sealed import KEYS, NOBODY, SealedError, SealedFile, is_sealed, pack, seal, unseal

os.setgroups([]), os.setgid(NOBODY), os.setuid(NOBODY)
path = Path(sys.argv[1])

def attempt(work):
    try:
        return work()
    except SealedError as error:
        return error.reason + "; " + error.cure

def read():
    file = SealedFile(path)
    return [len(list(file.listing())), file.get(KEYS[1]) is not None]

reports = [is_sealed(path), attempt(read)]
reports += [attempt(lambda: work(path, lock_timeout_s=1)) for work in (seal, unseal)]
print(json.dumps(reports))
"""


def as_nobody(path: Path) -> list[Any]:
    dropped = python(DROPPED, path)
    out, _ = dropped.communicate(timeout=60)
    assert dropped.returncode == 0
    return list(json.loads(out))


@needs_root
def test_another_user_reads_what_root_sealed_in_a_read_only_folder(sealed: Path, image: Path) -> None:
    """In an image: root's file in a folder that nobody may write. Reading needs no write; unsealing says what it needs."""
    path = image / "cache" / sealed.name
    path.parent.mkdir()
    shutil.copy2(sealed, path)
    path.parent.chmod(0o555)
    found, read, sealing, unsealing = as_nobody(path)
    assert (found, read, sealing) == (True, [5, True], 5)
    assert unsealing.startswith(f"{path.parent} cannot be written (Permission denied); copy it to where it can be written")
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@needs_root
@pytest.mark.parametrize("wal", [True, False])
def test_an_unsealed_file_in_a_read_only_folder_is_refused_with_the_cure(path: Path, image: Path, wal: bool) -> None:
    """Whatever its journal: it can be opened by some and not by others, so the cure is to seal it."""
    if not wal:
        run(path, "PRAGMA journal_mode = DELETE")
    place = image / "cache" / path.name
    place.parent.mkdir()
    shutil.copy2(path, place)
    place.parent.chmod(0o555)
    found, read, sealing, unsealing = as_nobody(place)
    assert not found
    assert read == f"it is not sealed; seal it where it can be written: plancache seal --cache-dir {place.parent}"
    assert "cannot be written (Permission denied); copy it to where it can be written" in sealing
    assert unsealing is None


@needs_root
def test_a_file_that_a_user_may_not_read_is_refused_with_the_cure(sealed: Path, image: Path) -> None:
    """Not a miss without a word: root's umask hides many a file in an image."""
    path = image / sealed.name
    shutil.copy2(sealed, path)
    path.chmod(0o400)
    place = image / "p"
    place.mkdir()
    script = DROPPED.replace("[is_sealed(path), attempt(read)]", "[None, attempt(read)]").replace(
        "for work in (seal, unseal)", "for work in ()"
    )
    out, _ = python(script, path).communicate(timeout=60)
    assert json.loads(out)[1] == f"it cannot be read (Permission denied); let its owner chmod a+r {path}"


# ---- the command ----------------------------------------------------------------------------------------------------


def command(folder: Path, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    COMMAND.configure(parser)
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(cache_dir=str(folder))
    return COMMAND.run(parser.parse_args(arguments))


def test_the_command_says_what_it_did_and_how_to_carry_it(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sealed, sealed already, undone, nothing to undo."""
    said = []
    for arguments in ((), (), ("--undo",), ("--undo",)):
        assert command(path.parent, *arguments) == 0
        said.append(capsys.readouterr().out)
    assert said[0].startswith("sealed: 5 plans, ")
    assert said[1].startswith("already sealed: 5 plans, ")
    for each in said[:2]:
        assert f"PLANCACHE_BUNDLES={path}\n" in each
        assert f"PLANCACHE_DIR={path.parent}\n" in each
        assert "plancache seal --undo" in each
    assert said[2] == f"unsealed {path}: plans are stored there again\n"
    assert said[3] == f"{path} is not sealed, nothing to undo\n"


def test_the_command_prints_an_object(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For programs: what is so now, and whether this call made it so."""
    reports = []
    for arguments in (("--json",), ("--json",), ("--json", "--undo"), ("--json", "--undo")):
        assert command(path.parent, *arguments) == 0
        reports.append(json.loads(capsys.readouterr().out))
        assert reports[-1].pop("size_bytes") == path.stat().st_size
    assert [report.pop("path") for report in reports] == [str(path)] * 4
    assert reports == [
        {"sealed": True, "changed": True, "entries": 5},
        {"sealed": True, "changed": False, "entries": 5},
        {"sealed": False, "changed": True, "entries": None},
        {"sealed": False, "changed": False, "entries": None},
    ]


def test_the_command_fails_with_the_cure_where_nothing_is_stored(cache_dir: Path) -> None:
    """An error as those of other commands, which their main turns into one line and exit code 1."""
    with pytest.raises(SealedError, match="there is no database; programs that plan"):
        command(cache_dir)
