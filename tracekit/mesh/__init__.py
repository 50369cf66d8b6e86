"""Mesh axes, rank coordinates, process groups and where they lie on nodes."""
