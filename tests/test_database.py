"""The SQLite file: statements and tables are those declared, a better entry replaces a lesser, and faults are StoreErrors."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from faking import finish, start
from samples import make_entry, state

from plancache.entry import QUALITIES, Entry, pack, unpack
from plancache.errors import DamagedStoreError, StoreError
from plancache.key import COMPONENTS, PlanKey
from plancache.store import database as module
from plancache.store.connection import HEAD, SELECT_REVISION
from plancache.store.database import COUNT_USE, SELECT_ENTRY, SELECT_LISTING, SELECT_VERDICTS, SELECT_VERDICTS_OF, Database, Verdict
from plancache.store.tags import COUNT_TAG, SELECT_TAGGED, SELECT_TAGS, Tagged

KEY = make_entry().key.digest


@pytest.fixture
def path(cache_dir: Path) -> Path:
    return cache_dir / "plans.sqlite3"


@pytest.fixture
def database(path: Path) -> Iterator[Database]:
    made = Database(path, lock_timeout_s=20)
    yield made
    made.close()


def numbered(number: int, **changes: Any) -> Entry:
    return make_entry(key=PlanKey((b"%d" % number, *[b""] * (len(COMPONENTS) - 1))), **changes)


def stored(database: Database) -> dict[str, Any]:
    row = database.get(KEY)
    assert row is not None
    return state(unpack(row))


def ask(path: Path, statement: str) -> Any:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(statement).fetchone()[0]
    finally:
        connection.close()


# ---- statements and tables ------------------------------------------------------------------------------------------


def compiled(statement: Any, **options: Any) -> str:
    from sqlalchemy.dialects import sqlite

    text = str(statement.compile(dialect=sqlite.dialect(), compile_kwargs=options))
    return " ".join(text.replace('"key"', "key").split())  # KEY is a word of SQL that SQLite takes for a name all the same


def test_the_statements_are_those_that_the_tables_declare() -> None:
    """Reading goes past SQLAlchemy with the text that SQLAlchemy would send."""
    from alembic.migration import MigrationContext
    from sqlalchemy import select

    from plancache.store import schema

    context = MigrationContext.configure(dialect_name="sqlite")
    assert compiled(schema.select_entry()) == SELECT_ENTRY
    assert compiled(schema.select_listing(), literal_binds=True) == SELECT_LISTING
    assert compiled(schema.count_use()) == COUNT_USE
    assert compiled(schema.select_tags()) == SELECT_TAGS
    assert compiled(schema.select_tagged()) == SELECT_TAGGED
    assert compiled(schema.count_tag()) == COUNT_TAG
    assert compiled(schema.select_verdicts()) == SELECT_VERDICTS
    assert compiled(schema.select_verdicts_of()) == SELECT_VERDICTS_OF
    assert compiled(select(context._version.c.version_num)).replace("alembic_version.", "") == SELECT_REVISION


def test_head_is_the_last_migration() -> None:
    """The revision that this version reads is the one that its migrations make, and there is one line of them."""
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    spec = find_spec("plancache.migrations")
    assert spec is not None
    assert spec.submodule_search_locations
    config = Config()
    config.set_main_option("script_location", spec.submodule_search_locations[0])
    assert ScriptDirectory.from_config(config).get_heads() == [HEAD]


def test_the_migrations_make_the_declared_tables(database: Database, path: Path) -> None:
    """Nothing is left to migrate: tables, columns, types and constraints are those of `schema`."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext
    from sqlalchemy import create_engine

    from plancache.store import schema

    database.upgrade()
    engine = create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        options = {"compare_type": True, "compare_server_default": True}
        assert compare_metadata(MigrationContext.configure(connection, opts=options), schema.metadata) == []
    engine.dispose()


