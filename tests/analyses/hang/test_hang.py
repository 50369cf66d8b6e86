"""Dumps made to NCCL's format: who is named, and in which words."""

import pytest

from tests.analyses.hang.made import SCHEDULED, STARTED, RankDump, hang_of, told
from tracekit.findings import Graph, Heatmap


def test_one_rank_never_comes(tmp_path):
    dumps = {rank: RankDump().call().call(state=STARTED, line=12) for rank in (0, 1, 3)} | {2: RankDump().call(line=11)}
    hang = hang_of(tmp_path, dumps)
    assert told(hang) == (
        "busy",
        "Ranks 0, 1, 3 wait in all_reduce seq 2 of the default group (train.py:12) for rank 2, "
        "which made its last call, all_reduce seq 1 of the default group at train.py:11, and none since.",
    )
    (wait,) = hang.json()["hang"]["waiting"]
    assert (wait["ranks"], wait["missing"], wait["last_completed"], wait["site"]) == ([0, 1, 3], [2], 1, "train.py:12")


def test_its_stack_says_what_it_does(tmp_path):
    dumps = {rank: RankDump().call(state=STARTED) for rank in (0, 1, 3)} | {2: RankDump()}
    text = 'Thread 0x1 (most recent call first):\n  File "torch/utils/data/dataloader.py", line 700 in __next__\n'
    text += '  File "train.py", line 5 in <module>\n'
    assert told(hang_of(tmp_path, dumps, {2: text}))[1].endswith("for rank 2, which waits for its data loader, at train.py:5.")


def test_a_rank_without_a_dump_died(tmp_path):
    dumps = {rank: RankDump().call(line=9).call(state=STARTED) for rank in (0, 1, 2)}
    why, text = told(hang_of(tmp_path, dumps))
    assert why == "died"
    assert text.endswith("for rank 3, which left no dump: it died, or could not be asked; "
                         "the last call that it completed with others is all_reduce seq 1 of the default group at train.py:9.")  # fmt: skip


def test_other_kinds_under_one_number(tmp_path):
    dumps = {rank: RankDump().call(state=STARTED) for rank in (0, 1, 2)} | {3: RankDump().call("all_gather", state=STARTED, line=33)}
    why, text = told(hang_of(tmp_path, dumps))
    assert (why, text[:65]) == ("mismatch", "Rank 3 called all_gather at train.py:33 where the others call all")


@pytest.mark.parametrize("other", [{"size": 65}, {"dtype": "BFloat16"}])
def test_other_sizes_and_types(other, tmp_path):
    dumps = {rank: RankDump().call(state=STARTED) for rank in (0, 1, 2)} | {3: RankDump().call(state=STARTED, **other)}
    hang = hang_of(tmp_path, dumps)
    assert hang.root is not None
    assert (hang.root.why, hang.root.ranks) == ("mismatch", [3])


def test_uneven_all_to_alls_are_no_mismatch(tmp_path):
    dumps = {rank: RankDump().call("all_to_all", state=STARTED, size=10 + rank) for rank in (0, 1, 2)} | {3: RankDump()}
    hang = hang_of(tmp_path, dumps)
    assert hang.root is not None
    assert (hang.root.why, hang.root.ranks) == ("busy", [3])


def test_a_collective_left_out_is_found_by_the_line_of_code(tmp_path):
    def steps(dump, left_out):
        for step in range(4):
            dump.call(line=20)
            if step != left_out:
                dump.call(line=21)
        return dump

    dumps = {rank: steps(RankDump(), None) for rank in (0, 2, 3)} | {1: steps(RankDump(), 2)}
    for rank in (0, 2, 3):
        dumps[rank].entries[-1] |= {"state": SCHEDULED, "retired": False}
    why, text = told(hang_of(tmp_path, dumps))
    assert (why, text.split(";")[0]) == ("skipped", "Rank 1 left out the all_reduce seq 6 of the default group (train.py:21)")


GROUPS = {"1": ("tp", [0, 1]), "2": ("dp", [0, 1]), "3": ("dp", [1, 2]), "4": ("tp", [2, 3])}


def test_two_groups_in_opposite_order(tmp_path):
    dumps = {0: RankDump(GROUPS).call(group="1", state=STARTED, line=1), 1: RankDump(GROUPS).call(group="2", state=STARTED, line=2)}
    assert told(hang_of(tmp_path, dumps)) == (
        "order",
        "Ranks 0, 1 entered these groups in another order: "
        "rank 0 in all_reduce seq 1 of tp at train.py:1, rank 1 in all_reduce seq 1 of dp at train.py:2.",
    )


def test_a_chain_over_groups_is_followed_to_its_root(tmp_path):
    dumps = {
        0: RankDump(GROUPS).call(group="1", state=STARTED),
        1: RankDump(GROUPS).call(group="3", state=STARTED),
        2: RankDump(GROUPS).call(group="4", state=STARTED),
        3: RankDump(GROUPS),
    }
    hang = hang_of(tmp_path, dumps)
    assert hang.root is not None
    assert hang.root.ranks == [3]
    assert [(edge["rank"], edge["waits_for"]) for edge in hang.json()["hang"]["chain"]] == [(0, 1), (1, 2), (2, 3)]
    graph, matrix = hang.sections()[0].charts[:2]
    assert isinstance(graph, Graph)
    assert isinstance(matrix, Heatmap)
    assert [(edge.source, edge.target) for edge in graph.edges] == [("n0", "n1"), ("n1", "n2"), ("n2", "root")]
    assert matrix.values == [[2, None, None], [3, 2, None], [None, 3, 2], [None, None, 3]]


def test_a_receive_without_its_send(tmp_path):
    groups = {"5": ("pp", [4, 6])}
    dumps = {4: RankDump(groups).call("send 0->1", "5"), 6: RankDump(groups).call("recv 1<-0", "5").call("recv 1<-0", "5", STARTED, line=8)}
    why, text = told(hang_of(tmp_path, dumps))
    assert why == "busy"
    assert text.startswith("Rank 6 waits in recv")
    assert "for rank 4" in text


def test_an_exception_is_the_root_and_connection_errors_are_not(tmp_path):
    dumps = {rank: RankDump().call(state=STARTED) for rank in (0, 1, 3)} | {2: RankDump()}
    raised = 'Traceback (most recent call last):\n  File "train.py", line 5, in <module>\n  File "model.py", line 7, in forward\n{}\n'
    texts = {2: raised.format("ValueError: not finite"), 0: raised.format("RuntimeError: Connection closed by peer [1.2.3.4]:5")}
    why, text = told(hang_of(tmp_path, dumps, texts))
    assert why == "raised"
    assert "rank 2, which raised ValueError: not finite, at model.py:7" in text


def test_nothing_hangs(tmp_path):
    hang = hang_of(tmp_path, {rank: RankDump().call() for rank in range(4)})
    assert hang.json()["hang"] is None
    assert [finding.id for finding in hang.findings()] == ["hang.none"]
