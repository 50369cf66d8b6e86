"""Files, folders, globs and URLs become a list of trace files, each once."""

import gzip
import os
from pathlib import Path

import pytest
import zstandard

from tracekit.errors import InputError
from tracekit.readers.recognise import looks_like_trace
from tracekit.readers.sources import find_sources, natural_key

JSON = b'{"traceEvents": []}'


def put(folder: Path, *names: str, content: bytes = JSON) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def names(*paths: Path | str) -> list[str]:
    return [source.name for source in find_sources([str(path) for path in paths]).sources]


def skipped(*paths: Path | str) -> dict[str, str]:
    return {coverage.file: coverage.problems[0] for coverage in find_sources([str(path) for path in paths]).skipped}


@pytest.mark.parametrize(
    "layout",
    [
        ["rank0.json", "rank1.json", "rank2.json.gz", "rank10.json.zst"],
        ["host_12.1778000001592181759.pt.trace.json", "host_13.1778000001592181760.pt.trace.json.gz"],
        ["profile_traces/iteration_5/rank0_trace.json", "profile_traces/iteration_10/rank0_trace.json"],
        ["libkineto_activities_41200.json", "libkineto_activities_41213.json"],
        ["any.gz", "other.JSON", "third.zst"],
    ],
)
def test_layouts_of_the_tools_that_write_traces(tmp_path: Path, layout: list[str]) -> None:
    put(tmp_path, *layout)
    assert names(tmp_path) == layout


def test_what_is_no_trace_is_passed_over_in_silence(tmp_path: Path) -> None:
    put(tmp_path, "rank0.json")
    put(
        tmp_path,
        *["rank0.manifest.json", "manifest.json", "rank0.manifest.json.gz", "snap.pickle", "report.html", "notes.txt", ".hidden.json"],
        *["logs.tar.gz", "run.log.gz", "cache/ab.arrow", ".cache/x.json", "noext", "__pycache__/x.json", "snap.pickle.gz"],
    )
    assert names(tmp_path) == ["rank0.json"]
    assert skipped(tmp_path) == {}


def test_left_over_temporary_files_are_mentioned(tmp_path: Path) -> None:
    put(tmp_path, "rank3.json", "rank3.json.tmp", "a/rank4.json.gz.tmp", "editor.tmp")
    assert names(tmp_path) == ["rank3.json"]
    assert sorted(skipped(tmp_path)) == ["a/rank4.json.gz.tmp", "rank3.json.tmp"]
    assert "had not finished" in skipped(tmp_path)["rank3.json.tmp"]


def test_a_file_that_is_named_needs_no_ending(tmp_path: Path) -> None:
    put(tmp_path, "trace", "rank3.json.tmp")
    put(tmp_path, "packed", content=gzip.compress(JSON))
    put(tmp_path, "photo.png", content=b"\x89PNG")
    assert names(tmp_path / "trace", tmp_path / "packed", tmp_path / "rank3.json.tmp") == ["packed", "rank3.json.tmp", "trace"]
    assert names(tmp_path / "trac?", tmp_path / "p*") == ["packed", "trace"]
    with pytest.raises(InputError, match=r"'photo\.png' is not a trace"):
        find_sources([str(tmp_path / "photo.png")])


def test_a_named_file_that_is_something_else_is_one_skipped_line(tmp_path: Path) -> None:
    put(tmp_path, "rank0.json", "rank0.manifest.json")
    assert skipped(*tmp_path.iterdir()) == {"rank0.manifest.json": "is a manifest of the recorder, not a trace"}


def test_memory_snapshots_are_sources_by_their_content_and_where_they_are_named(tmp_path: Path) -> None:
    put(tmp_path, "rank0.json")
    put(tmp_path, "rank0.pickle", content=b"\x80\x04}(\x8c\x08segments]\x8c\x0dtotal_size")
    put(tmp_path, "weights.pkl", content=b"\x80\x04]")
    put(tmp_path, "memory_snapshot.pkl.gz", content=b"damaged")
    put(tmp_path, "model_snapshot.pkl", content=b"PK\x03\x04")  # torch.save
    assert names(tmp_path) == ["memory_snapshot.pkl.gz", "rank0.json", "rank0.pickle"]
    assert skipped(tmp_path) == {}
    assert names(tmp_path / "weights.pkl") == ["weights.pkl"]


