"""``python -m tracekit``."""

from tracekit.cli.main import main

main()
