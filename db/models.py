"""The tables of the database, as SQLAlchemy models.

Structured values are JSON text with sorted keys, so that a file can be read without this package. The
types are those that SQLite and PostgreSQL share.
"""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Text,
    TypeDecorator,
    UniqueConstraint,
    false,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

VERSION_TABLE = "mhctune_version"
"""Holds the schema revision; its presence says that a database is mhctune's."""


class UtcDateTime(TypeDecorator[datetime]):
    """A moment in UTC; SQLite has no time zones, so they are put back when read."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert to UTC on the way in."""
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Make naive values aware on the way out."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    """The schema; constraints get fixed names so that migrations can name them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012  (SQLAlchemy reads it from the class)
        str: Text,
        int: Integer,
        float: Double,
        datetime: UtcDateTime,
    }


class Keyed(Base):
    """A table whose rows have a number."""

    __abstract__ = True

    id: Mapped[int] = mapped_column(primary_key=True, sort_order=-1)


class GpuRow(Keyed):
    """A kind of device."""

    __tablename__ = "gpus"
    __table_args__ = (UniqueConstraint("name", "sm_count", "memory_gib", "mig"),)

    name: Mapped[str]
    sm_count: Mapped[int]
    memory_gib: Mapped[int]
    mig: Mapped[str]


class ToolchainRow(Keyed):
    """What compiled, launched and timed."""

    __tablename__ = "toolchains"
    __table_args__ = (
        UniqueConstraint(
            "driver",
            "cuda",
            "compiler",
            "torch",
            "tilelang",
            "pass_config",
            "compile_flags",
            "protocol",
            name="uq_toolchains_all",
        ),
    )

    driver: Mapped[str]
    cuda: Mapped[str]
    compiler: Mapped[str]
    torch: Mapped[str]
    tilelang: Mapped[str]
    pass_config: Mapped[str]
    compile_flags: Mapped[str]
    protocol: Mapped[int]


class KernelSourceRow(Keyed):
    """A state of an arm's source files that was swept."""

    __tablename__ = "kernel_sources"
    __table_args__ = (UniqueConstraint("seam", "arm", "target", "source_hash"),)

    seam: Mapped[str]
    arm: Mapped[str]
    target: Mapped[str]
    source_hash: Mapped[str]


class ProblemRow(Keyed):
    """What was fixed; the digest is the problem's, which several seams may share."""

    __tablename__ = "problems"
    __table_args__ = (UniqueConstraint("digest", "seam"),)

    digest: Mapped[str]
    seam: Mapped[str]
    problem: Mapped[str]


class CandidateRow(Keyed):
    """An arm and its config; `config` is `Candidate.key`."""

    __tablename__ = "candidates"
    __table_args__ = (UniqueConstraint("arm", "config"),)

    arm: Mapped[str]
    config: Mapped[str]


class SweepRow(Keyed):
    """One sweep, finished or not."""

    __tablename__ = "sweeps"
    __table_args__ = (
        CheckConstraint("state IN ('running', 'interrupted', 'incomplete', 'complete')", name="state"),
        Index(None, "digest"),
        Index(None, "problem_id"),
    )

    digest: Mapped[str]
    state: Mapped[str]
    gpu_id: Mapped[int] = mapped_column(ForeignKey("gpus.id"))
    toolchain_id: Mapped[int] = mapped_column(ForeignKey("toolchains.id"))
    problem_id: Mapped[int] = mapped_column(ForeignKey("problems.id"))
    source_hash: Mapped[str]
    sources: Mapped[str]
    target: Mapped[str]
    token_counts: Mapped[str]
    grid: Mapped[int]
    space: Mapped[str]
    variants: Mapped[str]
    protocol: Mapped[str]
    bound: Mapped[float]
    search: Mapped[str | None]
    """What is searched, as JSON; NULL where every arm is enumerated."""
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]

    gpu: Mapped[GpuRow] = relationship(lazy="joined")
    toolchain: Mapped[ToolchainRow] = relationship(lazy="joined")
    problem: Mapped[ProblemRow] = relationship(lazy="joined")
    floors: Mapped[list[FloorRow]] = relationship(lazy="selectin", order_by="FloorRow.num_tokens")


