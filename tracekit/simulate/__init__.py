"""Numeric experiments: virtual ranks in one process, NumPy only, every result compared with the unsharded computation."""
