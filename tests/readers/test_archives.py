"""An archive of traces is read as the folder that was packed."""

import io
import json
import tarfile
import zipfile

import pytest
from click.testing import CliRunner

from tests.builder import Trace
from tracekit.cli.main import cli
from tracekit.errors import InputError
from tracekit.readers import archives
from tracekit.readers.archives import as_folders


def traces(folder):
    folder.mkdir()
    for rank in (0, 1):
        trace = Trace(rank, 2)
        trace.step(1, 0, 100)
        trace.collective("allreduce", 10, 20, seq=1)
        trace.write(folder / f"rank{rank}.json")
    return folder


def packed(folder, path):
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
            for file in sorted(folder.iterdir()):
                bundle.write(file, f"run/{file.name}")
    else:
        with tarfile.open(path, "w:gz" if path.suffix in (".gz", ".tgz") else "w") as archive:
            archive.add(folder, "run")
    return path


@pytest.mark.parametrize("name", ["job.zip", "job.tar", "job.tar.gz", "job.tgz"])
def test_an_archive_gives_what_its_folder_gives(tmp_path, name):
    folder = traces(tmp_path / "job")
    found = {}
    for path in (folder, packed(folder, tmp_path / name)):
        output = tmp_path / "out.json"
        result = CliRunner().invoke(cli, ["analyze", str(path), "--no-report", "--no-cache", "--json", str(output)])
        assert result.exit_code == 0, result.output
        found[path.name] = json.loads(output.read_text())
    files = [entry.pop("file") for entry in found[name]["coverage"]]
    assert files == [f"{tmp_path / name}/run/rank{rank}.json" for rank in (0, 1)]
    for entry in found["job"]["coverage"]:
        entry.pop("file")
    assert found[name] == found["job"]


def hostile(path, names):
    with tarfile.open(path, "w") as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 2
            archive.addfile(info, io.BytesIO(b"{}"))
        link = tarfile.TarInfo("link.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return path


def test_nothing_is_written_outside_the_scratch_folder(tmp_path):
    archive = hostile(tmp_path / "x.tar", ["../out.json", "/abs.json", "a/../../b.json", "good.json"])
    with as_folders([str(archive)]) as ([folder], _):
        found = sorted(str(path.relative_to(folder)) for path in tmp_path.__class__(folder).rglob("*"))
    assert found == ["abs.json", "good.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.tar"]
    assert not tmp_path.__class__(folder).exists()


def test_what_an_archive_may_unpack_is_bounded(tmp_path, monkeypatch):
    archive = tmp_path / "bomb.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as bundle:
        bundle.writestr("rank0.json", b"0" * 50_000_000)
    monkeypatch.setattr(archives, "_DISK_SHARE", 1e-6)
    with pytest.raises(InputError, match="more than half of the free disk"), as_folders([str(archive)]):
        pass
    many = hostile(tmp_path / "many.tar", [f"{number}.json" for number in range(5)])
    monkeypatch.setattr(archives, "_DISK_SHARE", 0.5)
    monkeypatch.setattr(archives, "_MOST_FILES", 3)
    with pytest.raises(InputError, match="more than 3 files"), as_folders([str(many)]):
        pass


@pytest.mark.parametrize("name", ["x.zip", "x.tar.gz", "x.tar"])
@pytest.mark.parametrize("content", [b"", b"no archive at all", b"PK\3\4" + b"\0" * 50, b"\x1f\x8b\x08" + b"\0" * 40])
def test_a_broken_archive_is_one_line(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    result = CliRunner().invoke(cli, ["analyze", str(tmp_path / name), "--no-report"])
    assert result.exit_code == 2
    assert name in result.output
    assert len(result.output.splitlines()) == 1


def test_a_cut_archive_is_told(tmp_path):
    whole = packed(traces(tmp_path / "job"), tmp_path / "x.tar.gz").read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(whole[: len(whole) // 2])
    result = CliRunner().invoke(cli, ["analyze", str(tmp_path / "cut.tar.gz"), "--no-report"])
    assert result.exit_code == 2
    assert "cut.tar.gz" in result.output
    assert "could not be read" in result.output
