"""What a person wrote down: GPUs, models, sweeps and recorded measurements."""
