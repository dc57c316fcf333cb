"""Which programs asked for a plan."""

import sqlalchemy as sa
from alembic import op

revision = "0003_tags"
down_revision = "0002_verdicts"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "tags",
        sa.Column("key", sa.BLOB, primary_key=True),
        sa.Column("tag", sa.Text, primary_key=True),
        sa.Column("hits", sa.Integer, nullable=False),
        sa.Column("last_used_at", sa.Float, nullable=False),
    )
