"""What is known beside the entries, and which versions may read this file."""

import sqlalchemy as sa
from alembic import op

revision = "0002_verdicts"
down_revision = "0001_entries"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "verdicts",
        sa.Column("kind", sa.Text, primary_key=True),
        sa.Column("key", sa.BLOB, primary_key=True),
        sa.Column("checksum", sa.BLOB, primary_key=True),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("count", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    compatibility = op.create_table("compatibility", sa.Column("min_reader", sa.Integer, primary_key=True, autoincrement=False))
    op.bulk_insert(compatibility, [{"min_reader": 1}])
