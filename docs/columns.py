"""Write the tables of docs/json.md that follow from the columns of the program's own tables.

    python docs/columns.py            rewrite them
    python docs/columns.py --check    say which are out of date, with exit code 1

A table stands between ``<!-- columns tracekit.analyses.breakdown.BREAKDOWN -->`` and ``<!-- end -->``.
"""

import re
import sys
from importlib import import_module
from pathlib import Path

PAGE = Path(__file__).with_name("json.md")
_BLOCK = re.compile(r"(<!-- columns (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def written(text: str) -> str:
    """The page with every table as the program has it now."""

    def block(found: re.Match[str]) -> str:
        module, _, name = found[2].rpartition(".")
        return found[1] + "\n".join(getattr(import_module(module), name).documented()) + "\n" + found[3]

    return _BLOCK.sub(block, text)


if __name__ == "__main__":
    before = PAGE.read_text(encoding="utf-8")
    after = written(before)
    if "--check" in sys.argv:
        sys.exit(0 if before == after else "docs/json.md does not follow the columns: run python docs/columns.py")
    PAGE.write_text(after, encoding="utf-8")