def test_a_column_that_no_migration_makes_is_noticed(database: Database, path: Path) -> None:
    """The test above can fail."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext
    from sqlalchemy import Column, Integer, MetaData, create_engine

    from plancache.store import schema

    database.upgrade()
    declared = MetaData()
    for table in schema.metadata.tables.values():
        table.to_metadata(declared)
    declared.tables["entries"].append_column(Column("strikes", Integer))
    engine = create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), declared) != []
    engine.dispose()


def test_a_new_file_gives_space_back_and_can_be_read_while_it_is_written(database: Database, path: Path) -> None:
    """auto_vacuum is incremental and the journal is a WAL: both from the first table on."""
    database.put(make_entry(blob=os.urandom(1 << 20)))
    assert ask(path, "PRAGMA auto_vacuum") == 2
    assert ask(path, "PRAGMA journal_mode") == "wal"
    full = path.stat().st_size
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("DELETE FROM entries")
    connection.executescript("PRAGMA incremental_vacuum")  # execute() would step once and free one page
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    assert path.stat().st_size < full / 10


# ---- rows in and out ------------------------------------------------------------------------------------------------


def test_a_stored_entry_comes_back_in_another_process_and_here(database: Database, path: Path) -> None:
    """What was put is got, byte for byte, also by a database that was opened afterwards."""
    assert database.get(KEY) is None
    assert database.put(make_entry())
    other = Database(path, lock_timeout_s=1)
    assert database.get(KEY) == other.get(KEY) == pack(make_entry())
    assert database.get(b"another") is None
    other.close()


def test_looking_into_a_file_that_is_not_there_creates_nothing(cache_dir: Path) -> None:
    """A reader leaves no trace: no file, no folder, no lock."""
    database = Database(cache_dir / "folder" / "plans.sqlite3", lock_timeout_s=1)
    assert database.get(KEY) is None
    assert list(database.listing()) == []
    assert database.revision() is None
    database.count_uses({KEY: 1}, 1.0)
    database.close()
    assert list(cache_dir.iterdir()) == []


@pytest.mark.parametrize(("old", "new"), list(product(QUALITIES, repeat=2)))
@pytest.mark.parametrize("refresh", [False, True])
def test_a_better_entry_replaces_a_lesser_and_an_equal_one_only_on_refresh(database: Database, old: Any, new: Any, refresh: bool) -> None:
    """Quality only goes upwards."""
    order = ["compiled", "heuristic", "tuned"]
    replaces = order.index(new) > order.index(old) or (refresh and new == old)
    assert database.put(make_entry(quality=old, workspace_size=1))
    assert database.put(make_entry(quality=new, workspace_size=2), replace_equal=refresh) == replaces
    kept = make_entry(quality=new, workspace_size=2) if replaces else make_entry(quality=old, workspace_size=1)
    assert stored(database) == state(kept)


@pytest.mark.parametrize(("old", "new"), list(product(QUALITIES, repeat=2)))
def test_a_condemned_entry_is_replaced_whatever_its_quality(database: Database, old: Any, new: Any) -> None:
    """A row that was found unfit gives way to any; but only that very row."""
    unfit, fit = make_entry(quality=old, workspace_size=1), make_entry(quality=new, workspace_size=2)
    database.put(unfit)
    assert database.put(fit, condemned=pack(unfit).checksum)
    assert stored(database) == state(fit)


def test_condemning_a_row_does_not_condemn_the_one_that_replaced_it(database: Database) -> None:
    """Another process may have put a good one in its place meanwhile."""
    good = make_entry(quality="tuned")
    database.put(good)
    assert not database.put(make_entry(quality="compiled"), condemned=pack(make_entry(quality="heuristic")).checksum)
    assert stored(database) == state(good)


def test_all_columns_of_a_replaced_row_are_the_new_ones(database: Database, path: Path) -> None:
    """Derived columns go with the row: quality, seconds of the build, time."""
    database.put(make_entry(quality="compiled"))
    database.put(make_entry(quality="tuned", timings_s={"build": 8.0}, created_at=5.0))
    assert ask(path, "SELECT json_array(quality, build_s, created_at) FROM entries") == "[2,8.0,5.0]"


def test_a_listing_has_no_payloads(database: Database) -> None:
    """Listing a large cache reads no plans: rows come with the size of the payload in its place, oldest first."""
    blob = os.urandom(5000)
    for number in (2, 1, 3):
        database.put(numbered(number, blob=blob, created_at=float(number)))
    rows = list(database.listing())
    payload = pack(make_entry(blob=blob)).payload
    assert [row.key for row in rows] == [numbered(number).key.digest for number in (1, 2, 3)]
    assert [row.size_bytes for row in rows] == [len(payload)] * 3
    assert all(blob[:50] not in bytes(part) for row in rows for part in row if isinstance(part, bytes))
    assert (rows[0].hits, rows[0].last_used_at) == (0, None)


# ---- counts ---------------------------------------------------------------------------------------------------------


def uses(database: Database) -> dict[bytes, tuple[int, float | None]]:
    return {row.key: (row.hits, row.last_used_at) for row in database.listing()}


def test_counts_add_up(database: Database) -> None:
    """Each flush adds to what other flushes and processes counted; the last use is the last."""
    first, second = (numbered(number).key.digest for number in (1, 2))
    for number in (1, 2):
        database.put(numbered(number))
    database.count_uses({first: 2}, 10.0)
    database.count_uses({first: 3, second: 1}, 20.0)
    assert uses(database) == {first: (5, 20.0), second: (1, 20.0)}


def test_counts_are_one_transaction(database: Database) -> None:
    """Where one cannot be written, none is, and the connection goes on working."""
    database.put(numbered(1))
    key = numbered(1).key.digest
    broken: Any = {key: 1, b"other": object()}
    with pytest.raises(StoreError):
        database.count_uses(broken, 1.0)
    assert uses(database) == {key: (0, None)}
    database.count_uses({key: 1}, 2.0)
    assert uses(database) == {key: (1, 2.0)}


def test_counts_outlive_the_entry_they_are_of(database: Database) -> None:
    """A replaced entry keeps its uses: they are the key's."""
    database.put(make_entry(quality="compiled"))
    database.count_uses({KEY: 4}, 1.0)
    database.put(make_entry(quality="tuned"))
    assert uses(database) == {KEY: (4, 1.0)}


