"""The sentence of every note, in one place: without a capital and a full stop, as it may follow a file's name.

``{count}`` and names of the detail stand in braces as in ``str.format``. A whole number takes ``{count:rank|ranks}`` (a figure and its
noun) and ``{count:?is|are}`` (a word alone); several values take how many of them are listed: ``{ranks:12}``. What has parts that may be
missing is a function of the detail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tracekit.units import listed, shortened

Detail = Mapping[str, Any]


def _work(detail: Detail) -> str:
    """``2 kernels and 1 copy``."""
    kernels, copies = detail["kernels"], detail["count"] - detail["kernels"]
    parts = [f"{kernels} kernel{'s' if kernels > 1 else ''}"] if kernels else []
    return " and ".join([*parts, f"{copies} {'copies' if copies > 1 else 'copy'}"] if copies else parts)


def _work_without_time(detail: Detail) -> str:
    return f"{_work(detail)} without a time{' (ts 0)' if detail['unset'] else ''}: counted, left out of every sum"


def _impossible_durations(detail: Detail) -> str:
    return (
        f"{_work(detail)} with an impossible duration (longer than the window, or far over the next work of the stream): "
        "cut to the usual duration of the name and to where the next work of the stream starts"
    )


def _several_infos(detail: Detail) -> str:
    why = " and ".join(detail["backers"]) + " say the same" if detail["backers"] else "it is the first"
    return f"distributedInfo stands twice or more with different ranks; rank {detail['rank']} is used because {why}"


def _truncated(detail: Detail) -> str:
    why = f" ({detail['damage']})" if detail["damage"] else ""
    return f"the file is truncated{why}: the {detail['count']} events before the cut are used"


def _us(us: float) -> str:
    return f"{us:.0f} us" if us >= 10 else f"{us:.3g} us"


def _clock_contradicted(detail: Detail) -> str:
    return f"collectives on one host contradict its clock by up to {_us(detail['us'])}"


def _clocks_aligned(detail: Detail) -> str:
    parts = []
    moved = [f"{name} by {'+' if ahead > 0 else '-'}{_us(abs(ahead))}" for name, ahead in detail["moved"]]
    if moved:
        by_rank = ", ranks without a host name each by itself" if detail["unnamed"] else ""
        parts.append(f"clocks were aligned through matched collectives{by_rank}: {listed(moved, 8)} against {detail['against']}")
    if detail["alone"]:
        those = listed(detail["alone"], 8)
        parts.append(f"the clock of {those} could not be compared with {detail['against']} (no collective matched): its times stand apart")
    if detail["residual_us"]:
        parts.append(f"the aligned clocks still contradict a collective by {_us(detail['residual_us'])}")
    if detail.get("drift_ppm"):
        parts.append(f"drift of up to {detail['drift_ppm']:.3g} ppm is taken out")
    return "; ".join(parts)


def _axis_of_several_shapes(detail: Detail) -> str:
    shapes = ", ".join(f"{size} ranks at stride {stride}" for size, stride in detail["shapes"])
    return f"groups of axis {shortened(detail['axis'])} have different shapes: {shapes}"


def _kernels_lost(detail: Detail) -> str:
    steps = f" (steps {listed(detail['steps'])})" if detail["steps"] else ""
    log = f" (its log tells of {detail['out_of_range']} activities out of range)" if detail["out_of_range"] else ""
    return (
        f"{detail['count']} of {detail['total']} kernel launches have no kernel in the trace: buffers of the profiler were lost{log}; "
        f"the time in which they may have run{steps} is not known, and in no mean"
    )


def _ranks_out_of_step(detail: Detail) -> str:
    called = ", ".join(f"rank {rank} {kind}" for rank, kind in detail["called"][:4])
    more = f" and {detail['count'] - 4} more" if detail["count"] > 4 else ""
    return f"group {detail['group']} seq {detail['seq']}: the ranks call different collectives ({called}{more}): they are out of step"


def _world_sizes_differ(detail: Detail) -> str:
    sizes = ", ".join(f"{size}: {files}" for size, files in detail["sizes"])
    return f"the traces disagree on the world size: {{{sizes}}}; {detail['used']} is used"


def _no_common_step(detail: Detail) -> str:
    shown = [f"rank {rank}: {listed(steps, 4) or 'none'}" for rank, steps in detail["steps"][:4]]
    return f"no step was recorded by every rank ({'; '.join(shown)}{'; ...' if len(detail['steps']) > 4 else ''})"


def _bytes_not_known(detail: Detail) -> str:
    because = f" (element types {', '.join(detail['types'])} are not known)" if detail["types"] else ""
    return f"the bytes of {detail['count']} communication operations are not known{because}"


SENTENCES: dict[str, str | Callable[[Detail], str]] = {
    "text": "{text}",  # what an error says already
    # The rank of a file
    "impossible_rank": "distributedInfo says rank {rank} of {world}, which cannot be; that rank is not used",
    "several_infos": _several_infos,
    "rank_not_in_info": "distributedInfo has no usable rank; rank {rank} was inferred from {source}",
    "no_distributed_info": "there is no distributedInfo; rank {rank} was inferred from {source}",
    "rank_of_same_process": "rank {rank} was taken from another window of the same process {process}",
    "ranks_of_same_claim": "{source} gives {one} and {other} the same rank {before}; their ranks were taken from {better}",
    "rank_of_same_claim": "{source} gives {one} and {other} the same rank {before}; rank {after} of this file was taken from {better}",
    "rank_not_believed": "{source} says rank {before}; rank {after} of this file was taken from {better}",
    "one_process": "the rank is not recorded and there is nothing to tell it from: taken for rank 0 of a job of one process",
    "world_too_small": "distributedInfo says a world of {said}, its default group has {size} ranks: {size} is taken",
    "ranks_of_numbers": "no rank is recorded: the ranks of the {count} files are the number in which their names differ",
    "rank_unknown": "its rank is unknown (none that can be in distributedInfo or in its name, no collective on the default group), "
    "so it was not used: "
    "put the rank into the file's name, for example rank3.json",
    "same_window_again": "is the same rank {rank}, process and time as {other}, so it was not used: keep one of the two",
    "part_of_window": "is of the same rank {rank}, process and time as {other} and holds something else, so it was not used: "
    "if the two are parts of one recording, put their traceEvents into one file",
    "same_rank_claimed": "claims the same rank {rank} as {other}, for the same time or on another host, and nothing else tells the rank of "
    "{own}, so it was not used: put each file's rank into its name, for example rank3.json",
    # The text of a file
    "trailing_commas": "{count} trailing {count:?comma was|commas were} ignored (before a closing bracket)",
    "keys_twice": "{count} {count:?event has|events have} a key twice: the last value is used, for a stream the row's tid",
    "times_no_numbers": "{count} {count:?time|times} (ts or dur) that are no numbers are taken as missing",
    "without_phase": "{count} {count:?event has|events have} no ph: with a time and a duration {count:?it is|they are} taken for complete",
    "truncated": _truncated,
    "damage_behind": "{damage} after the end of the trace",
    "lone_begins_and_ends": "{count} {count:?event|events} (ph B or E) without {count:?its|their} other end: left out",
    "second_document": "the file goes on behind its trace with another one, which was not read: give each a file of its own",
    "autograd_export": "this is an export of the old autograd profiler: operators only, no kernel or rank information",
    "manifest_of_other_rank": "the manifest is of rank {manifest}, the trace of rank {rank}: it is read without it",
    "flight_recorder_overwritten": "the flight recorder had overwritten its first {count} collectives before they were read",
    # Times and steps
    "events_without_end": "{count} {count:?event has|events have} no end (negative or missing duration): left out of every sum",
    "work_without_time": _work_without_time,
    "impossible_durations": _impossible_durations,
    "steps_by_iteration": "no ProfilerStep marks: steps are taken from numbered iteration ranges",
    "no_steps": "no ProfilerStep marks (profiler.step() was not called): the whole trace is one window",
    "no_whole_steps": "no whole ProfilerStep marks: the whole trace is one window",
    "steps_without_end": "{count} step {count:?mark has|marks have} no end (or times that cannot be true): not counted as steps",
    "ranges_inside": "{count} numbered {count:?range lies|ranges lie} inside another one: counted as a part of that step",
    "steps_overlap": "{count} {count:?step overlaps|steps overlap} the next one: cut where that starts",
    "steps_repeat": "{count} {count:?step repeats|steps repeat} the number of an earlier one: numbered on as {numbers}",
    "memory_events_left_out": "{count} memory events have no size or time that can be true: they are left out",
    "stages_on_host": "most ranges of pipeline stages launched nothing on the device: their times are the host's",
    "steps_beyond": "--steps asks for more than the traces hold: of it there are the steps {first} to {last}",
    "steps_kept": "the trace is too long for --memory-limit: its first {count} of {total} steps were looked at, the others only counted",
    "kept_without_steps": "the trace is too long for --memory-limit, and marks no steps: its first part was looked at",
    "steps_before_hang": "the job stands still in step {first}: all figures are of the steps before it",
    "windows_repeat_steps": "{count} {count:?step|steps} of later recordings repeat numbers of earlier ones of their rank: numbered on",
    "no_common_step": _no_common_step,
    "clock_contradicted": _clock_contradicted,
    "clocks_aligned": _clocks_aligned,
    # Device work
    "no_device_work": "the trace holds no GPU work: operators count as compute, the backend's ranges as communication",
    "device_lost": "{count} kernel {count:?launch|launches} and not one kernel: what the device did is lost, its time is not known",
    "kernels_lost": _kernels_lost,
    "outside_profiler": "{count} {count:?step lies|steps lie} partly outside the profiler's own span: that time is not known",
    "device_not_read": "{count} events of a device are of a kind that is not read ({names:4}): its time is not known",
    "stray_device_work": "work on {count} more {count:?device|devices} is too little to be a part of the steps and is not counted in them",
    "work_without_correlation": "{count} of {total} kernels and copies carry no usable correlation (0, negative or out of range): "
    "their launch is not known",
    "work_without_launch": "{count} of {total} kernels and copies have no launch in the trace (launched before it began)",
    "graph_replays": "{count} kernels were replayed by {calls} CUDA graph launches: "
    "collectives among them carry no process group and no sequence number",
    # Process groups and the mesh
    "pg_count_differs": "pg_count is {count}, {listed} process groups are listed: the listed ones are used",
    "groups_not_listed": "collectives run on process groups that pg_config does not list: {groups}",
    "too_many_groups": "collectives name {count} different process groups: {limit} are told apart",
    "group_size_differs": "process group {group}: the size is given as {size}, the list has {count} members and is used",
    "groups_left_out": "there are more than {count} process groups: the others are left out",
    "members_not_recorded": "process group {group}: only {count} of {size} members are recorded",
    "more_members_not_recorded": "the members of {count} more process groups are not all recorded",
    "too_many_members": "process group {group} has {size} members, but {count} ranks record one of that name and not who is in it: "
    "their operations are not matched with each other",
    "several_descriptions": "process group {group} has several descriptions: {descriptions}",
    "rank_outside_world": "process group {group} names rank {rank}, the world has {world} ranks",
    "only_group_taken": "the process group of {count} operations is not recorded: {group} is the only one this rank is in",
    "groups_not_recorded": "the process group is not recorded for {count} of {total} communication operations: "
    "they are grouped by stream and matched by order",
    "manifests_of_different_meshes": "the manifests of the ranks tell different meshes: none of them is used",
    "mesh_does_not_fit": "the manifests' mesh {mesh} does not make up {world} ranks: it is not used",
    "described_otherwise": "process group {group} is described as {described}; by its members it is {by_members} of --mesh",
    "groups_of_no_axis": "--mesh: no axis has the members of process group {groups}",
    "axis_does_not_tile": "groups of axis {axis} ({size} ranks, stride {stride}) do not tile {world} ranks",
    "axis_of_several_shapes": _axis_of_several_shapes,
    "irregular_groups": "groups of axis {axes} are not regular lists of ranks: they are known by description alone",
    "axes_not_described": "no process group describes its axis: axes are named by stride and size ({axes}); --mesh names them",
    "axes_without_group": "no process group was seen along {axes} (named by stride and size)",
    "axes_without_name": "no description names {axes} (named by stride and size)",
    # Ranks of the job
    "snapshot_without_rank": "tells no rank: put it into the file's name (rank3_snapshot.pickle)",
    "snapshot_rank_taken": "its name tells no rank: it is taken for rank {rank}",
    "world_sizes_differ": _world_sizes_differ,
    "rank_beyond_world": "rank {rank} does not fit a world of {world}",
    "world_size_not_recorded": "the world size is not recorded: missing ranks cannot be told",
    "ranks_missing": "{read} of {of} ranks were read; missing: {missing:12}",
    "ranks_truncated": "{complete} of {world} ranks are complete; truncated: {truncated:12}",
    # Matching
    "messages_uneven": "{count} sends and receives are not matched: in their step the two ranks do not show equally many of them",
    "messages_without_peer": "{count} sends and receives are not matched: the rank of the peer is not recorded",
    "messages_outside_steps": "{count} sends and receives are not matched: "
    "they are outside every step, and the ranks recorded different steps",
    "uneven_without_seq": "{count} operations without a sequence number are not matched: "
    "the members of their group do not show equally many in the step",
    "unmatched_without_group": "{count} operations whose process group is not recorded are not matched: "
    "no other rank shows the same sequence of collectives in the step",
    "order_not_believed": "{group}: {count} of {matches} matches by order contradict the clocks (by up to {ms:.1f} ms), "
    "so none of its operations is matched by order",
    "matches_taken_back": "{group}: {count} of {matches} matches by order contradict the clocks (by up to {ms:.1f} ms), "
    "so these are taken back",
    "seq_shared": "{count} operations share a sequence number with another of their rank: they are matched n-th with n-th",
    "seq_shared_unevenly": "{count} operations share a sequence number with another of their rank, but not equally often on every rank: "
    "they are not matched",
    "ranks_out_of_step": _ranks_out_of_step,
    "more_out_of_step": "{count} more sequence numbers under which ranks call different collectives",
    "seq_not_everywhere": "group {group}: seq {seq} of rank {rank} is not seen on every other rank that was read",
    "more_seq_not_everywhere": "{count} more ranks show sequence numbers that others of their group do not",
    "bytes_not_known": _bytes_not_known,
}
