"""The odd inputs that lie beside the project, each against its own expected.json; skipped where the folder is absent.

Each kind also has a test with an input of the project's own, in the room that handles it.
"""

import json
from collections import Counter

import pytest

from tests.real import CASES
from tracekit import analyses
from tracekit.errors import TracekitError
from tracekit.job.load import LoadOptions, load_job
from tracekit.job.model import Job
from tracekit.notes import sentences
from tracekit.report.document import document

pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason="no folder of cases beside the project")


class Case:
    """A case, analyzed: its job, the JSON of analyze, and everything that is said to the user."""

    def __init__(self, start: str) -> None:
        self.folder = next(CASES.glob(start + "_*"))
        self.expect = json.loads((self.folder / "expected.json").read_text())
        self.want = self.expect.get("expect", self.expect.get("right"))
        paths = [str(p) for p in sorted(self.folder.iterdir()) if p.name != "expected.json"]
        self.job: Job = load_job(paths, LoadOptions(), analyses.reducers())
        self.json = document(self.job, analyses.run(self.job))
        self.said = " ".join([*sentences(self.job.notes), *(f"{c.file}: {p}" for c in self.job.coverage for p in c.problems)])

    def operations(self, **where):
        frame = self.job.operations
        for column, value in where.items():
            frame = frame[frame[column] == value]
        return frame

    def column(self, name, **where):
        return self.operations(**where)[name].tolist()

    def skews(self):
        """First to last arrival of each match, in us."""
        return ((self.job.matches["last_start_ns"] - self.job.matches["first_start_ns"]) / 1000).tolist()

    def breakdown(self, key):
        return [row[key] for row in self.json["breakdown"]]


PARSED = ("P01", "P03", "P04", "P06", "P07", "P09", "P10", "P11", "P12", "P14", "P16")
TIMED = ("T01", "T04", "T05", "T06", "T08", "T09", "T11", "T12", "T14")
GROUPED = ("G01", "G02", "G04", "G05", "G07", "G08", "G10", "G12", "G14")
COLLECTIVE = ("C01", "C03", "C05", "C07", "C08", "C11", "C14")
_cache: dict[str, Case] = {}


def case(name: str) -> Case:
    if name not in _cache:
        _cache[name] = Case(name)
    return _cache[name]


@pytest.mark.parametrize("name", [*PARSED, *TIMED, *GROUPED, *COLLECTIVE, "R01"])
def test_what_must_be_said_is_said(name):
    c = case(name)
    missing = [word for word in c.expect.get("message_must_mention", []) if word not in c.said]
    assert not missing, c.said


@pytest.mark.parametrize("name", ["P01", "P03", "P11", "T11"])
def test_facts_survive_repairs(name):
    c = case(name)
    assert c.breakdown("compute_us") == [c.want["compute_kernel_us"]]
    assert [e + h for e, h in zip(c.breakdown("exposed_comm_us"), c.breakdown("hidden_comm_us"), strict=True)] == [c.want["nccl_kernel_us"]]


def test_p07_truncated():
    c = case("P07")
    by_rank = {f.rank: f for f in c.job.coverage}
    assert [r for r in by_rank if r is not None and by_rank[r].status == "truncated"] == [1, 2]
    assert by_rank[1].events + by_rank[1].arrows == c.want["rank1_complete_events_before_cut"]
    assert sorted(c.column("rank")) == c.want["allreduce_ranks_seen"]
    assert c.job.matches["complete"].tolist() == [False]


def test_p09_packing():
    c = case("P09")
    got = {str(r): (e - s) / 1000 for r, s, e in c.operations()[["rank", "start_ns", "end_ns"]].itertuples(index=False)}
    assert got == c.want["allreduce_us_by_rank"]


def test_p10_empty():
    c = case("P10")
    assert c.job.ranks == c.want["ranks_with_data"]
    assert sorted(f.file.rsplit("/")[-1] for f in c.job.coverage if f.status == "skipped") == c.want["files_without_events"]