class TrialRow(Keyed):
    """One candidate in one cell."""

    __tablename__ = "trials"
    __table_args__ = (
        UniqueConstraint("sweep_id", "num_tokens", "candidate_id"),
        CheckConstraint("state IN ('racing', 'measured', 'failed')", name="state"),
        CheckConstraint("(state = 'failed') = (failure_kind IS NOT NULL)", name="failure"),
        # Covers the counts of a sweep, so that a status does not read a million rows.
        Index(None, "sweep_id", "state", "failure_kind"),
        Index(None, "candidate_id"),
    )

    sweep_id: Mapped[int] = mapped_column(ForeignKey("sweeps.id"))
    num_tokens: Mapped[int]
    candidate_id: Mapped[int] = mapped_column(ForeignKey("candidates.id"))
    state: Mapped[str]
    failure_kind: Mapped[str | None]
    failure_detail: Mapped[str | None]
    input_bytes: Mapped[int] = mapped_column(BigInteger)
    output_bytes: Mapped[int] = mapped_column(BigInteger)
    scratch_bytes: Mapped[int] = mapped_column(BigInteger)
    graph_bytes: Mapped[int] = mapped_column(BigInteger)
    measured_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime]


class Timed(Base):
    """One timed replay. Kept in key order: a trial's lie together on disk."""

    __abstract__ = True
    __table_args__ = {"sqlite_with_rowid": False}  # noqa: RUF012  (SQLAlchemy reads it from the class)

    trial_id: Mapped[int] = mapped_column(ForeignKey("trials.id"), primary_key=True)
    batch: Mapped[int] = mapped_column(primary_key=True)
    round: Mapped[int] = mapped_column(primary_key=True)
    position: Mapped[int]
    launches: Mapped[int]
    latency_us: Mapped[float]
    sm_clock_mhz: Mapped[int | None]
    throttled: Mapped[bool] = mapped_column(server_default=false())


class SampleRow(Timed):
    """A sample of a trial."""

    __tablename__ = "samples"


class TwinRow(Timed):
    """A sample of a trial's twin: the other A of A/A to the trial's own sample of that round."""

    __tablename__ = "twins"


class ConditionsRow(Base):
    """What the device was like in one round; `reasons` is a JSON list of names."""

    __tablename__ = "conditions"
    __table_args__ = {"sqlite_with_rowid": False}  # noqa: RUF012  (SQLAlchemy reads it from the class)

    sweep_id: Mapped[int] = mapped_column(ForeignKey("sweeps.id"), primary_key=True)
    num_tokens: Mapped[int] = mapped_column(primary_key=True)
    batch: Mapped[int] = mapped_column(primary_key=True)
    round: Mapped[int] = mapped_column(primary_key=True)
    source: Mapped[str]
    sm_clock_mhz: Mapped[int | None]
    temperature_c: Mapped[int | None]
    reasons: Mapped[str]
    other_processes: Mapped[int | None]


class FloorRow(Base):
    """What a copy of a cell's fewest bytes took, in the same kind of graph as its candidates."""

    __tablename__ = "floors"
    __table_args__ = {"sqlite_with_rowid": False}  # noqa: RUF012  (SQLAlchemy reads it from the class)

    sweep_id: Mapped[int] = mapped_column(ForeignKey("sweeps.id"), primary_key=True)
    num_tokens: Mapped[int] = mapped_column(primary_key=True)
    floor_us: Mapped[float]


class DispatchTableRow(Keyed):
    """A published table; `content` is `DispatchTable.to_dict()` and decides, the bands repeat it for SQL."""

    __tablename__ = "dispatch_tables"
    __table_args__ = (Index(None, "sweep_id"), Index(None, "digest"))

    sweep_id: Mapped[int] = mapped_column(ForeignKey("sweeps.id"))
    digest: Mapped[str]
    numerics: Mapped[str]
    bound: Mapped[float]
    content: Mapped[str]
    created_at: Mapped[datetime]


class BandRow(Base):
    """One band of a published table."""

    __tablename__ = "bands"

    table_id: Mapped[int] = mapped_column(ForeignKey("dispatch_tables.id"), primary_key=True)
    first: Mapped[int] = mapped_column(primary_key=True)
    last: Mapped[int]
    arm: Mapped[str]
    config: Mapped[str]
    evidence: Mapped[str]


class GateRunRow(Keyed):
    """One comparison by the CI gate."""

    __tablename__ = "gate_runs"
    __table_args__ = (Index(None, "table_id"),)

    table_id: Mapped[int] = mapped_column(ForeignKey("dispatch_tables.id"))
    verdict: Mapped[str]
    detail: Mapped[str]
    created_at: Mapped[datetime]
