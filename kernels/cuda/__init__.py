"""TileLang kernels for CUDA: sm_90 and later."""
