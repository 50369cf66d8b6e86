"""Groups of all ranks together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.mesh.made import device_mesh, seen_by
from tests.oracle import tables
from tracekit.mesh.local_groups import local_groups
from tracekit.mesh.mesh import Axis, infer_mesh
from tracekit.mesh.process_groups import LocalGroup, ProcessGroup, short_ranks, unite
from tracekit.notes import sentence, sentences

CASES = Path(__file__).resolve().parents[2].parent / "shared" / "cases"
ODD = (0, 1, 3, 4, 6, 9, *range(10, 44))  # 40 members, irregular


def whole(name: str, *ranks: int, description: str = "") -> LocalGroup:
    return LocalGroup(name, description, ranks, len(ranks))


def part(name: str, size: int, *known: int, description: str = "") -> LocalGroup:
    return LocalGroup(name, description, None, size, known)


def test_a_group_that_two_ranks_tell_of_is_one() -> None:
    united, notes = unite([(0, [whole("0", 0, 1)]), (1, [whole("1", 1), whole("0", 0, 1)])], 2)
    assert list(united.groups) == [ProcessGroup("0", "0", "", (0, 1), (), 2), ProcessGroup("1", "1", "", (1,), (), 1)]
    assert united.index == [[0], [1, 0]]
    assert notes == []


def test_one_name_with_other_members_is_another_group() -> None:
    pairs = [(0, 1), (0, 1), (2, 3), (2, 3)]
    windows = [(rank, [whole("0", 0, 1, 2, 3), whole("3", *pair, description="mesh_tp")]) for rank, pair in enumerate(pairs)]
    united, _ = unite(windows, 4)
    assert [(g.id, g.ranks) for g in united.groups] == [("0", (0, 1, 2, 3)), ("3@0,1", (0, 1)), ("3@2,3", (2, 3))]
    assert united.index == [[0, 1], [0, 1], [0, 2], [0, 2]]


def test_two_names_over_the_same_ranks_are_two_groups() -> None:
    united, _ = unite([(0, [whole("0", 0, 1), whole("1", 0, 1)])], 2)
    assert [g.id for g in united.groups] == ["0", "1"]


def test_names_are_ordered_as_numbers_and_nameless_groups_get_a_name() -> None:
    united, _ = unite([(0, [whole("10", 0, 1), whole("9", 0, 1), whole("", 0, 1), whole("", 0, 1, 2), whole("²", 0, 1)])], 3)
    assert [g.id for g in united.groups] == ["9", "10", "group@0,1", "group@0-2", "²"]


def test_a_name_that_looks_like_another_groups_id_stays_apart() -> None:
    united, _ = unite([(0, [whole("3", 0, 1), whole("3", 0, 2), whole("3@0,1", 0, 1)])], 3)
    assert [g.id for g in united.groups] == ["3@0,1'", "3@0,2", "3@0,1"]


def test_a_cut_list_is_completed_by_the_rank_that_has_it_whole() -> None:
    united, notes = unite([(0, [part("9", 40, *ODD[:30])]), (3, [whole("9", *ODD)])], 64)
    assert [(g.id, g.ranks) for g in united.groups] == [("9", ODD)]
    assert united.index == [[0], [0]]
    assert notes == []


@pytest.mark.parametrize(
    ("cut", "rank"),
    [
        (part("8", 40, *ODD[:30]), 0),  # another name
        (part("9", 41, *ODD[:30]), 0),  # another size
        (part("9", 40, 0, 1, 2), 0),  # other members
        (part("9", 40, *ODD[:30]), 2),  # the rank is not in it
        (part("9", 40, *ODD[:30], description="other"), 0),
    ],
)
def test_a_cut_list_is_not_completed_by_another_group(cut: LocalGroup, rank: int) -> None:
    united, _ = unite([(rank, [cut]), (3, [whole("9", *ODD, description="one")])], 64)
    assert sorted(g.ranks is None for g in united.groups) == [False, True]


def test_ranks_that_claim_a_group_are_members_of_it() -> None:
    united, _ = unite([(3, [part("9", 40, *ODD[:30])]), (43, [part("9", 40, *ODD[:30])])], 64)
    assert [(g.ranks, g.known, g.size) for g in united.groups] == [(None, (*ODD[:30], 43), 40)]
    everyone = [(rank, [part("9", 40, *ODD[:30])]) for rank in ODD]
    assert unite(everyone, 64)[0].groups[0].ranks == ODD


def test_what_two_ranks_have_of_one_list_is_put_together_whoever_has_more() -> None:
    more, less, least = part("9", 40, *ODD[:30]), part("9", 40, *ODD[:5]), part("9", 0)
    united, _ = unite([(0, [least]), (1, [less]), (3, [more])], 64)
    assert [(g.known, g.size) for g in united.groups] == [(ODD[:30], 40)]
    other = part("9", 40, 0, 2, 5)
    assert len(unite([(0, [less]), (0, [other])], 64)[0]) == 2


def test_as_many_members_as_there_are_ranks() -> None:
    assert unite([(1, [part("0", 4)])], 4)[0].groups[0].ranks == (0, 1, 2, 3)


def test_more_ranks_than_members_are_never_one_group() -> None:
    """A name with a size and no members, which ranks of two groups share: no operation may be matched across them."""
    united, notes = unite([(rank, [part("3", 2)]) for rank in range(4)], 8)
    assert [(g.id, g.known) for g in united.groups] == [("3@0", (0,)), ("3@1", (1,)), ("3@2", (2,)), ("3@3", (3,))]
    assert [row[0] for row in united.index] == [0, 1, 2, 3]
    assert "not matched with each other" in sentence(notes[0])


def test_what_contradicts_is_noted() -> None:
    one, other = whole("3", 0, 9, description="mesh_tp"), whole("3", 0, 9, description="mesh_dp")
    united, notes = unite([(0, [one]), (1, [other])], 4)
    assert [g.description for g in united.groups] == ["mesh_dp"]
    assert sentences(notes) == [
        "process group 3 has several descriptions: mesh_dp, mesh_tp",
        "process group 3 names rank 9, the world has 4 ranks",
    ]


def test_short_ranks() -> None:
    lists = [(), (5,), (0, 1), tuple(range(8)), (1, 3, 5), tuple(r * r for r in range(10))]
    assert [short_ranks(r) for r in lists] == ["?", "5", "0,1", "0-7", "1-5:2", "0,1,4,9,16,25,36,49,...(10)"]


_GROUPS = st.lists(
    st.one_of(
        st.builds(
            lambda name, ranks, text: LocalGroup(name, text, tuple(sorted(ranks)), len(ranks)),
            st.sampled_from(["0", "1", "x", ""]),
            st.sets(st.integers(0, 5), min_size=1),
            st.sampled_from(["", "undefined", "mesh_tp", "mesh_dp"]),
        ),
        st.builds(
            lambda name, ranks, more, text: LocalGroup(name, text, None, more and len(ranks) + more, tuple(sorted(ranks))),
            st.sampled_from(["0", "1", "x", ""]),
            st.sets(st.integers(0, 5), max_size=3),
            st.integers(0, 3),
            st.sampled_from(["", "mesh_tp"]),
        ),
    ),
    max_size=4,
)


@given(st.lists(st.tuples(st.integers(0, 5), _GROUPS), max_size=6), st.randoms(use_true_random=False), st.sampled_from([None, 6]))
@settings(max_examples=300, deadline=None)
def test_the_order_of_windows_does_not_matter(windows: list[tuple[int, list[LocalGroup]]], random: object, world: int | None) -> None:
    order = list(range(len(windows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    first, notes = unite(windows, world)
    second, other_notes = unite([windows[i] for i in order], world)
    assert list(first.groups) == list(second.groups)
    assert [first.index[i] for i in order] == list(second.index)
    assert set(notes) == set(other_notes)
    assert len({g.id for g in first.groups}) == len(first.groups)
    for (rank, groups), places in zip(windows, first.index, strict=True):
        for group, place in zip(groups, places, strict=True):
            united = first.groups[place]
            assert united.name == group.name or united.description == group.description  # ranks may number one group differently
            assert group.ranks is None or set(united.ranks or ()) == set(group.ranks)
            assert united.ranks is not None or rank in united.known


@given(st.permutations(range(8)), st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_a_mesh_does_not_depend_on_the_order_of_files(order: list[int], count: int) -> None:
    axes = (Axis("pp", 2), Axis("dp", 2), Axis("tp", 2))
    windows = seen_by(device_mesh(axes), order[:count])
    united, _ = unite(windows, 8)
    again, _ = unite(sorted(windows, key=lambda w: w[0]), 8)
    assert list(united.groups) == list(again.groups)
    assert infer_mesh(united, 8, sorted(order[:count]), None)[0].axes == axes


@pytest.mark.skipif(not CASES.is_dir(), reason="the shared cases are not here")
def test_shared_case_of_one_name_with_other_members() -> None:
    folder = next(CASES.glob("G05*"))
    expected = json.loads((folder / "expected.json").read_text())["expect"]["groups"]
    windows = [(rank, local_groups(tables((folder / f"rank{rank}.json").read_text()))[0]) for rank in range(4)]
    united, _ = unite(windows, 4)
    assert [{"ranks": list(g.ranks or ()), "desc": g.description} for g in united.groups] == expected
    assert infer_mesh(united, 4, [0, 1, 2, 3], None)[1] == ["world", "tp", "tp"]


def test_one_group_that_ranks_number_differently_is_one() -> None:
    def tp(name: str) -> LocalGroup:
        return LocalGroup(name, "mesh_tp", (0, 1), 2)

    for windows in ([(0, [tp("3")]), (1, [tp("5")])], [(0, [tp("5")]), (1, [tp("3")])]):
        united, notes = unite(windows, 2)
        assert ([(g.id, g.name, g.ranks) for g in united.groups], united.index, notes) == ([("3", "3", (0, 1))], [[0], [0]], [])
    apart, _ = unite([(0, [tp("3"), tp("5")]), (1, [tp("5"), tp("3")])], 2)  # each rank knows two of them
    assert [g.name for g in apart.groups] == ["3", "5"]