# ---- tags -----------------------------------------------------------------------------------------------------------


def test_a_tag_is_stored_with_the_entry_and_counted_with_its_uses(database: Database) -> None:
    """Each program has its own count of a key; one without a name leaves none."""
    database.put(make_entry(created_at=3.0), tag="serve")
    database.put(numbered(1))
    assert database.tags() == [Tagged(KEY, "serve", 0, 3.0)]
    database.count_uses({KEY: 2}, 10.0, "serve")
    database.count_uses({KEY: 3, numbered(1).key.digest: 1}, 20.0, "train")
    database.count_uses({KEY: 7}, 30.0)
    assert set(database.tags()) == {
        Tagged(KEY, "serve", 2, 10.0),
        Tagged(KEY, "train", 3, 20.0),
        Tagged(numbered(1).key.digest, "train", 1, 20.0),
    }
    assert uses(database)[KEY] == (12, 30.0)


def test_a_program_that_asked_for_a_better_plan_than_it_built_is_known_too(database: Database) -> None:
    """The tag is the key's: what is stored already answers it."""
    database.put(make_entry(quality="tuned"))
    assert not database.put(make_entry(quality="compiled"), tag="serve")
    assert [tagged.tag for tagged in database.tags()] == ["serve"]


def test_an_entry_that_cannot_be_stored_leaves_no_tag(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are one transaction."""
    from sqlalchemy import text

    from plancache.store import schema

    database.upgrade()
    monkeypatch.setattr(schema, "insert_entry", lambda **_: text("INSERT INTO nowhere VALUES (1)"))
    with pytest.raises(StoreError, match="nowhere"):
        database.put(make_entry(), tag="serve")
    assert database.tags() == []


def test_uses_are_counted_in_a_file_from_before_there_were_tags(path: Path) -> None:
    """A hit does not migrate; the next build does, and tags are noted from then on."""
    path.write_bytes(PAST[0].read_bytes())
    database = Database(path, lock_timeout_s=5)
    (old,) = database.listing()
    database.count_uses({old.key: 1}, 5.0, "serve")
    assert (next(database.listing()).hits, database.tags()) == (old.hits + 1, [])
    database.put(make_entry(), tag="serve")
    database.count_uses({old.key: 1}, 6.0, "serve")
    assert {tagged.key for tagged in database.tags()} == {old.key, KEY}
    database.close()


def test_a_tag_of_another_type_is_not_believed(database: Database, path: Path) -> None:
    """SQLite takes any type in any column: one bad row hides no other."""
    database.put(make_entry(created_at=3.0), tag="serve")
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("INSERT INTO tags VALUES (x'00', x'ff', 'many', 'late')")
    connection.close()
    assert database.tags() == [Tagged(KEY, "serve", 0, 3.0)]


# ---- many at once ---------------------------------------------------------------------------------------------------

WORKER = """
import sys, alembic.command, filelock, sqlalchemy
from pathlib import Path
from samples import make_entry
from plancache.key import COMPONENTS, PlanKey
from plancache.store.database import Database
number = sys.argv[2].encode()
entry = make_entry(key=PlanKey((number, *[b""] * (len(COMPONENTS) - 1))))
print("ready", flush=True)
sys.stdin.readline()
database = Database(Path(sys.argv[1]), lock_timeout_s=60)
print(database.put(entry), database.get(entry.key.digest) is not None)
database.close()
"""


def test_processes_create_one_new_file_together(path: Path) -> None:
    """Eight processes that start on nothing at the same moment: one file, no error, every entry in it."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [sys.executable, "-c", WORKER, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    workers = [subprocess.Popen([*command, str(number)], env=environ, text=True, **pipes) for number in range(8)]  # type: ignore[call-overload]
    assert [worker.stdout.readline() for worker in workers] == ["ready\n"] * 8
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    assert [worker.communicate(timeout=60) for worker in workers] == [("True True\n", "")] * 8
    assert [worker.returncode for worker in workers] == [0] * 8
    database = Database(path, lock_timeout_s=1)
    assert {row.key for row in database.listing()} == {numbered(number).key.digest for number in range(8)}
    assert database.revision() == HEAD
    database.close()


def test_threads_create_their_files_together(cache_dir: Path) -> None:
    """Eight threads, each with a file of its own: Alembic's context is a global of the process."""
    databases = [Database(cache_dir / str(number) / "plans.sqlite3", lock_timeout_s=20) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda database: database.put(make_entry()), databases))
    assert [database.revision() for database in databases] == [HEAD] * 8
    for database in databases:
        database.close()


