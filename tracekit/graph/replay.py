"""When everything would have run with other costs. Compiled: one pass over the nodes in an order in which causes come first.

start(v) = max(end of what v waits for; start of the launch-bound node before it + lag) + delay(v)
end(v)   = start(v) + cost(v)                                for work of one rank
end(v)   = latest start of all members + cost(v)             for a member of a collective or message (cost: its transfer)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tracekit.compiled import late
from tracekit.trace.events import Int32Array, Int64Array


@late
def replay(
    order: Int32Array,
    first: Int64Array,
    source: Int32Array,
    join: Int32Array,
    joins: int,
    host_source: Int32Array,
    host_lag: Int64Array,
    cost: Int64Array,
    delay: Int64Array,
) -> tuple[Int64Array, Int64Array]:
    """(start, end) of each node [ns]. ``source[first[v]:first[v + 1]]`` is what node v waits for."""
    count = len(order)
    start = np.zeros(count, np.int64)
    end = np.zeros(count, np.int64)
    latest = np.full(joins, np.iinfo(np.int64).min, np.int64)
    for i in range(count):
        v = order[i]
        begin = np.int64(0)
        for k in range(first[v], first[v + 1]):
            u = source[k]
            done = end[u] if join[u] < 0 else latest[join[u]] + cost[u]
            begin = max(begin, done)
        if host_source[v] >= 0:
            begin = max(begin, start[host_source[v]] + host_lag[v])
        begin += delay[v]
        start[v] = begin
        if join[v] < 0:
            end[v] = begin + cost[v]
        elif begin > latest[join[v]]:
            latest[join[v]] = begin
    for v in range(count):
        if join[v] >= 0:
            end[v] = latest[join[v]] + cost[v]
    return start, end


@late
def causal_order(
    first: Int64Array,
    source: Int32Array,
    join: Int32Array,
    join_first: Int64Array,
    members: Int32Array,
    host_source: Int32Array,
    by_start: Int32Array,
) -> tuple[Int32Array, Int64Array]:
    """(nodes in an order in which causes come first, how many causes each node still lacked when its turn came).

    Where nodes wait for each other in a circle, which no real run does, the one that really began first is taken.
    """
    count = len(join)
    lacks = np.zeros(count + 1, np.int64)
    missing = np.zeros(count, np.int64)
    for v in range(count):
        missing[v] = first[v + 1] - first[v] + (1 if host_source[v] >= 0 else 0)
    targets = np.zeros(count + 1, np.int64)
    for k in range(len(source)):
        targets[source[k] + 1] += 1
    for v in range(count):
        targets[v + 1] += targets[v]
    place = targets[:-1].copy()
    target = np.empty(len(source), np.int32)
    for v in range(count):
        for k in range(first[v], first[v + 1]):
            target[place[source[k]]] = v
            place[source[k]] += 1
    follower = np.full(count, -1, np.int32)
    for v in range(count):
        if host_source[v] >= 0:
            follower[host_source[v]] = v
    waiting_for = np.zeros(max(len(join_first) - 1, 1), np.int64)
    for g in range(len(join_first) - 1):
        waiting_for[g] = join_first[g + 1] - join_first[g]
    order = np.empty(count, np.int32)
    queued = np.zeros(count, np.bool_)
    filled = 0
    for i in range(count):
        if missing[by_start[i]] == 0:
            order[filled] = by_start[i]
            queued[by_start[i]] = True
            filled += 1
    taken, forced = 0, 0
    while taken < count:
        if taken == filled:
            while queued[by_start[forced]]:
                forced += 1
            v = by_start[forced]
            lacks[v] = missing[v]
            order[filled] = v
            queued[v] = True
            filled += 1
        v = order[taken]
        taken += 1
        w = follower[v]
        if w >= 0:
            missing[w] -= 1
            if missing[w] == 0 and not queued[w]:
                order[filled] = w
                queued[w] = True
                filled += 1
        low, high = 0, 0
        if join[v] < 0:
            low, high = v, v + 1
        else:
            waiting_for[join[v]] -= 1
            if waiting_for[join[v]] == 0:
                low, high = join_first[join[v]], join_first[join[v] + 1]
        for m in range(low, high):
            u = v if join[v] < 0 else members[m]
            for k in range(targets[u], targets[u + 1]):
                w = target[k]
                missing[w] -= 1
                if missing[w] == 0 and not queued[w]:
                    order[filled] = w
                    queued[w] = True
                    filled += 1
    return order, lacks[:-1]


def replay_of(sources: Sequence[Sequence[int]], cost: Int64Array) -> Int64Array | None:
    """When each piece of work ends [the unit of ``cost``], started as soon as its sources have ended; None where they wait in a circle."""
    count = len(sources)
    first = np.cumsum([0, *map(len, sources)]).astype(np.int64)
    source = np.array([i for own in sources for i in own], np.int32)
    alone, nothing = np.full(count, -1, np.int32), np.empty(0, np.int32)
    order, lacks = causal_order(first, source, alone, np.zeros(1, np.int64), nothing, alone, np.arange(count, dtype=np.int32))
    if (lacks > 0).any():
        return None
    zero = np.zeros(count, np.int64)
    ended: Int64Array = replay(order, first, source, alone, 0, alone, zero, cost, zero)[1]
    return ended
