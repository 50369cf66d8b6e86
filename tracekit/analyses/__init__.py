"""One file an analysis: ``analyze(job)`` and, where raw events are needed, ``reduce(activity)``."""