def test_threads_share_a_database_and_no_connection(database: Database) -> None:
    """Each thread reads through a connection of its own; closing closes all of them."""
    database.put(make_entry())
    together = Barrier(4)

    def look(_: int) -> Any:
        together.wait(timeout=20)  # so that no thread of the pool serves two of the four
        return database.get(KEY), database._reader()

    with ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(look, range(4)))
    readers = {id(reader): reader for _, reader in rows}.values()
    assert {row for row, _ in rows} == {pack(make_entry())}
    assert len(readers) == 4
    database.close()
    for reader in readers:
        with pytest.raises(sqlite3.ProgrammingError):
            reader.connection.execute("SELECT 1")


def test_a_connection_does_not_cross_a_fork(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a child the parent's connection is dropped and left open; the child opens its own."""
    database.put(make_entry())
    database.get(KEY)
    parents = database._reader()
    monkeypatch.setattr(module.os, "getpid", lambda: -1)
    assert database.get(KEY) == pack(make_entry())
    assert database._reader() is not parents
    assert parents is not None
    assert parents.connection.execute("SELECT 1").fetchone() == (1,)


# ---- faults ---------------------------------------------------------------------------------------------------------


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def later(path: Path, *, min_reader: int | None) -> None:
    """Makes a file such as a later version would: another column and table, and the version that can still read it."""
    database = Database(path, lock_timeout_s=5)
    database.put(make_entry())
    database.close()
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("UPDATE alembic_version SET version_num = '9999_later'")
    connection.execute("ALTER TABLE entries ADD COLUMN colour TEXT NOT NULL DEFAULT 'blue'")
    connection.execute("CREATE TABLE later (id INTEGER PRIMARY KEY)")
    if min_reader is None:
        connection.execute("DROP TABLE compatibility")
    else:
        connection.execute("UPDATE compatibility SET min_reader = ?", (min_reader,))
    connection.close()


@pytest.mark.parametrize("min_reader", [4, 9999, None])
def test_a_file_that_a_later_version_made_for_later_ones_is_left_as_it_is(path: Path, min_reader: int | None) -> None:
    """It is a StoreError that names both cures, for readers and writers; not a byte of the file changes."""
    later(path, min_reader=min_reader)
    before = digest(path)
    database = Database(path, lock_timeout_s=5)
    for use in (lambda: database.get(KEY), lambda: database.listing(), lambda: database.put(make_entry(quality="tuned"))):
        with pytest.raises(StoreError, match=r"9999_later.*install that version, or name another directory"):
            use()
    database.close()
    assert digest(path) == before


@pytest.mark.parametrize("min_reader", [1, 3])
def test_a_file_of_a_later_version_that_only_added_is_shared(path: Path, min_reader: int) -> None:
    """This version reads and writes it, and does not touch its revision."""
    later(path, min_reader=min_reader)
    database = Database(path, lock_timeout_s=5)
    assert stored(database) == state(make_entry())
    assert database.put(make_entry(quality="tuned"))
    assert database.upgrade() == "9999_later"
    database.count_uses({KEY: 2}, 5.0)
    assert next(database.listing()).hits == 2
    database.close()
    assert ask(path, "SELECT version_num FROM alembic_version") == "9999_later"
    assert ask(path, "SELECT colour FROM entries") == "blue"


PAST = sorted((Path(__file__).parent / "databases").glob("*.sqlite3"))


def test_a_file_is_kept_of_every_past_revision() -> None:
    """Each migration but the last one has a file that its version wrote."""
    versions = find_spec("plancache.migrations.versions")
    assert versions is not None
    assert versions.submodule_search_locations
    revisions = sorted(file.stem for file in Path(versions.submodule_search_locations[0]).glob("[0-9]*.py"))
    assert [file.stem for file in PAST] == revisions[:-1]


@pytest.mark.parametrize("past", PAST, ids=lambda file: file.stem)
def test_a_file_of_the_past_is_read_as_it_is_and_upgraded_by_the_first_write(path: Path, past: Path) -> None:
    """Entries, counts and verdicts survive; a reader that was open meanwhile goes on."""
    path.write_bytes(past.read_bytes())
    reader, writer = Database(path, lock_timeout_s=5), Database(path, lock_timeout_s=5)
    (old,) = reader.listing()
    row = reader.get(old.key)
    assert row is not None
    entry = unpack(row)
    verdicts = reader.verdicts()
    assert bool(verdicts) == (past.stem != "0001_entries")
    assert reader.tags() == []
    assert reader.revision() == past.stem
    assert writer.put(make_entry())
    assert writer.revision() == HEAD
    assert reader.get(old.key) == row
    assert reader.get(KEY) == pack(make_entry())
    assert {listed.key: listed.hits for listed in writer.listing()} == {entry.key.digest: old.hits, KEY: 0}
    assert writer.verdicts() == verdicts
    reader.close()
    writer.close()


def test_eight_processes_upgrade_one_file_of_the_past(path: Path) -> None:
    """One migrates under the lock; all write, and nothing is lost."""
    path.write_bytes(PAST[0].read_bytes())
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from samples import make_entry
from plancache.key import COMPONENTS, PlanKey
from plancache.store.database import Database
database = Database(Path({str(path)!r}), lock_timeout_s=60)
assert database.put(make_entry(key=PlanKey((sys.argv[1].encode(), *[b""] * (len(COMPONENTS) - 1)))))
"""
    workers = [subprocess.Popen([sys.executable, "-c", script, str(number)]) for number in range(8)]
    assert [worker.wait() for worker in workers] == [0] * 8
    assert ask(path, "SELECT count(*) FROM entries") == 9
    assert ask(path, "SELECT version_num FROM alembic_version") == HEAD


# ---- verdicts -------------------------------------------------------------------------------------------------------


def test_verdicts_are_counted_and_lifted(database: Database) -> None:
    """A second one of the same kind, key and checksum counts; others stand apart; lifting takes those named."""
    assert database.verdicts() == []
    strike = Verdict("struck", KEY, b"", "build: died", 1, 5.0)
    other = Verdict("unsupported", b"k", b"", "no plan", 1, 6.0)
    for verdict in (strike, other, strike._replace(reason="load: died", created_at=7.0)):
        database.record(verdict)
    assert database.verdicts() == [other, strike._replace(reason="load: died", count=2, created_at=7.0)]
    assert database.verdicts(b"k") == [other]
    assert database.lift([other]) == 1
    assert [verdict.kind for verdict in database.verdicts()] == ["struck"]


# ---- faults of the file ---------------------------------------------------------------------------------------------


def test_a_foreign_database_is_refused(database: Database, path: Path) -> None:
    """Another program's tables are neither read nor added to."""
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY)")
    connection.close()
    before = digest(path)
    for use in (lambda: database.get(KEY), lambda: database.put(make_entry())):
        with pytest.raises(StoreError, match=r"another program.*move the file away"):
            use()
    assert digest(path) == before


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER extra AFTER UPDATE ON entries BEGIN SELECT 1; END",
        "CREATE VIEW extra AS SELECT * FROM entries",
        "CREATE VIRTUAL TABLE extra USING fts5(text)",
    ],
)
def test_a_file_with_code_in_its_schema_is_refused(database: Database, path: Path, statement: str) -> None:
    """Views, triggers and virtual tables are never plancache's."""
    database.put(make_entry())
    database.close()
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.close()
    with pytest.raises(StoreError, match=r"extra.*plancache never makes"):
        database.get(KEY)