def test_the_same_file_is_taken_once(tmp_path: Path) -> None:
    put(tmp_path, "a/rank0.json", "a/rank1.json")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "rank0.json").symlink_to(tmp_path / "a" / "rank0.json")
    found = find_sources([str(tmp_path / "a" / "rank0.json"), str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "*.json")])
    assert len(found.sources) == 2
    assert found.skipped == []


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    put(tmp_path, "a/rank0.json")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "a" / "self").symlink_to(tmp_path / "a")
    (tmp_path / "b").symlink_to(tmp_path / "b")
    assert names(tmp_path) == ["a/rank0.json"]
    assert names(tmp_path / "**" / "*.json") == ["rank0.json"]


def test_a_link_to_nothing_is_mentioned_when_it_is_called_a_trace(tmp_path: Path) -> None:
    put(tmp_path, "rank0.json")
    (tmp_path / "rank1.json").symlink_to(tmp_path / "gone.json")
    assert skipped(tmp_path) == {"rank1.json": "could not be opened: No such file or directory"}


def test_globs(tmp_path: Path) -> None:
    put(tmp_path, "run1/rank0.json", "run2/rank0.json", "run2/x.txt", "odd[1].json", "run1/.secret/y.json")
    assert [Path(name).parts[-2:] for name in names(tmp_path / "run*" / "*")] == [("run1", "rank0.json"), ("run2", "rank0.json")]
    assert len(names(tmp_path / "**")) == 3
    assert names(tmp_path / "odd[1].json") == ["odd[1].json"]
    assert names(str(tmp_path / "run[1]")) == ["rank0.json"]
    with pytest.raises(InputError, match="no file matches"):
        find_sources([str(tmp_path / "*.gz")])
    with pytest.raises(InputError, match="is no pattern"):
        find_sources([str(tmp_path / "a**b")])


@pytest.mark.parametrize("path", ["nothing/here.json", "", "a\0b", "x" * 5000, "line\nbreak", "file:///nothing/here", "[\0"])
def test_a_path_that_does_not_exist_is_named_on_one_line(path: str) -> None:
    with pytest.raises(InputError) as raised:
        find_sources([path])
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500
    assert "there is no file or folder" in str(raised.value) or "no file matches" in str(raised.value)


def test_nothing_found_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no trace was found in .*\.json, \.json\.gz or \.json\.zst") as raised:
        find_sources([str(tmp_path)])
    assert raised.value.exit_code == 2
    put(tmp_path, "rank0.json.tmp")
    with pytest.raises(InputError, match=r"rank0\.json\.tmp.*had not finished"):
        find_sources([str(tmp_path)])
    with pytest.raises(InputError, match="no path"):
        find_sources([])


@pytest.mark.parametrize(
    ("name", "remedy"), [("a.tar.gz", "give it by its own name"), ("a.zip", "own name"), ("rank0.json.xz", "unpack it")]
)
def test_an_archive_in_a_folder_without_traces_is_named(tmp_path: Path, name: str, remedy: str) -> None:
    put(tmp_path, name)
    with pytest.raises(InputError, match=f"{name}'.*{remedy}"):
        find_sources([str(tmp_path)])


def test_an_empty_folder_among_others_is_mentioned(tmp_path: Path) -> None:
    put(tmp_path, "a/rank0.json")
    (tmp_path / "b").mkdir()
    assert [text.split(":")[0] for text in skipped(tmp_path / "a", tmp_path / "b").values()] == ["holds no trace"]
    assert skipped(tmp_path, tmp_path / "a") == {}