def test_p12_numbers_as_strings():
    c = case("P12")
    assert c.skews() == [c.want["arrival_skew_us"]]
    assert c.column("full_bytes") == [c.want["allreduce_bytes"]] * 2


def test_p14_duplicate_keys():
    c = case("P14")
    assert c.column("stream", rank=1) == [c.want["rank1_nccl_stream"]]


def test_p16_torch_18():
    c = case("P16")
    assert c.breakdown("compute_us") == [c.want["compute_kernel_us"]]
    assert c.breakdown("hidden_comm_us") == [c.want["overlap_comm_compute_us"]]


@pytest.mark.parametrize("name", ["T01", "G01", "G02", "G10"])
def test_skew_of_the_one_collective(name):
    assert case(name).skews() == [case(name).want["allreduce_start_skew_us"]]


def test_ranks_of_files():
    for name in ("G01", "G02", "G10"):
        c = case(name)
        assert {f.file.rsplit("/")[-1]: f.rank for f in c.job.coverage} == c.want["rank_of_file"]


@pytest.mark.parametrize("name", ["T04", "T06"])
def test_impossible_times(name):
    assert case(name).breakdown("compute_us") == [case(name).want["compute_kernel_us"]]
    assert case(name).breakdown("step_us") == [1000.0]


def test_t05_impossible_durations():
    c = case("T05")
    assert c.want["gpu_busy_us_min"] <= c.breakdown("compute_us")[0] <= c.want["gpu_busy_us_max"]
    assert (c.json["kernels"][0]["total_us"], c.json["kernels"][0]["calls"]) == (600.0, 3)


def test_t08_overlap_on_one_stream():
    c = case("T08")
    assert c.breakdown("compute_us") == [c.want["gpu_busy_us"]]
    assert sum(k["total_us"] for k in c.json["kernels"]) == pytest.approx(c.want["kernel_sum_us"])


def test_t09_clocks():
    c = case("T09")
    for rank, offset in c.want["clock_offset_us"].items():
        assert c.json["job"]["clock"]["offset_us"][rank] == pytest.approx(offset, abs=5)
    assert {str(s): r for s, r in zip(c.job.matches["seq"], c.job.matches["last_rank"], strict=True)} == c.want["last_rank_by_seq"]
    assert c.skews() == pytest.approx(list(c.want["start_skew_us_by_seq"].values()), abs=5)


def test_t12_gradient_accumulation():
    c = case("T12")
    assert c.job.steps == [20]
    assert sum(c.column("full_bytes", rank=0)) == c.want["comm_bytes_per_step"]


def test_t14_wait_and_transfer():
    c = case("T14")
    row = c.json["collectives"][0]
    assert row["transfer_us"]["p50"] == c.want["transfer_us"]
    assert row["wait_us"] == c.want["wait_us_by_rank"]
    assert row["busbw_gb_s"] == pytest.approx(c.want["busbw_GBps"], abs=0.01)


def test_g04_cut_lists():
    groups = {g.name: g for g in case("G04").job.groups.groups}
    for name in ("0", "7"):
        assert list(groups[name].ranks) == case("G04").want["groups"][name]["ranks"]
    assert groups["9"].ranks is None
    assert list(groups["9"].known) == case("G04").want["groups"]["9"]["first_30"]


def test_g05_one_name_two_groups():
    c = case("G05")
    assert sorted(c.skews()) == sorted(c.want["skew_us"].values())
    assert sorted(list(g.ranks) for g in c.job.groups.groups) == sorted(g["ranks"] for g in c.want["groups"])


def test_g07_ids_instead_of_names():
    c = case("G07")
    got = {c.job.groups[g].name: b for g, b in c.operations()[["group", "full_bytes"]].itertuples(index=False)}
    assert got == {name: v["bytes"] for name, v in c.want["collectives"].items()}


def test_g08_no_link_by_external_id():
    c = case("G08")
    assert c.column("full_bytes") == [c.want["bytes"]] * 2
    assert c.skews() == [c.want["skew_us"]]


