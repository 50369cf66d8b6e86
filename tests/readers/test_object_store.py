"""Traces in an object store: S3, as moto serves it on this machine."""

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.builder import Trace
from tracekit.cli.main import cli

boto3 = pytest.importorskip("boto3")
pytest.importorskip("s3fs")
server = pytest.importorskip("moto.server")

pytestmark = pytest.mark.filterwarnings("ignore")  # of botocore and its kin, on their own doings


@pytest.fixture(scope="module")
def address():
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def store(address, monkeypatch):
    """A client of the server, which the environment names as it would name a real one."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    for name, value in {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=address)
    client.create_bucket(Bucket="runs")
    yield client
    for entry in client.list_objects_v2(Bucket="runs").get("Contents", []):
        client.delete_object(Bucket="runs", Key=entry["Key"])
    client.delete_bucket(Bucket="runs")


def rank(number, kernels=1):
    trace = Trace(number, 2)
    trace.step(1, 0, 100 * kernels)
    for index in range(kernels):
        trace.kernel("gemm", 100 * index, 50, launch=100 * index, op="aten::mm")
    trace.collective("allreduce", 10, 20, seq=1)
    return json.dumps(trace.document()).encode()


def analyzed(*paths):
    return CliRunner().invoke(cli, ["analyze", *map(str, paths), "--no-report", "--no-cache", "-q", "--json", "-"])


@pytest.mark.parametrize("url", ["s3://runs/job", "s3://runs/job/", "s3://runs/job/rank*.gz"])
def test_a_folder_in_a_bucket_is_what_it_is_on_a_disk(store, tmp_path, url):
    for number in (0, 1):
        data = gzip.compress(rank(number, kernels=3000))  # more than one request each
        store.put_object(Bucket="runs", Key=f"job/rank{number}.json.gz", Body=data)
        (tmp_path / f"rank{number}.json.gz").write_bytes(data)
    there, here = (json.loads(analyzed(path).stdout) for path in (url, tmp_path))
    assert [entry["file"] for entry in there["coverage"]] == [f"s3://runs/job/rank{number}.json.gz" for number in (0, 1)]
    for document in (there, here):
        document["coverage"] = [entry["status"] for entry in document["coverage"]]
    assert there == here


def test_what_is_not_there_is_one_line(store):
    for url, words in (("s3://runs/nothing", "there is no file or folder"), ("s3://other/job", "")):
        result = analyzed(url)
        assert result.exit_code == 2
        assert url in result.output
        assert words in result.output
        assert len(result.output.splitlines()) == 1


def test_an_object_that_is_cut_costs_one_rank(store):
    store.put_object(Bucket="runs", Key="job/rank0.json", Body=rank(0))
    store.put_object(Bucket="runs", Key="job/rank1.json", Body=rank(1)[:-40])
    document = json.loads(analyzed("s3://runs/job").stdout)
    assert [entry["status"] for entry in document["coverage"]] == ["complete", "truncated"]


def test_an_archive_in_a_bucket(store, tmp_path):
    import tarfile

    for number in (0, 1):
        (tmp_path / f"rank{number}.json").write_bytes(rank(number))
    with tarfile.open(tmp_path / "job.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "rank0.json", "rank0.json")
        archive.add(tmp_path / "rank1.json", "rank1.json")
    store.put_object(Bucket="runs", Key="job.tar.gz", Body=Path(tmp_path / "job.tar.gz").read_bytes())
    document = json.loads(analyzed("s3://runs/job.tar.gz").stdout)
    assert [entry["file"] for entry in document["coverage"]] == [f"s3://runs/job.tar.gz/rank{number}.json" for number in (0, 1)]
