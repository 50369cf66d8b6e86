"""Collectives, predicted beside measured: the lines of every class, and why one differs."""

from __future__ import annotations

from collections.abc import Mapping

from tracekit.analyses.comparison.lines import UNEVEN, UNSIZED, Line, line
from tracekit.analyses.comparison.predicted import Key, Prediction, Volume, routed_bytes

#: Of a job that does not state its collectives (the workloads do) the model knows the traffic of what it found, and not all there is.
UNKNOWN = "the model does not know what this job communicates beside what its units show"


def traffic_lines(prediction: Prediction, measured: Mapping[Key, Volume], step: int) -> list[Line]:
    """Calls and bytes of every class of collectives of one rank in one step, in which ``measured`` was seen."""
    lines = []
    for key in sorted({*prediction.traffic, *measured}):
        expected, seen = prediction.traffic.get(key, Volume(0, 0)), measured.get(key, Volume(0, 0))
        name = f"collectives.{'.'.join(part or 'unknown' for part in key)}"
        if key[2] == "setup" and not expected.calls:
            continue  # barriers and objects: what a program does beside training
        why = elsewhere(prediction.traffic, measured, key)
        if not expected.calls and not prediction.manifest.expected:
            size, why = seen.full_bytes if seen.full_bytes >= 0 else None, why or UNKNOWN
            lines.append(line(f"{name}.calls", prediction.rank, None, seen.calls, "calls", why))
            lines.append(line(f"{name}.bytes", prediction.rank, None, size, "bytes", why))
            continue
        why = why or cause(prediction, key, expected, seen)
        lines.append(line(f"{name}.calls", prediction.rank, expected.calls, seen.calls, "calls", why))
        size = expected.full_bytes
        if expected.uncertain:
            routed = routed_bytes(prediction, expected, step)
            size, why = (size, UNEVEN) if routed is None else (routed, why)
        known = seen.full_bytes if seen.full_bytes >= 0 else None
        lines.append(line(f"{name}.bytes", prediction.rank, size, known, "bytes", why if known is not None else UNSIZED))
    return lines


def elsewhere(predicted: Mapping[Key, Volume], measured: Mapping[Key, Volume], key: Key) -> str:
    """The cause where only purposes are told apart differently: all calls of the kind on the axis together are as predicted."""
    both = [[volume for other, volume in found.items() if other[:2] == key[:2]] for found in (predicted, measured)]
    calls, sizes = ([sum(getattr(v, name) for v in volumes) for volumes in both] for name in ("calls", "full_bytes"))
    if calls[0] == calls[1] and sizes[0] == sizes[1]:
        calls_of = f"calls of {key[1]} over {key[0] or 'unknown'}"
        return f"{calls_of} are as predicted, all purposes together: the trace does not tell what each of them was for"
    return ""


def cause(prediction: Prediction, key: Key, expected: Volume, seen: Volume) -> str:
    """Why a class differs from its prediction, as far as the figures tell."""
    found = prediction.found
    assert found is not None
    m = found.plan.batch.micro_batches
    if not expected.calls:
        metric = "a flag or a metric that the program reduces by itself"
        return metric if key[2] == "metrics" else "the model knows no such collective in this job"
    if not seen.calls:
        return "predicted, and not in the trace"
    if m > 1 and seen.calls == m * expected.calls:
        return f"once in each of the {m} micro-batches, not once a step: no_sync or set_requires_gradient_sync(False) is not in force"
    if key[1] == "all_gather" and key[2] == "parameter_gather" and seen.calls > expected.calls:
        extra = seen.calls - expected.calls
        more = f"{extra} all-gather{'s' if extra > 1 else ''} more"
        return f"{more}: the root is gathered again in backward, or units are freed between micro-batches"
    if key[1] == "all_gather" and key[2] == "parameter_gather":
        return "fewer all-gathers: units stay gathered after forward (reshard_after_forward=False)"
    if seen.calls != expected.calls and seen.full_bytes == expected.full_bytes:
        return "the same bytes in other buckets"
    if expected.full_bytes and seen.full_bytes == 2 * expected.full_bytes:
        return "twice the bytes: it travels in an element type twice as wide (gradients reduced in fp32)"
    if seen.calls == expected.calls and 2 * seen.full_bytes == expected.full_bytes:
        return "half the bytes: it travels in an element type half as wide"
    if seen.calls == expected.calls and 0 < abs(seen.full_bytes - expected.full_bytes) <= 0.05 * expected.full_bytes:
        return "a few bytes: padding, or shards of unequal length"
    return "buckets or units are cut differently than the model takes them to be"