def test_a_damaged_file_is_moved_aside_and_one_is_kept(database: Database, path: Path) -> None:
    """Its WAL goes with it; a new file takes its place; readers of the old one find the new one by themselves."""
    other = Database(path, lock_timeout_s=5)
    for content in (b"first", b"second"):
        path.write_bytes(content * 1000)
        with pytest.raises(DamagedStoreError):
            database.get(KEY)
        aside = database.move_aside()
        assert aside == (path.with_name("plans.sqlite3.damaged"), len(content) * 1000)
        assert aside[0].read_bytes() == content * 1000
        assert not path.exists()
    database.put(make_entry())
    assert other.get(KEY) == pack(make_entry())
    assert other.get(b"unknown") is None
    assert database.move_aside() is not None
    database.put(make_entry(quality="tuned"))
    assert other.get(b"unknown") is None  # a miss looks whether the file is still the one at the path
    assert other.get(KEY) == pack(make_entry(quality="tuned"))
    other.close()


def test_a_schema_that_is_no_text_is_damage(database: Database, path: Path) -> None:
    """SQLite's message quotes it, so that `sqlite3` raises an error that is none of its own; readers and writers say what it is."""
    database.put(make_entry())
    database.close()
    ask(path, "PRAGMA journal_mode = DELETE")
    path.write_bytes(path.read_bytes().replace(b"PRIMARY KEY", b"PRIMARY \xf6EY"))
    for use in (
        lambda: database.get(KEY),
        lambda: list(database.listing()),
        lambda: database.verdicts(),
        lambda: database.damage(),
        lambda: database.revision(),
        lambda: database.put(make_entry()),
        lambda: database.count_uses({KEY: 1}, 1.0),
    ):
        with pytest.raises(DamagedStoreError, match=r"plans\.sqlite3: malformed database schema .*near .*EY"):
            use()


