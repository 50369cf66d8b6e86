"""Files appear whole or not at all, whatever stands in their place already."""

import os
from pathlib import Path

import pytest

from tracekit.files import SCRATCH_PREFIX, write_atomically, write_by


def test_a_file_is_replaced_only_when_the_new_one_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    write_atomically(target, [b"one", b"two"])
    assert target.read_bytes() == b"onetwo"

    def breaks() -> object:
        yield b"half"
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(target, breaks())  # type: ignore[arg-type]
    assert target.read_bytes() == b"onetwo"
    assert list(tmp_path.iterdir()) == [target]


def test_a_link_keeps_pointing_to_the_file_it_names(tmp_path: Path) -> None:
    target, link = tmp_path / "real.json", tmp_path / "link.json"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_atomically(link, [b"new"])
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_a_new_file_has_the_permissions_of_any_new_file_and_an_old_one_keeps_its_own(tmp_path: Path) -> None:
    plain, new, old = tmp_path / "plain", tmp_path / "new", tmp_path / "old"
    plain.write_bytes(b"")
    old.write_bytes(b"")
    old.chmod(0o640)
    for path in (new, old):
        write_atomically(path, [b"x"])
    assert new.stat().st_mode == plain.stat().st_mode
    assert old.stat().st_mode & 0o777 == 0o640


def test_a_link_planted_under_a_scratch_name_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    for name in (f"{SCRATCH_PREFIX}out", f".out.{os.getpid()}.tmp", f".out.{os.getpid()}.part"):
        (tmp_path / name).symlink_to(victim)
    write_atomically(tmp_path / "out", [b"new"])
    assert victim.read_bytes() == b"mine"


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone" / "file")
    with pytest.raises(FileNotFoundError, match=r"the link points to .*gone/file.*link") as raised:
        write_atomically(link, [b"x"])
    assert raised.value.filename == str(link)
    full = tmp_path / "full"

    def breaks() -> object:
        yield b"half"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left") as raised_full:
        write_atomically(full, breaks())
    assert raised_full.value.filename == str(full)


def test_a_writer_that_wants_a_path_gets_one_with_the_ending_it_needs(tmp_path: Path) -> None:
    write_by(tmp_path / "trace.json.gz", lambda name: Path(name).write_text(Path(name).suffix), suffix=".json.gz")
    assert (tmp_path / "trace.json.gz").read_text() == ".gz"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.skipif(os.name == "nt", reason="permissions of a group")
@pytest.mark.parametrize("told", [True, False])
def test_a_new_file_has_the_mode_of_any_other_and_the_umask_is_never_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """Also where the system does not tell the umask (``told``): threads of a recorded job make files meanwhile."""

    def silent(path: Path) -> bytes:
        raise FileNotFoundError(path)

    def is_set(mask: int) -> int:
        raise AssertionError(f"umask({mask})")

    before = os.umask(0o037)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "umask", is_set)
            if not told:
                patch.setattr(Path, "read_bytes", silent)
            write_atomically(tmp_path / "new", [b"x"])
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
