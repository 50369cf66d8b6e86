"""tracekit reads the profiler traces of a distributed PyTorch job and explains where time and bytes went."""

__version__ = "0.1.0"
