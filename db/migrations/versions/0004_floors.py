"""The floor of each cell: what a copy of its fewest bytes took."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "floors",
        sa.Column("sweep_id", sa.Integer(), nullable=False),
        sa.Column("num_tokens", sa.Integer(), nullable=False),
        sa.Column("floor_us", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["sweep_id"], ["sweeps.id"], name=op.f("fk_floors_sweep_id")),
        sa.PrimaryKeyConstraint("sweep_id", "num_tokens", name=op.f("pk_floors")),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    op.drop_table("floors")
