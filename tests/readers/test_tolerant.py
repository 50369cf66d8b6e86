"""One broken event costs one repair, or itself; never its neighbours."""

import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builder import Trace
from tracekit.readers.tolerant import (
    LOOK_AHEAD,
    PROBLEMS,
    decode_string,
    has_literal_backslash,
    repair_event,
    sentence,
    sentences,
)

CASES = Path(__file__).resolve().parents[2].parent / "shared" / "cases"
NEXT = ', {"ph": "X", "name": "next", "pid": 1, "ts": 9, "dur": 1}]}'


def repaired(event: str, follows: str = NEXT) -> tuple[dict | None, str, str]:
    """(event as a dict, problem, text that the scanner reads next) for an event that the scanner failed on."""
    data = (event + follows).encode()
    repair = repair_event(data, 0, final=True)
    return (json.loads(repair.event) if repair.event else None), repair.problem, data[repair.next :].decode()


@pytest.mark.parametrize(
    "name",
    [
        'Library("x", "IMPL")(1): <module>',
        '{"device": "cpu", "dtype": "float32"}(12): run',
        'a"b',
        '"',
        '""',
        '"quoted"(3): f',
        'print("a, "b": c")',
        'f("}")',
        'f("}, {")',
        '[{"ph": "X", "name": "y", "ts": 3}, {"ph": "X", "name": "z", "ts": 4}](7): g',
        'say \\"well\\" and "badly"',
        '{"ts": 1, "dur": "2"}',
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_raw_quotes_in_a_name(name: str, first: bool) -> None:
    named = f'"name": "{name}", '
    head, tail = (named, '"ph": "X", ') if first else ('"ph": "X", "cat": "python_function", ', named)
    event, problem, rest = repaired("{" + head + tail + '"pid": 4, "tid": 5, "ts": 12.250, "dur": 3, "args": {"Python id": 2}}')
    assert event is not None
    assert event["name"] == name.replace('\\"', '"')
    assert (event["ts"], event["dur"], event["args"]) == (12.25, 3, {"Python id": 2})
    assert problem == "quote"
    assert rest == NEXT


def test_raw_quotes_in_an_argument_keep_the_arguments_after_it() -> None:
    event, problem, _ = repaired('{"ph": "X", "pid": 1, "args": {"Call stack": "f("a", "b");g", "stream": 7}}')
    assert event == {"ph": "X", "pid": 1, "args": {"Call stack": 'f("a", "b");g', "stream": 7}}
    assert problem == "quote"


@pytest.mark.parametrize(
    ("event", "problem", "value"),
    [
        ('{"ph": "X", "ts": 1, "args": {"a": 1, "b": [1, 2,],},}', "comma", {"ph": "X", "ts": 1, "args": {"a": 1, "b": [1, 2]}}),
        ('{"ph": "X" "ts": 1, "args": {"a": [1 2], "b": 2 "c": 3}}', "comma", {"ph": "X", "ts": 1, "args": {"a": [1, 2], "b": 2, "c": 3}}),
        ('{"ph": "X",, "ts": 1}', "comma", {"ph": "X", "ts": 1}),
        ('{"ph": "X", "ts": NaN, "dur": -Infinity}', "number", {"ph": "X", "ts": None, "dur": None}),
        ('{"ph": "X", "ts": , "dur": 0x1f}', "number", {"ph": "X", "ts": None, "dur": None}),
        ('{name": "mm", "ph": "X", "ts": 2.5, "args": {}}', "key", {"name": "mm", "ph": "X", "ts": 2.5, "args": {}}),
        ('{"ph": "X", "name": "a\x01b\n", "ts": 1}', "control", {"ph": "X", "name": "a\x01b\n", "ts": 1}),
        ('{"ph": "X", "name": "C:\\dir\\", "ts": 1}', "backslash", {"ph": "X", "name": "C:\\dir\\", "ts": 1}),
        ('{"ph": "X", "name": "C:\\new\\q", "ts": 1}', "backslash", {"ph": "X", "name": "C:\\new\\q", "ts": 1}),
    ],
)
def test_one_slip(event: str, problem: str, value: dict) -> None:
    assert repaired(event) == (value, problem, NEXT)


def test_the_text_of_numbers_is_kept() -> None:
    data = b'{"ph": "X", "ts": 7889248000340.000, "dur": 1e3, "args": {"x": 123456789012345678901234567890,}}, {"ph": "X"}]'
    repair = repair_event(data, 0, final=True)
    assert repair is not None
    assert repair.event == b'{"ph":"X","ts":7889248000340.000,"dur":1e3,"args":{"x":123456789012345678901234567890}}'


@pytest.mark.parametrize(
    "event",
    [
        '{"ph": "X", "name": "abc, "ts": 1}',  # a quote is missing, and what it should close is anybody's guess
        '{"ph": "X", "name": "abc", "ts": 1]}',
        '{"ph": "X", "args": ' + "[" * 300 + "]" * 300 + "}",
        '{"ph": "X", "name": "a", "ts": 1 (2)}',
    ],
)
def test_a_hopeless_event_is_skipped_alone(event: str) -> None:
    assert repaired(event) == (None, "skipped", NEXT[2:])


def test_an_event_that_is_not_closed_is_skipped_alone() -> None:
    assert repaired('{"ph": "X", "name": "abc", "ts": 1') == (None, "skipped", NEXT[2:])


def test_a_hopeless_last_event_does_not_take_the_top_level_keys_with_it() -> None:
    event, problem, rest = repaired('{"ph": "X", "name": "abc, "ts": 1}', '], "traceName": "x"}')
    assert (event, problem, rest) == (None, "skipped", '], "traceName": "x"}')


def test_the_last_event_is_repaired_too() -> None:
    event, _, rest = repaired('{"ph": "X", "name": "a"b", "pid": 1}', '], "traceName": "x"}')
    assert (event, rest) == ({"ph": "X", "name": 'a"b', "pid": 1}, '], "traceName": "x"}')


def test_an_event_cut_by_the_end_of_the_file() -> None:
    data = b'{"ph": "X", "name": "abc'
    assert repair_event(data, 0, final=False) is None
    repair = repair_event(data, 0, final=True)
    assert repair is not None
    assert (repair.event, repair.next, repair.problem) == (None, len(data), "truncated")


@pytest.mark.parametrize(
    ("garbage", "rest"), [("xx, ", '{"ph": "X", "ts": 1}]'), ("null,", '{"name": "a", "ph": "X"}]'), ('7 "', "]}"), ("}", "]")]
)
def test_garbage_between_events(garbage: str, rest: str) -> None:
    data = (garbage + rest).encode()
    repair = repair_event(data, 0, final=True)
    assert repair is not None
    assert (repair.event, data[repair.next :].decode(), repair.problem) == (None, rest, "garbage")


def test_a_window_of_lost_text_ends_somewhere() -> None:
    data = b'{"ph": "X", "name": "' + b"a" * (3 * LOOK_AHEAD)
    repair = repair_event(data, 0, final=False)
    assert repair is not None
    assert (repair.event, repair.problem) == (None, "skipped")
    assert 0 < repair.next <= LOOK_AHEAD


@given(st.integers(0, 400), st.randoms(use_true_random=False))
def test_what_is_decided_does_not_depend_on_where_the_buffer_ends(cut: int, chance: random.Random) -> None:
    names = ['a"b', 'f("x", "y")', "plain", "C:\\dir\\", '{"a": "b"}', "tab\there"]
    text = ",\n".join(
        f'{{"ph": "X", "pid": 3, "name": "{chance.choice(names)}", "ts": {i}, "dur": 1, "args": {{"k": "{chance.choice(names)}", "s": 7}}}}'
        for i in range(4)
    )
    data = (text + '], "traceName": "x"}').encode()
    whole = repair_event(data, 0, final=True)
    early = repair_event(data[: max(cut, 1)], 0, final=False)
    assert early is None or early == whole


@given(st.binary(max_size=200), st.randoms(use_true_random=False))
def test_any_bytes_give_valid_json_or_a_skip_and_always_go_forward(noise: bytes, chance: random.Random) -> None:
    event = b'{"ph": "X", "name": "abc", "cat": "cpu_op", "ts": 1.5, "args": {"a": [1, "b"], "c": "d"}}, {"ph": "X"}]'
    at = chance.randrange(len(event))
    data = event[:at] + noise + event[at + chance.randrange(3) :]
    repair = repair_event(data, 0, final=True)
    assert repair is not None
    assert 0 < repair.next <= len(data)
    assert repair.problem in PROBLEMS
    if repair.event is not None:
        assert isinstance(json.loads(repair.event.decode(errors="replace")), dict)


HOSTILE = [
    b'{"ph":"' + b'"' * 200_000,
    b'{"ph":"' + b'","ph":"' * 30_000,
    b'{"ph":"X","a":"' + b'", "b": "' * 30_000 + b'"}',
    b"{" * 200_000,
    b'{"ph":"X","args":' + b"[" * 200_000,
    b'{"ph":"X","a":' + b"}" + b" " * 200_000,
    b'{"ph":"X","a":' + (b'"' + b" " * 500) * 500,
    b'{"ph":"X","name":"' + b'}, {"name": "' * 20_000,
    b"{" + b"," * 200_000,
    b'{"ph":"' + b"\\" * 200_001 + b'"',
    b"x" * 200_000,
    b'{"ph":' + b"1" * 200_000,
]


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_work_on_hostile_text_is_bounded(data: bytes) -> None:
    """Each looks at 200 kB; a quadratic step would take hours and be noticed."""
    repair = repair_event(data, 0, final=True)
    assert repair is not None
    assert repair.next > 0


def test_sentences_count() -> None:
    assert sentence("quote", 2) == "2 events with unescaped quotes in a string were repaired"
    assert sentence("quote", 1) == "1 event with unescaped quotes in a string was repaired"
    assert sentence("truncated", 1) == "1 event was cut off by the end of the file and was left out"
    assert [text.split()[0] for text in sentences({"comma": 3, "quote": 2, "key": 0})] == ["2", "3"]
    for key, text in PROBLEMS.items():
        assert text.startswith("{count} "), key
        assert " were " not in sentence(key, 1).replace("those bytes were", ""), key


# Backslashes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "shows", "as_json", "literally"),
    [
        (rb"torch\nn", False, "torch\nn", r"torch\nn"),
        (rb"torch\utils\data", True, r"torch\utils\data", r"torch\utils\data"),
        (rb"C:\Users\new", True, r"C:\Users\new", r"C:\Users\new"),
        (rb"torch\functional.py", True, "torch\functional.py", r"torch\functional.py"),
        (rb"a\\b", False, r"a\b", r"a\b"),
        (rb"\\server\share", True, r"\\server\share", r"\\server\share"),
        (rb"say \"x\"", False, 'say "x"', 'say "x"'),
        (rb"caf\u00e9", False, "café", "café"),
        (rb"\ufaced", False, "\ufaced", r"\ufaced"),
        (rb"\ud83d\ude00", False, "😀", "😀"),
        (rb"half \ud83d", False, "half \ufffd", r"half \ud83d"),
        (b"\xff\xfeok \xc3\xa9", False, "\ufffd\ufffdok é", "\ufffd\ufffdok é"),
    ],
)
def test_backslashes_of_one_string(raw: bytes, shows: bool, as_json: str, literally: str) -> None:
    assert has_literal_backslash(raw) is shows
    assert decode_string(raw, literal=False) == as_json
    assert decode_string(raw, literal=True) == literally


@given(st.text())
def test_decoding_agrees_with_json_where_json_can(text: str) -> None:
    for raw in (json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]):
        expected = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        assert decode_string(raw.encode(errors="replace"), literal=False) in (expected, raw.encode(errors="replace").decode())


