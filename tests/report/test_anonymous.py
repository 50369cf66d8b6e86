"""What is sent on without hosts, paths and names of the program."""

import pandas as pd

from tests.report.example import Given, job
from tracekit.findings import Finding, Section, Table, Timeline, Treemap
from tracekit.report import html
from tracekit.report.anonymous import Anonymous
from tracekit.report.document import document
from tracekit.report.encoding import encode
from tracekit.trace.events import Coverage

SECRET = "acme::SecretAttention"
KERNELS = [{"name": SECRET, "total_us": 3.0}, {"name": "aten::mm", "total_us": 2.0}]


def given() -> Given:
    spans = pd.DataFrame({"lane": ["rank 0 stream 7"], "start_us": [0.0], "end_us": [1.0], "name": [SECRET], "category": ["compute"]})
    table = Table("Kernels", pd.DataFrame({"name": [SECRET, "aten::mm"], "us": [3.0, 2.0]}), {"name": "Kernel", "us": "Total [us]"})
    tree = Treemap("Peak", [["activations", "acme.layers.3"]], [1.0], "bytes")
    finding = Finding("kernels.uneven", "warning", f"Kernel {SECRET} is slow in /home/ann/run7/rank0.json, bytes are not.", advice="Look.")
    return Given([finding], [Section("Kernels", f"About {SECRET}.", (table, tree, Timeline("t", spans)))], {"kernels": KERNELS})


def hidden() -> tuple[str, str]:
    """(JSON, page)."""
    whole = job(coverage=[Coverage("/home/ann/run7/rank0.json", 0, events=3)])
    results = {"kernels": given()}
    aliases = Anonymous(whole)
    aliases.learn(results)
    found = aliases.plain(document(whole, results))
    page = html.render({name: aliases.result(result) for name, result in results.items()}, found, "plotly.min.js")
    return encode(found).decode(), page


def test_no_path_and_no_name_of_the_program_is_left() -> None:
    for text in hidden():
        assert not [secret for secret in ("ann", "run7", "acme", "SecretAttention", "layers.3") if secret in text.replace("channel", "")]


def test_what_everybody_knows_stays_and_one_name_has_one_alias() -> None:
    found, page = hidden()
    assert "aten::mm" in found and "aten::mm" in page
    assert '"name":"name-1"' in found and "Kernel name-1 is slow in file-1.json, bytes are not." in found
    assert '"file":"file-1.json"' in found
