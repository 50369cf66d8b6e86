"""The tables of all ranks joined into one job."""
