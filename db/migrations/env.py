"""Run by Alembic: migrates on the connection that `mhctune.db.schema` passes in."""

from alembic import context

from mhctune.db.models import VERSION_TABLE, Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    # SQLite cannot alter most things in place; Alembic copies the table instead.
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