def test_g12_shifted_windows():
    c = case("G12")
    assert c.job.matches["seq"].tolist() == c.want["matched_seq"]
    assert c.skews() == list(c.want["skew_us"].values())
    assert c.job.steps == c.want["common_steps"]


def test_g14_pipeline_edges():
    c = case("G14")
    assert c.job.matches["kind"].tolist() == ["send"] * 2
    assert c.job.matches["full_bytes"].sum() == c.want["edges"][0]["bytes"]
    assert sum(c.column("wait_ns", rank=3)) == c.want["wait_us_receiver"] * 1000


def test_c01_names_of_all_generations():
    c = case("C01")
    assert c.breakdown("exposed_comm_us") == [c.want["communication_us"]]
    assert c.breakdown("compute_us") == [c.want["compute_us"]]


def test_c03_old_torch():
    c = case("C03")
    assert c.skews() == c.want["skew_us_by_order"]
    assert sorted(set(c.column("kind"))) == ["all_reduce", "all_to_all"]


def test_c05_coalesced_and_uneven():
    c = case("C05")
    assert c.skews() == [9.0, 6.0]
    assert c.job.matches["full_bytes"].tolist() == [12000, 16000]
    assert c.column("kind") == ["all_gather"] * 4


def test_c07_gloo():
    c = case("C07")
    comm = [e + h for e, h in zip(c.breakdown("exposed_comm_us"), c.breakdown("hidden_comm_us"), strict=True)]
    assert comm == list(c.want["comm_wall_us_by_rank"].values())
    assert sorted(set(c.column("full_bytes"))) == c.want["bytes_each_pair"]


def test_c08_element_types():
    c = case("C08")
    known = [b for b in c.column("full_bytes") if b > 0]
    assert sum(known) == c.want["known_total_bytes"]
    assert len(known) == len(c.operations()) - 1


def test_c11_graph_replays():
    c = case("C11")
    assert c.skews() == c.want["skew_us_by_order"]
    assert c.job.matches["last_rank"].tolist() == c.want["last_rank_by_order"]


def test_c14_two_communication_streams():
    c = case("C14")
    assert c.breakdown("exposed_comm_us") == [c.want["exposed_comm_us"]]
    assert c.breakdown("hidden_comm_us") == [c.want["overlap_us"]]
    assert c.breakdown("idle_us") == [c.want["gpu_idle_us"]]
    for row in c.json["exposed_by_axis"]:
        low, high = c.want["exposed_by_group_min_max"]["mesh_" + row["axis"]]
        assert low <= row["exposed_us"] <= high


def test_r01_markup_is_shown_literally():
    """Every odd name is in the page as text: it comes back when the page's own data is read, and no element is made of it."""
    from html.parser import HTMLParser

    from tracekit.report.html import render

    c = case("R01")
    page = render(analyses.run(c.job), c.json)
    text = page.decode() if isinstance(page, bytes) else page

    class Reader(HTMLParser):
        def __init__(self):
            super().__init__()
            self.found, self.tags = [], []

        def handle_starttag(self, tag, attrs):
            self.tags.append((tag, tuple(name for name, _ in attrs)))

        def handle_data(self, data):
            self.found.append(data)

    reader = Reader()
    reader.feed(text)
    shown = "".join(reader.found).replace("\\u003c", "<").replace("\\u003e", ">").replace("\\u0026", "&").replace('\\"', '"')
    for name in c.want["shown_literally"]:
        plain = name.replace("\u202e", "[U+202E]").replace("\u2028", "[U+2028]")
        assert name in shown or plain in shown, name
    tags = [tag for tag, _ in reader.tags]
    assert (tags.count("img"), tags.count("h1")) == (0, 1)  # the page has one heading of its own
    assert "onerror" not in {name for _, names in reader.tags for name in names}


def calls(name: str) -> list[tuple[str, int | None]]:
    """(kind, bytes) of the operations of rank 0."""
    c = case(name)
    frame = c.operations(rank=0)
    return list(zip(frame["kind"].astype("str"), frame["full_bytes"].tolist(), strict=True))


