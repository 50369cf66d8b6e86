"""The owner of every live byte at every moment: registrations where there are any, rules for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tracekit.manifest import Owners
from tracekit.memory import moments, registered, rules, stack_moments
from tracekit.memory.blocks import Blocks, Log, pair
from tracekit.memory.moments import Context, Hint, Moments
from tracekit.memory.ownership import BUFFERS, GRADIENTS, INPUTS, PARAMETERS, Changes, Owner, Ownership, Texts, cut
from tracekit.memory.snapshot import DeviceHistory, Snapshot
from tracekit.memory.snapshot_timeline import timeline as of_device
from tracekit.memory.timeline import Counters, Timeline, replay
from tracekit.trace.events import BoolArray, Category, Int64Array, RankTables
from tracekit.trace.steps import Phases, Steps


@dataclass(frozen=True)
class Attributed:
    """A timeline and who owns what on it. ``texts`` are the texts behind the codes of ``ownership``.

    ``from_manifest``: a manifest registered owners.
    """

    timeline: Timeline
    ownership: Ownership
    texts: list[str]
    from_manifest: bool


def no_changes() -> Changes:
    """Nothing was registered."""
    none, code = np.empty(0, np.int64), np.empty(0, np.int32)
    return Changes(none, none, np.empty(0, np.int8), code, code)


def attribute_trace(
    tables: RankTables, log: Log, counters: Counters, phases: Phases, steps: Steps, owners: Owners | None, others: Sequence[Log] | None = ()
) -> Attributed:
    """Timeline and owners of one device of a trace.

    ``others``: logs of the other devices; registrations that meet no block in any log are of this device. None: they are of another one.
    """
    texts = Texts()
    seen = moments.of_events(tables, log.row, phases, steps, texts)
    blocks = _ended_by_backend(tables, log, pair(log), seen) if counters.of_host else pair(log)
    changes = no_changes()
    if owners is not None and owners.time_ns:
        blocks, changes = registered.claim(log, blocks, registered.registrations(owners, texts), others)
    context = Context(phases, steps, int(log.time[-1]) if len(log) else 0)
    born = seen.at(_shown(blocks.birth, log))
    owner = _known_parameters(rules.categorize(blocks, born, seen.at(_shown(blocks.death, log)), context), changes)
    blocks = _rebuilt_buckets(blocks, changes, (born.hint == Hint.DDP) & np.isin(owner.category, (BUFFERS, GRADIENTS)))
    timeline = replay(log, counters, blocks, complete=counters.of_host and len(changes) > 0)
    return Attributed(timeline, cut(blocks, owner, changes), texts.texts, len(changes) > 0)


def attribute_snapshot(snapshot: Snapshot, device: DeviceHistory, owners: Owners | None = None) -> tuple[Attributed, Phases, Steps]:
    """Timeline and owners of one device of a snapshot that has a history, with the phases and steps that its stacks tell."""
    texts = Texts()
    seen, phases, steps = stack_moments.of_history(snapshot, device.entries, texts)
    timeline = of_device(device, snapshot.settings)
    log, blocks, changes = timeline.log, timeline.blocks, no_changes()
    if owners is not None and owners.time_ns:
        blocks, changes = registered.claim(log, blocks, registered.registrations(owners, texts), None)
    context = Context(phases, steps, int(log.time[-1]) if len(log) else 0)
    born = _with_stacks_at_the_end(seen.at(_shown(blocks.birth, log)), blocks, snapshot, device, texts)
    owner = rules.categorize(blocks, born, seen.at(_shown(blocks.death, log)), context)
    owner = _known_parameters(owner, changes)
    return Attributed(timeline, cut(blocks, owner, changes), texts.texts, len(changes) > 0), phases, steps


def _with_stacks_at_the_end(born: Moments, blocks: Blocks, snapshot: Snapshot, device: DeviceHistory, texts: Texts) -> Moments:
    """Moments of birth, with the stacks that blocks at the end keep where their allocation is no longer in the history."""
    state = device.state
    order = np.argsort(state.address, kind="stable")
    order = order[state.allocated[order] & (state.stack[order] > 0)]
    if not len(order):
        return born
    at = np.minimum(np.searchsorted(state.address[order], blocks.address), len(order) - 1)
    lost = ~born.known & (blocks.death >= len(device.entries)) & (state.address[order][at] == blocks.address)
    hint, name = stack_moments.of_stacks(snapshot, state.stack[order][at], texts)
    return replace(born, hint=np.where(lost, hint, born.hint).astype(np.int8), name=np.where(lost, name, born.name).astype(np.int32))


def _known_parameters(owner: Owner, changes: Changes) -> Owner:
    """Where parameters were registered, what only seems to be one (there before forward, and never freed) is the batch of the last step."""
    if not (changes.category == PARAMETERS).any():
        return owner
    return replace(owner, category=np.where(owner.category == PARAMETERS, np.int8(INPUTS), owner.category))


def _shown(position: Int64Array, log: Log) -> Int64Array:
    """The position where the log shows it, else -1."""
    return np.where((position >= 0) & (position < len(log)), position, -1)


def _rebuilt_buckets(blocks: Blocks, changes: Changes, built: BoolArray) -> Blocks:
    """DDP's first buckets, registered by size alone, end where the trace shows how it builds them anew."""
    nowhere = changes.block[(changes.category == BUFFERS) & (blocks.address[changes.block] == 0)]
    if not built.any() or not len(nowhere):
        return blocks
    death, lost = blocks.death.copy(), blocks.lost.copy()
    death[nowhere] = np.minimum(death[nowhere], int(blocks.birth[built].min()))
    lost[nowhere] = True
    return replace(blocks, death=death, lost=lost)


def _ended_by_backend(tables: RankTables, log: Log, blocks: Blocks, seen: Moments) -> Blocks:
    """Buffers of a host backend that seem to outlive their step: its own thread freed them, unseen, when it had done its work."""
    rows = tables.rows(Category.USER_ANNOTATION, Category.OPERATOR)
    rows = rows[tables.each_text(tables.name[rows], lambda text: text.startswith(("gloo:", "mpi:", "ucc:")))]
    if not len(rows) or not len(blocks):
        return blocks
    birth = np.clip(blocks.birth, 0, None)
    outlives = (blocks.death >= len(log)) | blocks.lost
    suspects = np.flatnonzero((blocks.birth >= 0) & outlives & (seen.hint[birth] == Hint.COMMUNICATION))
    start, end = tables.ts[rows], tables.ts[rows] + np.maximum(tables.dur[rows], 0)
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    at = np.searchsorted(start, log.time[birth[suspects]], side="left")
    served = at < len(start)
    suspects, at = suspects[served], at[served]
    ends = np.maximum(np.searchsorted(log.time, end[at], side="right") - 1, blocks.birth[suspects] + 1)
    sooner = ends < blocks.death[suspects]
    death, lost = blocks.death.copy(), blocks.lost.copy()
    death[suspects[sooner]] = ends[sooner]
    lost[suspects[sooner]] = True
    return replace(blocks, death=death, lost=lost, death_row=np.where(lost, -1, blocks.death_row))
