"""``map(function, items)`` over processes, threads or a cluster."""
