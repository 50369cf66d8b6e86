"""Doors to other tools: one merged trace for Perfetto, tables as files or for SQL, frames for Holistic Trace Analysis."""
