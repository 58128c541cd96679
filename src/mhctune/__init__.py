"""mhctune: an offline autotuner with a persisted tuning database for fused mHC kernels."""