def test_a_file_that_is_no_database_is_left_as_it_is(database: Database, path: Path) -> None:
    """Garbage is a StoreError that names the file, for readers and writers, and stays for people to look at."""
    path.write_bytes(b"not a database " * 1000)
    before = digest(path)
    for use in (
        lambda: database.get(KEY),
        lambda: list(database.listing()),
        lambda: database.put(make_entry()),
        lambda: database.count_uses({KEY: 1}, 1.0),
        lambda: database.revision(),
        lambda: database.upgrade(),
    ):
        with pytest.raises(StoreError, match=r"plans\.sqlite3"):
            use()
    assert digest(path) == before


def test_an_empty_file_becomes_a_database(database: Database, path: Path) -> None:
    """What a process left that died before its first write is no fault."""
    path.touch()
    assert database.get(KEY) is None
    assert database.put(make_entry())
    assert stored(database) == state(make_entry())


def test_a_folder_that_cannot_be_made_is_a_store_error(cache_dir: Path) -> None:
    """Errors of the system come as StoreError too."""
    (cache_dir / "file").touch()
    database = Database(cache_dir / "file" / "plans.sqlite3", lock_timeout_s=1)
    assert database.get(KEY) is None
    with pytest.raises(StoreError, match=r"plans\.sqlite3"):
        database.put(make_entry())


