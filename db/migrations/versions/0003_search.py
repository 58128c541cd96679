"""What of a sweep is searched, and what was proposed so far."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sweeps", sa.Column("search", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("sweeps", "search")