@given(st.binary())
def test_what_is_decoded_can_be_written_as_utf8(raw: bytes) -> None:
    for literal in (False, True):
        decode_string(raw, literal).encode()


# Cases ---------------------------------------------------------------------------------------------------------------


def test_a_whole_trace_with_two_broken_names(tmp_path: Path) -> None:
    trace = Trace()
    names = ['lib = Library("demo", "IMPL")(1): <module>', '{"device": "cpu", "dtype": "float32"}(12): run']
    for index, name in enumerate(["train.py(3): main", *names, "model.py(8): forward"]):
        trace.add("python_function", name, 10 * index, 5)
    text = trace.text(indent=2).replace('\\"', '"')
    for name in names:
        at = text.rindex("{", 0, text.index(f'"name": "{name}'))
        repair = repair_event(text.encode(), at, final=True)
        assert repair is not None
        assert json.loads(repair.event or b"{}")["name"] == name


@pytest.mark.skipif(not CASES.is_dir(), reason="the shared cases are not here")
def test_shared_case_of_unescaped_quotes() -> None:
    data = (CASES / "P01_unescaped_quotes" / "rank0.json").read_bytes()
    starts = [data.rfind(b"{", 0, match.start()) for match in re.finditer(rb'"name": "(\{"|_lib)', data)]
    repairs = [repair_event(data, at, final=True) for at in starts]
    assert [repair.problem for repair in repairs if repair] == ["quote", "quote"]
    assert all(repair and json.loads(repair.event or b"")["dur"] in (40.0, 10.0) for repair in repairs)