def test_a_file_without_permission_costs_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "rank0.json", "rank1.json")
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("rank1.json"))
    assert names(tmp_path) == ["rank0.json"]
    assert skipped(tmp_path) == {"rank1.json": "may not be read: permission denied"}


def test_a_folder_without_permission_costs_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "rank0.json", "locked/rank1.json")
    scandir = os.scandir

    def refuse(path: str):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert names(tmp_path) == ["rank0.json"]
    assert skipped(tmp_path) == {"locked": "could not be searched: Permission denied"}


def test_a_pipe_is_never_opened(tmp_path: Path) -> None:
    put(tmp_path, "rank0.json")
    os.mkfifo(tmp_path / "rank1.json")
    assert names(tmp_path) == ["rank0.json"]
    assert [*skipped(tmp_path / "rank0.json", tmp_path / "rank1.json").values()] == ["is not a regular file and was not read"]


def test_names_that_are_hostile_or_no_text(tmp_path: Path) -> None:
    put(tmp_path, "<b>&\n.json")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff0.json")).write_bytes(JSON)
    found = find_sources([str(tmp_path)]).sources
    assert {source.name for source in found} == {"<b>&\n.json", "\ufffd0.json"}
    for source in found:
        source.name.encode()
        with source.open() as file:
            assert file.read() == JSON


def test_size_and_time_of_a_source(tmp_path: Path) -> None:
    put(tmp_path, "rank0.json")
    os.utime(tmp_path / "rank0.json", ns=(5, 1_700_000_000_123_456_789))
    (source,) = find_sources([str(tmp_path)]).sources
    assert (source.url, source.size, source.mtime) == (str(tmp_path / "rank0.json"), len(JSON), 1_700_000_000_123_456_789)


def test_home_and_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "t/rank0.json")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "t")
    assert names("~/t") == names(".") == names("rank0.json") == names(f"file://{tmp_path}/t/rank0.json") == ["rank0.json"]


def test_names_sort_as_people_count() -> None:
    files = ["rank10", "rank2", "rank02", "rank" + "9" * 5000, "rank", "a"]
    assert sorted(files, key=natural_key) == ["a", "rank", "rank2", "rank02", "rank10", "rank" + "9" * 5000]


@pytest.fixture
def memory():
    import fsspec

    system = fsspec.filesystem("memory")
    system.pipe({"/job/rank0.json": JSON, "/job/deep/rank1.json.gz": gzip.compress(JSON), "/job/x.html": b"", "/job/rank2.json.tmp": b""})
    yield system
    system.rm("/job", recursive=True)


def test_urls(memory) -> None:
    found = find_sources(["memory://job", "memory://job/rank0.json", "memory://job/*.json"])
    assert [(source.name, source.url) for source in found.sources] == [
        ("deep/rank1.json.gz", "memory:///job/deep/rank1.json.gz"),
        ("rank0.json", "memory:///job/rank0.json"),
    ]
    assert [coverage.file for coverage in found.skipped] == ["rank2.json.tmp"]
    with found.sources[0].open() as file:
        assert gzip.decompress(file.read()) == JSON
    assert found.sources[1].size == len(JSON)
    assert found.sources[1].mtime > 0


@pytest.mark.parametrize("url", ["memory://nothing", "memory://job/nothing.json", "memory://job/*.zst", "nosuchscheme://x/y"])
def test_urls_that_lead_nowhere(memory, url: str) -> None:
    with pytest.raises(InputError) as raised:
        find_sources([url])
    assert url.split("://")[1] in str(raised.value)


def test_looking_into_bytes() -> None:
    packed = zstandard.ZstdCompressor().compress(JSON)
    for head in (JSON, b"\xef\xbb\xbf \n[", gzip.compress(JSON), packed, gzip.compress(packed), gzip.compress(JSON)[:-9]):
        assert looks_like_trace(head)
    for head in (b"", b"\x80\x04\x95", b"<html>", b"\x1f\x8bxx", b"\x28\xb5\x2f\xfdxx", gzip.compress(b"text")):
        assert not looks_like_trace(head)
