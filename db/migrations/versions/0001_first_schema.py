"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "candidates",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("arm", sa.Text(), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_candidates")),
        sa.UniqueConstraint("arm", "config", name=op.f("uq_candidates_arm_config")),
    )
    op.create_table(
        "gpus",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("sm_count", sa.Integer(), nullable=False),
        sa.Column("memory_gib", sa.Integer(), nullable=False),
        sa.Column("mig", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gpus")),
        sa.UniqueConstraint(
            "name", "sm_count", "memory_gib", "mig", name=op.f("uq_gpus_name_sm_count_memory_gib_mig")
        ),
    )
    op.create_table(
        "kernel_sources",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("seam", sa.Text(), nullable=False),
        sa.Column("arm", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("source_hash", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_kernel_sources")),
        sa.UniqueConstraint(
            "seam", "arm", "target", "source_hash", name=op.f("uq_kernel_sources_seam_arm_target_source_hash")
        ),
    )
    op.create_table(
        "problems",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("seam", sa.Text(), nullable=False),
        sa.Column("problem", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_problems")),
        sa.UniqueConstraint("digest", "seam", name=op.f("uq_problems_digest_seam")),
    )
    op.create_table(
        "toolchains",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("driver", sa.Text(), nullable=False),
        sa.Column("cuda", sa.Text(), nullable=False),
        sa.Column("compiler", sa.Text(), nullable=False),
        sa.Column("torch", sa.Text(), nullable=False),
        sa.Column("tilelang", sa.Text(), nullable=False),
        sa.Column("pass_config", sa.Text(), nullable=False),
        sa.Column("compile_flags", sa.Text(), nullable=False),
        sa.Column("protocol", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_toolchains")),
        sa.UniqueConstraint(
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
    op.create_table(
        "sweeps",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("gpu_id", sa.Integer(), nullable=False),
        sa.Column("toolchain_id", sa.Integer(), nullable=False),
        sa.Column("problem_id", sa.Integer(), nullable=False),
        sa.Column("source_hash", sa.Text(), nullable=False),
        sa.Column("sources", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("token_counts", sa.Text(), nullable=False),
        sa.Column("grid", sa.Integer(), nullable=False),
        sa.Column("space", sa.Text(), nullable=False),
        sa.Column("variants", sa.Text(), nullable=False),
        sa.Column("protocol", sa.Text(), nullable=False),
        sa.Column("bound", sa.Double(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "state IN ('running', 'interrupted', 'incomplete', 'complete')", name=op.f("ck_sweeps_state")
        ),
        sa.ForeignKeyConstraint(["gpu_id"], ["gpus.id"], name=op.f("fk_sweeps_gpu_id")),
        sa.ForeignKeyConstraint(["problem_id"], ["problems.id"], name=op.f("fk_sweeps_problem_id")),
        sa.ForeignKeyConstraint(["toolchain_id"], ["toolchains.id"], name=op.f("fk_sweeps_toolchain_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sweeps")),
    )
    op.create_index(op.f("ix_sweeps_digest"), "sweeps", ["digest"], unique=False)
    op.create_index(op.f("ix_sweeps_problem_id"), "sweeps", ["problem_id"], unique=False)
    op.create_table(
        "dispatch_tables",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("sweep_id", sa.Integer(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("numerics", sa.Text(), nullable=False),
        sa.Column("bound", sa.Double(), nullable=False),
        sa.Column("content", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["sweep_id"], ["sweeps.id"], name=op.f("fk_dispatch_tables_sweep_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_dispatch_tables")),
    )
    op.create_index(op.f("ix_dispatch_tables_digest"), "dispatch_tables", ["digest"], unique=False)
    op.create_index(op.f("ix_dispatch_tables_sweep_id"), "dispatch_tables", ["sweep_id"], unique=False)
    op.create_table(
        "trials",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("sweep_id", sa.Integer(), nullable=False),
        sa.Column("num_tokens", sa.Integer(), nullable=False),
        sa.Column("candidate_id", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("failure_kind", sa.Text(), nullable=True),
        sa.Column("failure_detail", sa.Text(), nullable=True),
        sa.Column("input_bytes", sa.BigInteger(), nullable=False),
        sa.Column("output_bytes", sa.BigInteger(), nullable=False),
        sa.Column("scratch_bytes", sa.BigInteger(), nullable=False),
        sa.Column("graph_bytes", sa.BigInteger(), nullable=False),
        sa.Column("measured_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("(state = 'failed') = (failure_kind IS NOT NULL)", name=op.f("ck_trials_failure")),
        sa.CheckConstraint("state IN ('racing', 'measured', 'failed')", name=op.f("ck_trials_state")),
        sa.ForeignKeyConstraint(["candidate_id"], ["candidates.id"], name=op.f("fk_trials_candidate_id")),
        sa.ForeignKeyConstraint(["sweep_id"], ["sweeps.id"], name=op.f("fk_trials_sweep_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_trials")),
        sa.UniqueConstraint(
            "sweep_id", "num_tokens", "candidate_id", name=op.f("uq_trials_sweep_id_num_tokens_candidate_id")
        ),
    )
    op.create_index(op.f("ix_trials_candidate_id"), "trials", ["candidate_id"], unique=False)
    op.create_index(
        op.f("ix_trials_sweep_id_state_failure_kind"),
        "trials",
        ["sweep_id", "state", "failure_kind"],
        unique=False,
    )
    op.create_table(
        "bands",
        sa.Column("table_id", sa.Integer(), nullable=False),
        sa.Column("first", sa.Integer(), nullable=False),
        sa.Column("last", sa.Integer(), nullable=False),
        sa.Column("arm", sa.Text(), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("evidence", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["table_id"], ["dispatch_tables.id"], name=op.f("fk_bands_table_id")),
        sa.PrimaryKeyConstraint("table_id", "first", name=op.f("pk_bands")),
    )
    op.create_table(
        "gate_runs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("table_id", sa.Integer(), nullable=False),
        sa.Column("verdict", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["table_id"], ["dispatch_tables.id"], name=op.f("fk_gate_runs_table_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gate_runs")),
    )
    op.create_index(op.f("ix_gate_runs_table_id"), "gate_runs", ["table_id"], unique=False)
    op.create_table(
        "samples",
        sa.Column("trial_id", sa.Integer(), nullable=False),
        sa.Column("batch", sa.Integer(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("launches", sa.Integer(), nullable=False),
        sa.Column("latency_us", sa.Double(), nullable=False),
        sa.Column("sm_clock_mhz", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.id"], name=op.f("fk_samples_trial_id")),
        sa.PrimaryKeyConstraint("trial_id", "batch", "round", name=op.f("pk_samples")),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    op.drop_table("samples")
    op.drop_index(op.f("ix_gate_runs_table_id"), table_name="gate_runs")
    op.drop_table("gate_runs")
    op.drop_table("bands")
    op.drop_index(op.f("ix_trials_sweep_id_state_failure_kind"), table_name="trials")
    op.drop_index(op.f("ix_trials_candidate_id"), table_name="trials")
    op.drop_table("trials")
    op.drop_index(op.f("ix_dispatch_tables_sweep_id"), table_name="dispatch_tables")
    op.drop_index(op.f("ix_dispatch_tables_digest"), table_name="dispatch_tables")
    op.drop_table("dispatch_tables")
    op.drop_index(op.f("ix_sweeps_problem_id"), table_name="sweeps")
    op.drop_index(op.f("ix_sweeps_digest"), table_name="sweeps")
    op.drop_table("sweeps")
    op.drop_table("toolchains")
    op.drop_table("problems")
    op.drop_table("kernel_sources")
    op.drop_table("gpus")
    op.drop_table("candidates")
