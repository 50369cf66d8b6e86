"""The top-level keys of a trace, whatever state the text around its events is in."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.readers.tolerant import parse_metadata

CASES = Path(__file__).resolve().parents[2].parent / "shared" / "cases"
HEAD = b'{"schemaVersion": 1, "distributedInfo": {"rank": 1}, "baseTimeNanoseconds": 1775078550000000001, "traceEvents": '


def test_keys_before_and_after_the_events() -> None:
    assert parse_metadata(HEAD, b',\n "traceName": "x", "INFO": ["a", "b"]\n}\n') == (
        {
            "schemaVersion": 1,
            "distributedInfo": {"rank": 1},
            "baseTimeNanoseconds": 1775078550000000001,
            "traceName": "x",
            "INFO": ["a", "b"],
        },
        [],
    )


@pytest.mark.parametrize("opening", [b"", b"[", b" [\n "])
@pytest.mark.parametrize("tail", [b"}", b"", b",", b', "x'])
def test_the_head_survives_whatever_happened_to_the_tail(opening: bytes, tail: bytes) -> None:
    metadata, problems = parse_metadata(HEAD + opening, tail)
    assert metadata == {"schemaVersion": 1, "distributedInfo": {"rank": 1}, "baseTimeNanoseconds": 1775078550000000001}
    assert problems == []


@pytest.mark.parametrize(
    ("head", "metadata", "word"),
    [
        (b"", {}, ""),
        (b"{}", {}, ""),
        (b"{", {}, ""),
        (b'{"a": 1, "b": {"c": 2', {"a": 1}, "'b' is cut off"),
        (b'{"a": 1, "b": "cu', {"a": 1}, "'b' is cut off"),
        (b'{"a": [1, 2,], "traceEvents": [', {"a": [1, 2]}, "comma"),
        (b'{"a": 1, "b": 2,}', {"a": 1, "b": 2}, "comma too many after the last"),
        (b'{"a": 1 "b": 2, "traceEvents":', {"a": 1, "b": 2}, ""),
        (b'{"a": "x"y", "b": 2, "traceEvents":', {"a": 'x"y', "b": 2}, "unescaped quotes in the top-level key 'a'"),
        (b'{"a": "C:\\new\\x\\", "b": 2, "traceEvents":', {"a": "C:\\new\\x\\", "b": 2}, "backslashes"),
        (b'{"a": NaN, "b": 2, "traceEvents":', {"a": None, "b": 2}, "no JSON in the top-level key 'a'"),
        (b'{"a": (?), "b": 2, "traceEvents":', {"b": 2}, "'a' is cut off or broken"),
        (b'{"a": "\xff\xc3\xa9", "traceEvents":', {"a": "\ufffd\u00e9"}, "UTF-8"),
        (b'\xef\xbb\xbf{"a": 1, "traceEvents":', {"a": 1}, ""),
        (b'{"a": 1, "a": 2, "traceEvents":', {"a": 2}, "'a' stands twice"),
        (b'{"a": 1, "a": 1, "traceEvents":', {"a": 1}, ""),
        (b'{"<b>\\u00e9": 1, "traceEvents":', {"<b>\u00e9": 1}, ""),
    ],
)
@pytest.mark.parametrize("tail", [b"}", b""])
def test_damage(head: bytes, metadata: dict, word: str, tail: bytes) -> None:
    if head and not head.endswith((b":", b"[")):
        tail = b""
    read, problems = parse_metadata(head, tail)
    assert read == metadata
    assert any(word in problem for problem in problems) if word else True
    assert all("\n" not in problem for problem in problems)


@pytest.mark.parametrize("tail", [b', "z": 1}', b', "z": 1,}', b', "z": 1'])
def test_two_distributed_infos_are_both_kept(tail: bytes) -> None:
    metadata, problems = parse_metadata(b'{"distributedInfo": {"rank": 1}, "distributedInfo": {"rank": 0}, "traceEvents": ', tail)
    assert metadata == {"distributedInfo": {"rank": 1}, "_distributedInfo_all": [{"rank": 1}, {"rank": 0}], "z": 1}
    assert "distributedInfo stands twice in the file, with rank 1 and 0" in problems


@pytest.mark.parametrize(
    ("text", "base"),
    [
        (b"1775078550000000001", 1775078550000000001),
        (b'"1775078550000000001"', 1775078550000000001),
        (b'" 17 "', 17),
        (b"1775078550000000001.0", 1775078550000000001),
        (b"0", 0),
        (b"null", None),
        (b'"soon"', None),
        (b"1e400", None),
        (b"9" * 30, None),
        (b"9" * 6000, None),
        (b"true", None),
        (b"[1]", None),
        (b"NaN", None),
    ],
)
def test_the_base_time_is_exact_or_absent(text: bytes, base: int | None) -> None:
    metadata, problems = parse_metadata(b'{"baseTimeNanoseconds": ' + text + b', "traceEvents": ', b"}")
    assert metadata.get("baseTimeNanoseconds") == base
    assert bool(problems) == (base is None)


def test_deep_nesting_and_giant_numbers_do_not_stop_the_rest() -> None:
    head = b'{"deep": ' + b"[" * 100_000 + b"]" * 100_000 + b', "giant": ' + b"7" * 9000 + b', "rank": 3, "traceEvents": '
    metadata, problems = parse_metadata(head, b"}")
    assert metadata["rank"] == 3
    assert metadata["giant"] == "7" * 9000
    assert "'deep' is cut off or broken" in problems[0]


def test_work_on_a_hostile_head_is_bounded() -> None:
    """Each is 200 kB; a quadratic step would take hours and be noticed."""
    heads = [b'{"a": "' + b'","' * 70_000, b"{" + b'"a":' * 50_000, b'{"a": ' + b'"x" ' * 50_000, b'{"' + b"\\" * 200_001]
    for head in [*heads, b'{"a": x' + b', "' * 70_000, b'{"a": x' + b', "b": x' * 30_000]:
        assert parse_metadata(head, b"")[0].keys() <= {"a", "b"}
    many = b"{" + b",".join(b'"k%d": "x"' % i for i in range(50_000)) + b","
    assert len(parse_metadata(many, b"")[0]) == 50_000


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(-1e6, 1e6),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=50)
@given(st.dictionaries(st.text().filter(lambda key: key not in ("traceEvents", "distributedInfo", "baseTimeNanoseconds")), values))
def test_healthy_text_reads_as_json_does(document: dict) -> None:
    text = json.dumps(document)[:-1].encode() + (b", " if document else b"") + b'"traceEvents": '
    clean = json.loads(json.dumps(document, ensure_ascii=False).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))
    metadata, problems = parse_metadata(text, b"}")
    assert metadata == clean
    assert problems == []


@given(st.binary(max_size=300), st.binary(max_size=100))
def test_any_bytes_give_something_that_can_be_written(head: bytes, tail: bytes) -> None:
    metadata, problems = parse_metadata(head, tail)
    json.dumps(metadata, ensure_ascii=False, allow_nan=False).encode()
    assert all(isinstance(problem, str) for problem in problems)


@pytest.mark.skipif(not CASES.is_dir(), reason="the shared cases are not here")
def test_shared_cases() -> None:
    for case, name, word in (("P14_duplicate_keys", "rank1.json", "twice"), ("P11_trailing_commas", "rank0.json", "comma")):
        data = (CASES / case / name).read_bytes()
        at = data.index(b"[", data.index(b'"traceEvents"'))
        metadata, problems = parse_metadata(data[: at + 1], data[data.rindex(b"]") + 1 :])
        assert metadata["distributedInfo"]["rank"] == int(name[4])
        assert metadata["baseTimeNanoseconds"] == 1775078550000000000
        assert any(word in problem for problem in problems)
