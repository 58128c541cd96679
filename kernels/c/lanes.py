"""The width of an accumulator on the C backend; no TileLang, so that spaces can be listed without it."""

LANES = 16
"""fp32 lanes: one AVX-512 register, two of AVX2. gcc keeps a lane-shaped accumulator in registers; the lanes
are summed at the end in a fixed order."""
