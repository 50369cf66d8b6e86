"""The pass over events: keys, strings, and why it stops where it stops."""

import json

import numpy as np
import pytest

from tests.builder import Trace
from tracekit.readers import keys, scan
from tracekit.readers.entry import entries
from tracekit.readers.keys import SIDE_TABLES, Spec
from tracekit.readers.pool import ESCAPED, PLAIN, RAW, Pool
from tracekit.readers.worker import Worker, padded

EVENT = {
    "ph": "X",
    "cat": "kernel",
    "name": 'a "b"',
    "pid": 0,
    "tid": "7",
    "ts": 1.5,
    "dur": 2,
    "args": {"stream": 7, "Seq": 3, "dtype": "Float", "Input Dims": [[1, 2], []], "other": {"a": ["}", 1]}},
}


def worker(rows=1 << 16):
    return Worker(Spec(), rows)


def parse(text, reader=None):
    raw = text.encode()
    return (reader or worker()).parse(padded(raw), 0, len(raw))


def strings(reader):
    return [raw for _, raw in reader.pool.since(0)]


@pytest.mark.parametrize("table", ["top", "arguments"])
def test_every_wanted_key_is_found_and_no_other(table):
    wanted = list(keys.TOP_KEYS) if table == "top" else [*keys._ARGUMENTS, *(c for t in SIDE_TABLES.values() for c in t)]
    memory = getattr(Spec(), table)

    def found(key):
        raw = padded(key.encode())
        return keys.find_key(raw.ctypes.data, 0, len(key.encode()), memory.ctypes.data)

    assert [found(key) for key in wanted] == list(range(len(wanted)))
    near = {key[:-1] for key in wanted} | {key + "s" for key in wanted} | {key[:9] + "_" + key[10:] for key in wanted}
    near |= {"", "TS", "x" * 200}
    assert {found(key) for key in near - set(wanted)} == {-1}


def test_a_pool_gives_one_code_a_distinct_text_and_grows():
    code = entries()
    pool = Pool(("known",), code.intern, code.rehash, 4, 300)
    seen = {(PLAIN, b""): 0, (PLAIN, b"known"): 1}
    for i in range(3000):
        kind, raw = (PLAIN, ESCAPED, RAW)[i % 3], b"name %d" % (i % 1001) * (i % 7)
        text = padded(raw)
        while (number := code.intern(text.ctypes.data, 0, len(raw), kind, pool.address)) < 0:
            pool.grow(len(raw))
        assert number == seen.setdefault((kind, raw), len(seen))
    assert list(pool.since(0)) == list(seen)
    assert list(pool.since(500)) == list(seen)[500:]


def test_a_row_holds_what_the_event_says():
    reader = worker()
    (block,) = parse(json.dumps(EVENT) + "]", reader).blocks
    assert [column.tolist() for column in block.wide[:2]] == [[1500], [2000]]
    assert block.narrow[scan.NARROW_STREAM].tolist() == [7]
    assert strings(reader)[block.narrow[scan.NARROW_NAME][0]] == b'a \\"b\\"'
    assert reader.lanes[: reader.lane_count].tolist() == [[0, 7]]
    rows, values = block.side[list(SIDE_TABLES).index("shapes")]
    assert rows.tolist() == [0]
    assert strings(reader)[values[0, 0]] == b"[[1, 2], []]"


@pytest.mark.parametrize("indent", [None, 2])
def test_an_event_that_is_cut_anywhere_leaves_nothing_and_asks_for_more(indent):
    first, second = json.dumps(EVENT, indent=indent), json.dumps(EVENT | {"ts": 9}, indent=indent)
    reader = worker()
    for cut in range(len(second)):
        piece = parse(first + "," + second[:cut], reader)
        assert (piece.stopped, piece.position) == (scan.MORE, len(first) + (cut > 0)), cut
        (block,) = piece.blocks
        assert len(block) == 1
        assert {len(rows) for rows, _ in block.side} <= {0, 1}


