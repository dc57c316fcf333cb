"""Which entries go and where their space goes: filters, worth, clocks, what changed meanwhile, interruptions, kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from samples import make_entry

from plancache.entry import QUALITIES, Entry, pack, unpack
from plancache.errors import StoreError
from plancache.key import COMPONENTS, PlanKey
from plancache.store import retention as module
from plancache.store.database import Database, Verdict
from plancache.store.retention import Removal, Removed, Stored, choose, remove, retain, scan

NOW = 1_000_000.0


@pytest.fixture(params=["wal", "rollback journal"])
def database(cache_dir: Path, request: pytest.FixtureRequest) -> Iterator[Database]:
    """Both forms of a writable file: a network file system cannot hold a WAL."""
    made = Database(cache_dir / "plans.sqlite3", lock_timeout_s=20, wal=request.param == "wal")
    yield made
    made.close()


def numbered(number: int, **changes: Any) -> Entry:
    return make_entry(key=PlanKey((b"%d" % number, *[b""] * (len(COMPONENTS) - 1))), **changes)


def key_of(number: int) -> bytes:
    return numbered(number).key.digest


def fill(database: Database, count: int, *, blob_bytes: int = 20_000) -> None:
    """Rows as `put` writes them, in one transaction: what is tested here is how they go."""
    entries = [numbered(number, blob=os.urandom(blob_bytes), created_at=float(number)) for number in range(count)]
    database.upgrade()
    connection = database._connect()
    connection.execute("BEGIN IMMEDIATE")
    rows = [(*pack(entry), QUALITIES.index(entry.quality), entry.build_s, entry.created_at) for entry in entries]
    connection.executemany("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
    connection.execute("COMMIT")
    connection.close()


def keys(database: Database) -> set[bytes]:
    return {row.key for row in database.listing()}


def pragma(database: Database, name: str) -> Any:
    connection = database._connect()
    try:
        return connection.execute(f"PRAGMA {name}").fetchone()[0]
    finally:
        connection.close()


def assert_good(database: Database) -> None:
    """Every page is right, and so is every row."""
    assert pragma(database, "integrity_check") == "ok"
    for key in keys(database):
        row = database.get(key)
        assert row is not None
        unpack(row)


def stored(name: str = "one", **changes: Any) -> Stored:
    plain = {"size_bytes": 100, "build_s": 1.0, "created_at": NOW - 50, "hits": 0, "last_used_at": None, "checksum": b"", "preimage": b""}
    return Stored(name.encode(), **{**plain, **changes})


def names(removal: Removal) -> list[str]:
    return [one.key.decode() for one in removal.chosen]


# ---- scan -----------------------------------------------------------------------------------------------------------


def test_the_statements_are_those_that_the_tables_declare() -> None:
    """They go past SQLAlchemy with the text that SQLAlchemy would send."""
    from sqlalchemy import func, literal_column, select
    from sqlalchemy.dialects import sqlite

    from plancache.store.schema import entries, uses, verdicts

    def compiled(statement: Any) -> str:
        text = str(statement.compile(dialect=sqlite.dialect(), compile_kwargs={"literal_binds": True}))
        return " ".join(text.replace('"key"', "key").split())

    c, given = entries.c, literal_column("?")
    size_bytes = (func.length(c.preimage) + func.length(c.facts) + func.length(c.payload)).label("size_bytes")
    hits = func.coalesce(uses.c.hits, 0).label("hits")
    columns = (c.key, size_bytes, c.build_s, c.created_at, hits, uses.c.last_used_at, c.checksum)
    joined = entries.outerjoin(uses, uses.c.key == c.key)
    assert compiled(select(*columns).select_from(joined)) == module.SELECT_SIZES
    assert compiled(select(*columns, c.preimage).select_from(joined)) == module.SELECT_STORED
    assert compiled(entries.delete().where(c.key == given, c.checksum.is_(given))) == module.DELETE_ENTRY
    assert compiled(uses.delete().where(uses.c.key == given)) == module.DELETE_USES
    about_the_row = verdicts.c.kind.in_(["quarantined", "struck"])
    assert compiled(verdicts.delete().where(verdicts.c.key == given, about_the_row)) == module.DELETE_VERDICTS


def test_a_scan_says_all_that_a_choice_needs(database: Database) -> None:
    """Sizes, times and uses of every row; and preimages where asked."""
    entry = numbered(1, timings_s={"build": 4.0}, created_at=7.0)
    database.put(entry)
    database.put(numbered(2))
    database.count_uses({entry.key.digest: 3}, 9.0)
    row = pack(entry)
    size_bytes = len(row.preimage) + len(row.facts) + len(row.payload)
    expected = Stored(row.key, size_bytes, 4.0, 7.0, 3, 9.0, row.checksum, row.preimage)
    found = {one.key: one for one in scan(database)}
    assert found[row.key] == expected
    assert (found[key_of(2)].hits, found[key_of(2)].last_used_at) == (0, None)
    assert {one.preimage for one in scan(database, preimages=False)} == {b""}


def test_nothing_is_made_where_nothing_is(database: Database) -> None:
    """Scanning, removing and retaining leave no trace where there is no file."""
    assert scan(database) == ()
    assert retain(database, 0) is None
    gone = stored()
    assert remove(database, Removal((gone,), 0)) == Removed((), changed=(gone,))
    assert list(database.path.parent.iterdir()) == []


# ---- choose ---------------------------------------------------------------------------------------------------------


def test_nothing_asked_is_nothing_chosen() -> None:
    """Without a filter all stay, and the sum of them is told."""
    assert choose((stored("a"), stored("b")), now=NOW) == Removal((), 200)


def test_the_least_build_seconds_per_byte_go_first() -> None:
    """Worth is (hits + 1) * seconds / bytes; no more goes than must; of equals the older one goes first."""
    rows = (
        stored("slow", build_s=9.0),
        stored("quick", build_s=0.1),
        stored("quick and used", build_s=0.1, hits=99),
        stored("large", size_bytes=1000, build_s=9.0),
        stored("older", created_at=NOW - 60),
        stored("younger"),
    )
    order = ["quick", "large", "older", "younger", "slow", "quick and used"]
    assert names(choose(rows, max_bytes=0, now=NOW)) == order
    assert choose(rows, max_bytes=0, now=NOW).freed_bytes == 1500
    for limit, count in ((1500, 0), (1499, 1), (1400, 1), (1399, 2), (400, 2), (399, 3)):
        assert names(choose(rows, max_bytes=limit, now=NOW)) == order[:count]


def test_any_of_several_filters_removes_and_the_size_counts_what_they_leave() -> None:
    """What goes for its age makes room for what would have gone for its size."""
    rows = (stored("old", created_at=NOW - 500), stored("matching", preimage=b"x"), stored("cheap", build_s=0.1), stored("dear"))
    options: Any = {"older_than_s": 100.0, "matching": lambda one: one.preimage == b"x", "now": NOW}
    assert names(choose(rows, **options)) == ["old", "matching"]
    assert choose(rows, max_bytes=200, **options).kept_bytes == 200
    assert names(choose(rows, max_bytes=100, **options)) == ["old", "matching", "cheap"]
    assert choose(rows, everything=True, now=NOW) == Removal(rows, 0)


def test_an_age_is_exceeded_and_not_reached() -> None:
    """An entry goes when it is older than the limit; use makes young, and a new entry without uses is young."""
    row = stored(created_at=NOW - 100, last_used_at=NOW - 10)
    assert [bool(choose((row,), older_than_s=limit, now=NOW).chosen) for limit in (99.0, 100.0)] == [True, False]
    assert [bool(choose((row,), unused_since_s=limit, now=NOW).chosen) for limit in (9.0, 10.0)] == [True, False]
    never_used = stored(created_at=NOW - 100)
    assert [bool(choose((never_used,), unused_since_s=limit, now=NOW).chosen) for limit in (99.0, 100.0)] == [True, False]
    built_anew = stored(created_at=NOW - 10, last_used_at=NOW - 1000)
    assert not choose((built_anew,), unused_since_s=20.0, now=NOW).chosen


@pytest.mark.parametrize("limit_s", [0.0, 1.0, 1e12, -1.0])
def test_a_time_in_the_future_is_not_old(limit_s: float) -> None:
    """A clock that was set back or forward evicts nothing (ccache#512)."""
    rows = (stored(created_at=NOW + 1e9), stored(created_at=NOW + 1e9, last_used_at=NOW + 2e9))
    assert not choose(rows, older_than_s=limit_s, unused_since_s=limit_s, now=NOW).chosen


def test_a_use_in_the_future_keeps_an_entry() -> None:
    """It was used after the clock went wrong, whenever that was."""
    row = stored(created_at=NOW - 1000, last_used_at=NOW + 1e9)
    assert not choose((row,), unused_since_s=10.0, now=NOW).chosen


# ---- remove ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 7, 256])
def test_a_removal_does_what_it_foretold_and_the_file_shrinks(database: Database, batch: int) -> None:
    """The chosen rows are gone, the others are whole, and the file system has the space back, in both forms of file."""
    fill(database, 40)
    before = database.path.stat().st_size
    removal = choose(scan(database), matching=lambda one: int(one.created_at) % 4 > 0, now=NOW)
    foretold = Removed.foretold(removal)
    assert keys(database) == {key_of(number) for number in range(40)}  # a dry run
    removed = remove(database, removal, batch=batch)
    assert set(removed.entries) == set(foretold.entries)
    assert removed.freed_bytes == removal.freed_bytes > 30 * 20_000
    assert (removed.skipped, removed.changed) == ((), ())
    assert keys(database) == {key_of(number) for number in range(0, 40, 4)}
    assert sum(one.size_bytes for one in scan(database)) == removal.kept_bytes
    assert pragma(database, "freelist_count") == 0
    wal = database.path.with_name(database.path.name + "-wal")
    assert not wal.exists() or wal.stat().st_size == 0
    assert removed.returned_bytes >= removed.freed_bytes
    assert database.path.stat().st_size <= before - removed.freed_bytes * 0.9
    assert_good(database)


def test_the_space_comes_back_in_more_than_one_batch(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn frees as many pages as it may, not one and not all."""
    monkeypatch.setattr(module, "_VACUUM_PAGES", 16)
    counts: list[int] = []
    real = module._pages
    monkeypatch.setattr(module, "_pages", lambda connection: counts.append(real(connection)[0]) or real(connection))
    fill(database, 20)
    remove(database, choose(scan(database), everything=True, now=NOW))
    del counts[:2]  # before anything went
    steps = [before - after for before, after in zip(counts[::2], counts[1::2], strict=True)]
    assert len(steps) > 3
    assert set(steps[:-1]) == {16}
    assert 0 <= steps[-1] <= 16


def test_what_goes_with_an_entry_and_what_does_not(database: Database) -> None:
    """Uses, tags, quarantine and strikes of removed entries go; answers of cuDNN, and all that is about other entries, stay."""
    fill(database, 2)
    database.count_uses({key_of(0): 1, key_of(1): 1}, 5.0, "serve")
    kinds = ("quarantined", "struck", "unsupported", "unsupported without a GPU", "denied")
    for kind in kinds:
        for number in (0, 1):
            database.record(Verdict(kind, key_of(number), b"checksum", "", 1, 1.0))
    remove(database, choose(scan(database), matching=lambda one: one.key == key_of(0), now=NOW))
    assert {verdict.kind for verdict in database.verdicts(key_of(0))} == set(kinds[2:])
    assert {verdict.kind for verdict in database.verdicts(key_of(1))} == set(kinds)
    connection = database._connect()
    assert connection.execute("SELECT key FROM uses").fetchall() == [(key_of(1),)]
    assert [tagged.key for tagged in database.tags()] == [key_of(1)]
    connection.close()


@pytest.mark.parametrize("table", ["verdicts", "tags"])
def test_a_file_from_before_there_were_verdicts_or_tags_is_served_too(database: Database, table: str) -> None:
    """The table is not needed."""
    fill(database, 3)
    connection = database._connect()
    connection.execute(f"DROP TABLE {table}")
    connection.close()
    assert len(remove(database, choose(scan(database), everything=True, now=NOW)).entries) == 3


def test_a_row_that_changed_since_the_scan_stays(database: Database) -> None:
    """A better entry that took its place was not what was chosen; one that is gone is not counted twice."""
    fill(database, 3)
    database.count_uses({key_of(0): 1}, 5.0)
    removal = choose(scan(database), everything=True, now=NOW)
    database.put(numbered(0, quality="tuned"))
    remove(database, Removal(tuple(one for one in removal.chosen if one.key == key_of(1)), 0))
    removed = remove(database, removal)
    assert {one.key for one in removed.changed} == {key_of(0), key_of(1)}
    assert {one.key for one in removed.entries} == {key_of(2)}
    assert [(row.key, row.hits) for row in database.listing()] == [(key_of(0), 1)]


def test_a_damaged_row_goes_and_blocks_no_other(database: Database) -> None:
    """What is no number and no checksum is worth nothing and is deleted like any other."""
    fill(database, 3)
    connection = database._connect()
    connection.execute("UPDATE entries SET build_s = 'x', created_at = x'00', checksum = 7, preimage = 'y' WHERE key = ?", (key_of(1),))
    connection.execute("INSERT INTO uses VALUES (?, 'many', 'never')", (key_of(1),))
    connection.close()
    removal = choose(scan(database), max_bytes=30_000, unused_since_s=NOW * 2, now=NOW)
    assert len(remove(database, removal).entries) == 2
    assert keys(database) == {key_of(2)}


def test_what_is_in_use_is_skipped_and_said(database: Database) -> None:
    """Each key is asked about once."""
    fill(database, 6)
    asked: list[bytes] = []

    def in_use(key: bytes) -> bool:
        asked.append(key)
        return key in (key_of(1), key_of(4))

    removed = remove(database, choose(scan(database), everything=True, now=NOW), skip=in_use, batch=2)
    assert {one.key for one in removed.skipped} == {key_of(1), key_of(4)} == keys(database)
    assert sorted(asked) == sorted(key_of(number) for number in range(6))
    assert len(removed.entries) == 4


def test_a_key_that_comes_into_use_while_others_go_is_skipped(database: Database) -> None:
    """`skip` is asked just before each batch, not once at the beginning."""
    fill(database, 3)
    found_at_each: list[int] = []

    def watch(_: bytes) -> bool:
        found_at_each.append(len(keys(database)))
        return False

    remove(database, choose(scan(database), everything=True, now=NOW), skip=watch, batch=1)
    assert found_at_each == [3, 2, 1]


def test_other_writers_have_their_turn_between_batches(database: Database) -> None:
    """The writers' lock is free whenever the removal is not within a batch."""
    fill(database, 3)
    numbers = iter(range(100, 103))

    def put(_: bytes) -> bool:
        return not database.put(numbered(next(numbers)))

    remove(database, choose(scan(database), everything=True, now=NOW), skip=put, batch=1)
    assert keys(database) == {key_of(number) for number in range(100, 103)}


def test_a_reader_that_stays_delays_nothing_and_loses_nothing(cache_dir: Path) -> None:
    """With a WAL, a transaction that is open reads what it began with; the checkpoint is done in part and ends."""
    database = Database(cache_dir / "plans.sqlite3", lock_timeout_s=20)
    fill(database, 10)
    reader = database._connect()
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM entries").fetchone() == (10,)
    removed = remove(database, choose(scan(database), everything=True, now=NOW))
    assert len(removed.entries) == 10
    assert len(reader.execute("SELECT payload FROM entries").fetchall()) == 10
    reader.close()
    assert keys(database) == set()
    database.close()


def test_a_sealed_file_is_not_written(database: Database) -> None:
    """It may have been sealed since it was scanned."""
    fill(database, 2)
    removal = choose(scan(database), everything=True, now=NOW)
    connection = database._connect()
    connection.execute(f"PRAGMA application_id = {int.from_bytes(b'PlCs')}")
    connection.close()
    with pytest.raises(StoreError, match="sealed"):
        remove(database, removal)
    connection = database._connect()
    assert connection.execute("SELECT count(*) FROM entries").fetchone() == (2,)
    connection.close()


def test_a_hanging_writer_is_a_store_error_in_bounded_time(cache_dir: Path) -> None:
    """The lock's timeout is the database's; nothing is removed."""
    from filelock import FileLock

    database = Database(cache_dir / "plans.sqlite3", lock_timeout_s=0.05)
    fill(database, 1)
    with FileLock(cache_dir / "write.lock"), pytest.raises(StoreError, match=r"plans\.sqlite3"):
        remove(database, choose(scan(database), everything=True, now=NOW))
    assert keys(database) == {key_of(0)}
    database.close()


# ---- interrupted and killed -----------------------------------------------------------------------------------------


def test_an_interruption_between_batches_leaves_a_good_file(database: Database) -> None:
    """What was done is done, its space is given back already, and the rest stays."""
    fill(database, 30)
    before = database.path.stat().st_size
    removal = choose(scan(database), everything=True, now=NOW)
    asked: list[bytes] = []

    def interrupt(key: bytes) -> bool:
        asked.append(key)
        if len(asked) == 11:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        remove(database, removal, skip=interrupt, batch=5)
    assert len(keys(database)) == 20
    assert pragma(database, "freelist_count") == 0
    assert int(pragma(database, "page_count") * pragma(database, "page_size")) < before * 0.8
    assert_good(database)


def test_the_next_removal_gives_back_what_an_interrupted_one_left(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free pages are no longer of any entry: the removal that finds them gives them back, even where nothing else goes."""
    fill(database, 30)
    real = module._pages

    def interrupt(connection: Any) -> Any:
        if real(connection)[1]:
            raise KeyboardInterrupt
        return real(connection)

    monkeypatch.setattr(module, "_pages", interrupt)
    with pytest.raises(KeyboardInterrupt):
        remove(database, choose(scan(database), everything=True, now=NOW), batch=10)
    monkeypatch.undo()
    assert len(keys(database)) == 20
    assert pragma(database, "freelist_count") > 10 * 4
    assert_good(database)
    removed = remove(database, Removal((), 0))
    assert removed.entries == ()
    assert removed.returned_bytes > 10 * 20_000
    assert pragma(database, "freelist_count") == 0
    assert_good(database)


def test_an_interruption_within_a_batch_takes_it_back(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry and what goes with it go together or not at all."""
    fill(database, 4)
    database.count_uses({key_of(0): 1}, 5.0)
    monkeypatch.setattr(module, "DELETE_USES", "no statement")
    with pytest.raises(StoreError, match="syntax error"):
        remove(database, choose(scan(database), everything=True, now=NOW))
    assert [row.hits for row in database.listing()] == [1, 0, 0, 0]
    monkeypatch.undo()
    assert len(remove(database, choose(scan(database), everything=True, now=NOW)).entries) == 4


REMOVER = """
import sys
from pathlib import Path
from plancache.store import retention
from plancache.store.database import Database
retention._VACUUM_PAGES = 4
database = Database(Path(sys.argv[1]), lock_timeout_s=20)
removal = retention.choose(retention.scan(database), everything=True, now=1e9)
turns = retention._Turns.next
def told(self):
    print("turn", flush=True)
    return turns(self)
retention._Turns.next = told
retention.remove(database, removal, batch=4)
sys.stdin.readline()
"""


@pytest.mark.parametrize("turn", [1, 3, 8, 12])
def test_a_kill_leaves_a_good_file_and_no_lock(database: Database, turn: int) -> None:
    """kill -9 while rows are deleted (turns 2, 9, ...) or pages are given back (all others): batches went whole or not at all."""
    fill(database, 20)
    database.close()
    command = [sys.executable, "-c", REMOVER, str(database.path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(turn):
        assert process.stdout.readline() == "turn\n"
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    left = keys(database)
    assert len(left) % 4 == 0
    assert turn <= 2 or len(left) < 20  # it may have got further before the signal came
    assert_good(database)
    remove(database, choose(scan(database), everything=True, now=NOW))
    assert keys(database) == set()
    assert pragma(database, "freelist_count") == 0


READER = """
import sys
from pathlib import Path
from plancache.entry import unpack
from plancache.store.database import Database
database = Database(Path(sys.argv[1]), lock_timeout_s=60)
keys = [bytes.fromhex(text) for text in sys.argv[2].split(",")]
count = 0
while True:
    for key in keys:
        unpack(database.get(key))
    count += 1
    if count == 1:
        print("reading", flush=True)
        import threading
        done = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.readline(), done.set()), daemon=True).start()
    elif done.is_set():
        break
print("no error")
"""


def test_readers_of_other_processes_go_on(database: Database) -> None:
    """While entries go and pages move, every look-up of an entry that stays finds it whole."""
    fill(database, 120)
    staying = ",".join(key_of(number).hex() for number in range(0, 120, 3))
    command = [sys.executable, "-c", READER, str(database.path), staying]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    readers = [subprocess.Popen(command, text=True, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    assert [reader.stdout.readline() for reader in readers] == ["reading\n"] * 2
    remove(database, choose(scan(database), matching=lambda one: int(one.created_at) % 3 > 0, now=NOW), batch=4)
    assert [reader.communicate("stop\n", timeout=60) for reader in readers] == [("no error\n", "")] * 2
    assert len(keys(database)) == 40
    assert_good(database)


# ---- retain ---------------------------------------------------------------------------------------------------------


def used_bytes(database: Database) -> int:
    return int((pragma(database, "page_count") - pragma(database, "freelist_count")) * pragma(database, "page_size"))


def test_retaining_brings_the_file_down_to_90_percent(database: Database) -> None:
    """What is over goes, the least worth first, and not much more than must."""
    fill(database, 100)
    database.count_uses({key_of(number): 5 for number in range(50)}, 5.0)
    limit = used_bytes(database) * 3 // 4
    removed = retain(database, limit)
    assert removed is not None
    assert {one.hits for one in removed.entries} == {0}
    assert {key_of(number) for number in range(50)} <= keys(database)
    assert limit * 0.85 < database.path.stat().st_size <= limit * 0.92
    assert retain(database, limit) is None


def test_retaining_does_nothing_below_the_limit(database: Database) -> None:
    """At the limit nothing goes; free pages do not count, since new entries take them."""
    fill(database, 20)
    assert retain(database, used_bytes(database)) is None
    connection = database._connect()
    connection.execute("DELETE FROM entries WHERE created_at < 10")
    connection.close()
    assert retain(database, used_bytes(database)) is None
    assert len(keys(database)) == 10


def test_a_look_whether_there_is_too_much_reads_no_rows(database: Database) -> None:
    """It is done after a store, and may not cost a scan: nothing but SQLite's own counts is asked for."""
    fill(database, 3)
    with database._reading() as connection:
        assert connection is not None
        statements: list[str] = []
        connection.set_trace_callback(statements.append)
    assert retain(database, 1 << 40) is None
    assert [text for text in statements if not text.startswith("--")] == [module._SELECT_PAGES]
    connection.set_trace_callback(None)


def test_two_retain_the_same_file_together(cache_dir: Path) -> None:
    """Threads, as processes, take turns: nothing fails, nothing is counted twice, and not everything goes."""
    databases = [Database(cache_dir / "plans.sqlite3", lock_timeout_s=20) for _ in range(2)]
    fill(databases[0], 60)
    limit = used_bytes(databases[0]) // 2
    results: list[Removed | None] = []
    threads = [threading.Thread(target=lambda one=one: results.append(retain(one, limit))) for one in databases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    removed = [one.key for result in results if result for one in result.entries]
    assert len(removed) == len(set(removed)) == 60 - len(keys(databases[0]))
    assert len(keys(databases[0])) > 15
    assert_good(databases[0])
    for one in databases:
        one.close()
