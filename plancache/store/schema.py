"""The tables, declared once, and the statements over them. Migrations alone make tables."""

from __future__ import annotations

from sqlalchemy import BLOB, Column, Float, Integer, MetaData, Select, Table, Text, bindparam, func, or_, select
from sqlalchemy.dialects.sqlite import Insert, insert

metadata = MetaData()

entries = Table(
    "entries",
    metadata,
    Column("key", BLOB, primary_key=True),
    Column("preimage", BLOB, nullable=False),
    Column("facts", BLOB, nullable=False),
    Column("payload", BLOB, nullable=False),
    Column("checksum", BLOB, nullable=False),
    # derived from facts, for statements that choose among entries; the checksum is over facts
    Column("quality", Integer, nullable=False),
    Column("build_s", Float, nullable=False),
    Column("created_at", Float, nullable=False),
)

uses = Table(  # apart from the blobs: 1,000 counts write 8 kB of WAL here, 4.1 MB there
    "uses",
    metadata,
    Column("key", BLOB, primary_key=True),
    Column("hits", Integer, nullable=False),
    Column("last_used_at", Float, nullable=False),
)


verdicts = Table(  # what is known beside the entries: by key, and by checksum where it is of one stored row
    "verdicts",
    metadata,
    Column("kind", Text, primary_key=True),
    Column("key", BLOB, primary_key=True),
    Column("checksum", BLOB, primary_key=True),
    Column("reason", Text, nullable=False),
    Column("count", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
)

tags = Table(  # the programs that asked for a key, by the names that they gave themselves
    "tags",
    metadata,
    Column("key", BLOB, primary_key=True),
    Column("tag", Text, primary_key=True),
    Column("hits", Integer, nullable=False),
    Column("last_used_at", Float, nullable=False),
)

compatibility = Table("compatibility", metadata, Column("min_reader", Integer, primary_key=True, autoincrement=False))


def select_entry() -> Select[tuple[bytes, bytes, bytes, bytes, bytes]]:
    """One whole row by key."""
    c = entries.c
    return select(c.key, c.preimage, c.facts, c.payload, c.checksum).where(c.key == bindparam("key"))


def select_listing() -> Select[tuple[bytes, bytes, bytes, int, int, float]]:
    """All rows without their payloads, with their use counts. Whoever reads them sorts them: SQLite would copy all of each row."""
    c = entries.c
    size, hits = func.length(c.payload).label("size_bytes"), func.coalesce(uses.c.hits, 0).label("hits")
    joined = entries.outerjoin(uses, uses.c.key == c.key)
    return select(c.key, c.preimage, c.facts, size, hits, uses.c.last_used_at, c.created_at).select_from(joined)


def insert_entry(*, replace_equal: bool) -> Insert:
    """Stores a row. One that is there gives way to a better one, to an equal one where asked, and, whatever it is,
    where its checksum is the one `condemned`, or none at all; never to a lesser."""
    statement = insert(entries)
    new = statement.excluded
    better = entries.c.quality <= new.quality if replace_equal else entries.c.quality < new.quality
    columns = {column.name: new[column.name] for column in entries.columns if not column.primary_key}
    return statement.on_conflict_do_update(
        index_elements=[entries.c.key],
        set_=columns,
        where=or_(better, entries.c.checksum == bindparam("condemned"), func.typeof(entries.c.checksum) != "blob"),
    )


def count_use() -> Insert:
    """Adds to the use counter of a key."""
    statement = insert(uses)
    new = statement.excluded
    return statement.on_conflict_do_update(
        index_elements=[uses.c.key], set_={"hits": uses.c.hits + new.hits, "last_used_at": new.last_used_at}
    )


def select_tags() -> Select[tuple[bytes, str, int, float]]:
    """Which programs asked for which keys."""
    return select(tags.c.key, tags.c.tag, tags.c.hits, tags.c.last_used_at)


def select_tagged() -> Select[tuple[bytes, bytes, bytes, bytes, bytes]]:
    """The entries that a program asked for."""
    c = entries.c
    joined = entries.join(tags, tags.c.key == c.key)
    return select(c.key, c.preimage, c.facts, c.payload, c.checksum).select_from(joined).where(tags.c.tag == bindparam("tag"))


def count_tag() -> Insert:
    """Adds to a program's use counter of a key."""
    statement = insert(tags)
    new = statement.excluded
    return statement.on_conflict_do_update(
        index_elements=[tags.c.key, tags.c.tag], set_={"hits": tags.c.hits + new.hits, "last_used_at": new.last_used_at}
    )


def select_verdicts() -> Select[tuple[str, bytes, bytes, str, int, float]]:
    """All verdicts, oldest first."""
    c = verdicts.c
    return select(c.kind, c.key, c.checksum, c.reason, c.count, c.created_at).order_by(c.created_at, c.kind, c.key)


def select_verdicts_of() -> Select[tuple[str, bytes, bytes, str, int, float]]:
    """The verdicts on a key."""
    c = verdicts.c
    return select(c.kind, c.key, c.checksum, c.reason, c.count, c.created_at).where(c.key == bindparam("key"))


def record_verdict() -> Insert:
    """Stores a verdict; one that is there is counted once more."""
    statement = insert(verdicts)
    new = statement.excluded
    return statement.on_conflict_do_update(
        index_elements=[verdicts.c.kind, verdicts.c.key, verdicts.c.checksum],
        set_={"reason": new.reason, "count": verdicts.c.count + new.count, "created_at": new.created_at},
    )
