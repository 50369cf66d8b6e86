import pytest

from tracekit.report.coverage import common_folder


@pytest.mark.parametrize(
    ("files", "folder"),
    [
        (["rank0.json", "rank1.json"], ""),
        (["rank0.json"], ""),
        (["/job/a/rank0.json", "/job/a/rank1.json"], "/job/a/"),
        (["/job/a/rank0.json", "/job/b/rank1.json"], "/job/"),
        (["a/rank0.json", "rank1.json"], ""),
        (["/a/x.json", "/b/y.json"], "/"),
        ([], ""),
    ],
)
def test_the_folder_that_all_files_share(files, folder):
    assert common_folder(files) == folder