def test_a_held_write_lock_is_a_store_error_in_bounded_time(database: Database, path: Path) -> None:
    """Another writer that hangs delays a put by the timeout and no longer; reading goes on."""
    from filelock import FileLock

    database.put(make_entry())
    impatient = Database(path, lock_timeout_s=0.05)
    with FileLock(path.with_name("write.lock")):
        with pytest.raises(StoreError, match=r"plans\.sqlite3"):
            impatient.put(make_entry(quality="tuned"))
        assert stored(impatient) == state(make_entry())
    assert impatient.put(make_entry(quality="tuned"))
    impatient.close()


def test_a_locked_file_is_a_store_error(database: Database, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's own lock, held by a program that knows no write.lock, is a fault and not an exception of SQLAlchemy's."""
    database.put(make_entry())
    monkeypatch.setattr(module, "_BUSY_TIMEOUT_S", 0.05)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked"):
        database.put(make_entry(quality="tuned"))
    other.close()


def test_a_put_that_fails_leaves_what_was_there(database: Database, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error within the transaction takes all of it back."""
    database.put(make_entry(quality="compiled"))
    pages = ask(path, "PRAGMA page_count")
    connect = database._connect

    def full(options: str = "mode=rw") -> sqlite3.Connection:
        connection = connect(options)
        connection.execute(f"PRAGMA max_page_count = {pages}")
        return connection

    monkeypatch.setattr(database, "_connect", full)
    with pytest.raises(StoreError, match="full"):
        database.put(make_entry(quality="tuned", blob=os.urandom(100_000)))
    assert stored(database) == state(make_entry(quality="compiled"))


FORKED = """
import os, signal, sys, threading
from pathlib import Path
from samples import make_entry
from plancache.store.database import Database

path, key = Path(sys.argv[1]), make_entry().key.digest
Database(path, lock_timeout_s=5).put(make_entry(blob=os.urandom(400_000)))
over = threading.Event()

def read():
    while not over.is_set():
        database = Database(path, lock_timeout_s=5)
        for _ in range(3):
            database.get(key)
        database.close()

threads = [threading.Thread(target=read) for _ in range(6)]
for thread in threads: thread.start()
ended = []
for _ in range(30):
    child = os.fork()
    if not child:
        signal.alarm(20)
        found = Database(path, lock_timeout_s=5).get(key) is not None
        os._exit(0 if found else 1)
    ended.append(os.waitpid(child, 0)[1])
over.set()
for thread in threads: thread.join()
print(ended)
"""


def test_a_child_that_is_forked_while_others_read_can_read(path: Path) -> None:
    """SQLite's own locks are held by nobody in it; without a gate every second one hangs."""
    assert finish(start(FORKED, path))[0].strip() == str([0] * 30)
