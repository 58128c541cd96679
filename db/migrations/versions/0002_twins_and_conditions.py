"""Twins for the noise floor, and the conditions of each round."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Not in a batch, which copies the table: SQLite adds a column with a constant default in place.
    op.add_column("samples", sa.Column("throttled", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.create_table(
        "twins",
        sa.Column("trial_id", sa.Integer(), nullable=False),
        sa.Column("batch", sa.Integer(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("launches", sa.Integer(), nullable=False),
        sa.Column("latency_us", sa.Double(), nullable=False),
        sa.Column("sm_clock_mhz", sa.Integer(), nullable=True),
        sa.Column("throttled", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.id"], name=op.f("fk_twins_trial_id")),
        sa.PrimaryKeyConstraint("trial_id", "batch", "round", name=op.f("pk_twins")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "conditions",
        sa.Column("sweep_id", sa.Integer(), nullable=False),
        sa.Column("num_tokens", sa.Integer(), nullable=False),
        sa.Column("batch", sa.Integer(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("sm_clock_mhz", sa.Integer(), nullable=True),
        sa.Column("temperature_c", sa.Integer(), nullable=True),
        sa.Column("reasons", sa.Text(), nullable=False),
        sa.Column("other_processes", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["sweep_id"], ["sweeps.id"], name=op.f("fk_conditions_sweep_id")),
        sa.PrimaryKeyConstraint("sweep_id", "num_tokens", "batch", "round", name=op.f("pk_conditions")),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    op.drop_table("conditions")
    op.drop_table("twins")
    op.drop_column("samples", "throttled")
