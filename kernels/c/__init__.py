"""TileLang kernels for the C backend: any machine with gcc."""