@pytest.mark.parametrize(
    ("text", "stopped", "at"),
    [
        ("", scan.MORE, 0),
        (" ,\n ", scan.MORE, 0),
        ("]", scan.END, 1),
        ("{}]}", scan.END, 3),
        ("{},]", scan.END, 4),
        ("{} {}]", scan.SYNTAX, 3),
        ("{},,{}]", scan.SYNTAX, 3),
        ("7]", scan.SYNTAX, 0),
        ('{}, {"ph" "X"}]', scan.SYNTAX, 4),
        ('{"ph": "X" "ts": 1}]', scan.SYNTAX, 0),
        ('{"name": "say "hi""}]', scan.SYNTAX, 0),
        ('{ph": "X"}]', scan.SYNTAX, 0),
        ('{"args": {"a": }}]', scan.SYNTAX, 0),
        ('{"args": {"a": 1]}]', scan.SYNTAX, 0),
    ],
)
def test_where_the_pass_stops(text, stopped, at):
    piece = parse(text)
    assert (piece.stopped, piece.position) == (stopped, at)


def test_arrows_and_half_events_give_back_their_side_rows():
    args = {"Seq": 1, "Addr": 5}
    events = [{"ph": "f", "args": args}, {"ph": "X", "args": {"Seq": 2}}, {"ph": "s", "args": args}, {"ph": "X", "args": args}]
    piece = parse(",".join(map(json.dumps, events)) + ', {"args": {"Seq": 9, "Addr": 9}')
    (block,) = piece.blocks
    assert len(block) == 2
    communication, memory = (block.side[list(SIDE_TABLES).index(table)] for table in ("communication", "memory"))
    assert communication[0].tolist() == [0, 1]
    assert memory[0].tolist() == [1]


def test_lanes_are_numbered_as_they_come_and_outgrow_their_table():
    places = [(i % 7, i) for i in range(2500)] + [(3, "stream x"), (3, 2**64 - 1), (-5, 0)]
    text = ",".join(json.dumps({"ph": "X", "pid": pid, "tid": tid}) for pid, tid in places * 2) + "]"
    reader = worker()
    lanes = np.concatenate([block.narrow[scan.NARROW_LANE] for block in parse(text, reader).blocks])
    assert lanes.tolist() == [*range(len(places))] * 2
    assert reader.lanes[:3].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert reader.lanes[reader.lane_count - 1].tolist() == [-5, 0]
    assert [strings(reader)[tid - scan.TEXT_KEY] for _, tid in reader.lanes[2500:2502].tolist()] == [b"stream x", str(2**64 - 1).encode()]


def test_more_rows_than_the_arrays_hold_come_in_several_blocks():
    trace = Trace()
    for i in range(3000):
        trace.add("cpu_op", "a", i, 1, Seq=i)
    raw = (json.dumps(trace.events)[1:]).encode()
    piece = worker(rows=96).parse(padded(raw), 0, len(raw))
    assert [len(block) for block in piece.blocks] == [1024, 1024, 952]
    assert piece.stopped == scan.END
    seqs = [block.side[0][1][list(SIDE_TABLES["communication"]).index("Seq")] for block in piece.blocks]
    assert np.concatenate(seqs).tolist() == list(range(3000))


@pytest.mark.parametrize(
    ("text", "behind"),
    [
        ('{"traceEvents": [', 0),
        ('{"a": {"traceEvents": [1]}, "traceEvents":[', 0),
        ('{"a": "traceEvents", "b": [{"traceEvents": []}],\n "traceEvents" : [ {"', 3),
        ("  [{", 1),
        ('{"traceEvents": {}, "b": 1', -1),
        ('{"traceEvents": {}}', -2),
        ('{"traceEvent', -1),
        ("{}", -2),
        ("", -1),
        ("PK\x03\x04", -2),
        ('{"a" 1, "traceEvents": [', -2),
    ],
)
def test_the_list_of_events_is_found_on_the_top_level_only(text, behind):
    """``behind``: bytes after the list's bracket; -1 not yet, -2 not this way."""
    raw = padded(text.encode())
    assert entries().find_events(raw.ctypes.data, 0, len(text)) == (len(text) - behind if behind >= 0 else behind)
