"""Pictures of groups: pairs of ranks in a small world, a row a group in a large one."""

from tracekit.analyses._group_maps import maps
from tracekit.mesh.mesh import Axis, groups_of_axis
from tracekit.mesh.process_groups import ProcessGroup


def groups(axes: list[Axis]) -> list[ProcessGroup]:
    members = [(axis.name, ranks) for axis in axes for ranks in groups_of_axis(axes, [axis.name])]
    return [ProcessGroup(str(i), str(i), f"mesh_{axis}", r, r, len(r), axis, False) for i, (axis, r) in enumerate(members)]


def test_a_small_world_shows_every_rank() -> None:
    found = list(maps(groups([Axis("dp", 2), Axis("tp", 2)]), [0, 1, 2, 3]))
    assert [chart.title for chart in found] == ["Which group of each axis a rank is in", "Which axis joins two ranks"]


def test_a_large_world_shows_a_row_a_group_of_each_axis() -> None:
    dp, tp = maps(groups([Axis("dp", 32), Axis("tp", 8)]), list(range(256)))
    assert (dp.title, len(dp.values), dp.values[1][:3]) == ("Groups of axis dp", 8, [1.0, 9.0, 17.0])
    assert (tp.title, len(tp.values), tp.values[31]) == ("Groups of axis tp", 32, [float(rank) for rank in range(248, 256)])
    assert tp.y_labels[0] == "0-7 (8)"


def test_nothing_is_drawn_where_no_members_are_known() -> None:
    assert list(maps([ProcessGroup("0", "0", "", None, (), 8, "tp", None)], list(range(8)))) == []