def communication(name: str) -> list[float]:
    c = case(name)
    return [e + h for e, h in zip(c.breakdown("exposed_comm_us"), c.breakdown("hidden_comm_us"), strict=True)]


def test_u01_a_copy_engine_gathers():
    right = case("U01").expect["right"]
    assert calls("U01") == [(right["kind"], right["full_bytes"])]
    assert communication("U01") == [right["comm_busy_us"]] * 2
    assert case("U01").breakdown("memory_copy_us") == [right["exposed_copy_us"]] * 2


@pytest.mark.parametrize("name", ["U02", "U04", "U44", "U16"])
def test_communication_and_compute_are_told_apart(name):
    right = case(name).expect["right"]
    assert communication(name)[0] == right.get("comm_busy_us", right.get("comm_us"))
    assert "compute_us" not in right or case(name).breakdown("compute_us")[0] == right["compute_us"]


def test_u16_a_call_is_one_operation():
    right = case("U16").expect["right"]
    c = case("U16")
    assert (len(c.operations()), c.column("full_bytes"), c.column("sent_bytes")) == (
        right["rank_operations"],
        [right["full_bytes_per_call"]] * 2,
        [right["sent_bytes_of_a_rank"]] * 2,
    )


def test_u43_peer_copies_are_the_transfer():
    right = case("U43").expect["right"]
    assert [kind for kind, _ in calls("U43")] == [right["kind"]]
    assert communication("U43")[0] >= right["comm_busy_us_at_least"]
    assert case("U43").breakdown("exposed_comm_us")[0] == pytest.approx(right["exposed_us"], abs=1)  # a gap of 1 us is no communication


def test_u05_xpu():
    right = case("U05").expect["right"]
    assert dict(zip("01", communication("U05"), strict=True)) == right["comm_busy_us"]
    assert (case("U05").json["collectives"][0]["wait_us"], calls("U05")) == (right["wait_us"], [(right["kind"], right["full_bytes"])])


def test_u33_waiting_is_no_work():
    right = case("U33").expect["right"]
    assert (case("U33").breakdown("compute_us"), case("U33").breakdown("idle_us")) == ([right["compute_us"]], [right["idle_us"]])


def test_j01_lost_kernels_are_unknown_time():
    c = case("J01")
    assert [(row["compute_us"], row["unknown_us"]) for row in c.json["breakdown"] if row["rank"] == 1] == [(None, 600.0)] * 3
    assert c.json["mean_step"][0]["compute_us"] == 360.0
    assert all(word in c.said for word in c.expect["message_must_mention"])


@pytest.mark.parametrize(
    ("name", "words"), [("J02", ["rec0", "rec1", "rec2"]), ("J03", ["1000", "1001"]), ("J04", ["rank0.json", "rank2.json"])]
)
def test_files_that_are_not_one_job_are_refused_by_name(name, words):
    with pytest.raises(TracekitError) as caught:
        case(name)
    assert all(word in str(caught.value) for word in words)


def test_j05_nobody_waits_in_a_call_he_has_left():
    assert case("J05").column("wait_ns") == [0, 0]


def test_j06_a_barrier_is_a_barrier():
    assert Counter(kind for kind, _ in calls("J06")) == case("J06").want["kinds"]


def test_j07_waits_name_no_groups():
    c = case("J07")
    assert [{"name": g.name, "ranks": list(g.ranks)} for g in c.job.groups.groups] == c.want["process_groups"]
    assert (len(c.job.matches), "group" in c.said) == (c.want["matched"], False)


def test_j08_a_batch_is_its_edges():
    c = case("J08")
    sends = c.operations(kind="send")
    assert [[rank, (rank + 1) % 4] for rank in sends["rank"]] == c.want["edges"]
    assert set(c.column("full_bytes")) == {c.want["bytes_each"]}
    assert len(c.job.matches) == 4
