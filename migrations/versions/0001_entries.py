"""Entries and their use counters."""

import sqlalchemy as sa
from alembic import op

revision = "0001_entries"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "entries",
        sa.Column("key", sa.BLOB, primary_key=True),
        sa.Column("preimage", sa.BLOB, nullable=False),
        sa.Column("facts", sa.BLOB, nullable=False),
        sa.Column("payload", sa.BLOB, nullable=False),
        sa.Column("checksum", sa.BLOB, nullable=False),
        sa.Column("quality", sa.Integer, nullable=False),
        sa.Column("build_s", sa.Float, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_table(
        "uses",
        sa.Column("key", sa.BLOB, primary_key=True),
        sa.Column("hits", sa.Integer, nullable=False),
        sa.Column("last_used_at", sa.Float, nullable=False),
    )
