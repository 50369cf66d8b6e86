"""Allocated memory over time, its peak, and who owns every live byte."""
