"""``tracekit estimate`` end to end."""

import dataclasses
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tracekit.cli.estimate import Size
from tracekit.cli.main import cli
from tracekit.estimate.plan import Batch, Implementation, Plan, Strategy
from tracekit.estimate.recipe import Recipe
from tracekit.estimate.shape import ModelShape

SMALL = ["--model", "llama3-8b", "--mesh", "dp_shard=8", "--recompute", "full"]


class Page(HTMLParser):
    """The text of a page that a reader sees, and the addresses it loads something from."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.loads: list[str] = []
        self._hidden = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._hidden = tag in ("script", "style")
        self.loads += [value for name, value in attrs if value and (name == "src" or (tag == "link" and name == "href"))]

    def handle_endtag(self, tag):
        self._hidden = False

    def handle_data(self, data):
        if not self._hidden:
            self.text.append(data)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["estimate", *map(str, arguments)])


def document(*arguments: str | Path) -> dict:
    result = run(*arguments, "-q", "--json", "-")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_an_answer_with_its_tables():
    result = run("--model", "llama3-70b", "--mesh", "pp=4,dp_shard=8,tp=8", "--global-batch", "512", "--recompute", "full")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "It fits: at most" in result.stdout
    assert "first stage 0" in result.stdout and "middle stages 1–2" in result.stdout and "last stage 3" in result.stdout
    assert "optimizer state" in result.stdout and "parameter_gather" in result.stdout
    assert "bubble of equal stages: 4.7% of the ideal time, 4.5% of the wall time" in result.stdout


def test_json_names_every_category_and_sums_up():
    found = document(*SMALL)
    assert found["mesh"] == {"axes": [{"name": "dp_shard", "size": 8}], "world_size": 8}
    assert found["model"]["parameters"] == 8_030_261_248
    (memory,) = found["memory"]
    assert sum(memory["categories"].values()) == memory["peak_bytes"] <= memory["reserved_bytes"]
    assert memory["categories"]["optimizer_state"] == 8_030_261_248  # 8 bytes over 8 ranks
    kinds = {(row["axis"], row["kind"], row["phase"]): row["count"] for row in found["communication"]}
    assert kinds["dp_shard", "all_gather", "forward"] in (1, 32)
    assert sum(row["count"] for row in found["communication"]) == 33 + 32 + 33
    assert found["pipeline"] is None
    assert found["step"]["step_us"] > found["step"]["compute_us"] > 0


def test_json_alone_on_standard_output(tmp_path):
    result = run(*SMALL, "--json", "-")
    assert json.loads(result.stdout)["fits"] is True
    assert "It fits" in result.stderr


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plan.yaml", "model: llama3-8b\nmesh: {dp_shard: 8}\nbatch: {recompute: full}\n"),
        ("plan.toml", 'model = "llama3-8b"\n[mesh]\ndp_shard = 8\n[batch]\nrecompute = "full"\n'),
        ("plan.json", '{"model": "llama3-8b", "mesh": "dp_shard=8", "batch": {"recompute": "full"}}'),
    ],
)
def test_a_file_says_the_same_as_options(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    assert document(path) == document(*SMALL)


def test_options_win_over_the_file_and_set_reaches_every_key(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("model: llama3-8b\nmesh: {dp_shard: 8}\nstrategy: fsdp2\n")
    more = ["--set", "strategy.reshard_after_forward=false", "--set", "device=cpu"]
    found = document(path, "--mesh", "dp_shard=4", "--sequence", "1024", *more)
    assert found["mesh"]["world_size"] == 4
    assert found["model"]["sequence"] == 1024
    assert found["plan"]["strategy"]["reshard_after_forward"] is False
    assert found["memory"][0]["categories"]["allocator_rounding"] == 0


def test_the_page_opens_from_disk_and_shows_the_figures(tmp_path):
    page = tmp_path / "plan.html"
    assert run(*SMALL, "-o", page).exit_code == 0
    read = Page(page.read_text())
    shown = " ".join(read.text)
    assert "It fits" in shown and "Memory at the peak" in shown and "parameter_gather" in shown
    assert read.loads == []


def test_a_model_by_its_configuration_and_another_implementation(tmp_path):
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 500}
    path.write_text(json.dumps({"model_type": "llama", **sizes}))
    options = ["--model", str(path), "--mesh", "pp=2", "--implementation", "megatron", "--set", "implementation.frees_outputs=false"]
    found = document(*options, "--sequence", "128")
    assert (found["model"]["sequence"], found["model"]["parameters"]) == (128, 2 * 500 * 64 + 64 + 4 * (4 * 64**2 + 3 * 64 * 128 + 2 * 64))
    habits = found["plan"]["implementation"]
    assert (habits["name"], habits["receive_buffers"], habits["frees_outputs"]) == ("megatron", False, False)


def test_a_search(tmp_path):
    page, data = tmp_path / "fit.html", tmp_path / "fit.json"
    options = ["--model", "llama3-8b", "--recompute", "full", "--global-batch", "16"]
    result = run(*options, "--fit", "40GB", "--ranks", "8", "-o", page, "--json", data)
    assert result.exit_code == 0, result.stderr
    assert "Fastest first" in result.stdout and "These do not fit" in result.stdout
    found = json.loads(data.read_text())
    fit = [mesh for mesh in found["meshes"] if mesh["fits"]]
    assert fit and all(mesh["peak_bytes"] <= 40 * 10**9 and mesh["reason"] is None for mesh in fit)
    assert [(mesh["tight"], mesh["step_us"]) for mesh in fit] == sorted((mesh["tight"], mesh["step_us"]) for mesh in fit)
    assert " is best with 1 sequence at a time, full recomputation" in found["why"] and "".join(found["why"].split()) in "".join(
        result.stdout.split()
    )
    assert all(mesh["reason"] for mesh in found["meshes"][len(fit) :])
    assert "dp_shard=8" in " ".join(Page(page.read_text()).text)


@pytest.mark.parametrize(
    ("text", "size"), [("80GB", 80 * 10**9), ("80gib", 80 * 2**30), ("1.5 TB", 15 * 10**11), ("512", 512), ("79.15GiB", int(79.15 * 2**30))]
)
def test_sizes(text, size):
    assert Size().convert(text, None, None) == size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no model is given"),
        (["--model", "llama9"], "there is no model called 'llama9'"),
        (["--model", "llama3-8b", "--mesh", "tp"], "'tp' is not NAME=SIZE"),
        (["--model", "llama3-8b", "--mesh", "tp=5"], "tp=5 does not divide 32 heads"),
        (["--model", "llama3-8b", "--fit", "80GB"], "--fit SIZE and --ranks N belong together"),
        (["--model", "llama3-8b", "--fit", "many", "--ranks", "8"], "'many' is no size"),
        (["--model", "llama3-8b", "--fit", "0GB", "--ranks", "8"], "'0GB' is no size"),
        (["--model", "llama3-8b", "--set", "device"], "is not KEY=VALUE"),
        (["--model", "llama3-8b", "--set", "mesh.tp.x=1"], "mesh: tp is dict; give a whole number"),
        (["--model", "llama3-8b", "--set", "batch=[1]"], "batch is list"),
        (["--model", "llama3-8b", "--set", "strategy.bucket_cap_mb=-1"], "buckets of -1.0 MiB"),
        (["--model", "llama3-8b", "--set", "strategy.bucket_cap_mb=NaN"], "bucket_cap_mb is nan"),
        (["--model", "llama3-8b", "--module", "nowhere:model", "-o", "x.html"], "--module has no HTML page"),
        (["missing.yaml"], "does not exist"),
    ],
)
def test_mistakes_end_in_one_line_and_2(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("plan.yaml", b"model: [llama3-8b", "while parsing"),
        ("plan.yaml", b"- 1\n- 2\n", "holds no keys with values"),
        ("plan.yaml", b"", "holds no keys with values"),
        ("plan.yaml", b"model: !!python/object/apply:os.system [true]\n", "could not determine a constructor"),
        ("plan.yaml", b"a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\nmodel: *c\n", "the plan has no 'a'"),
        ("plan.yaml", b"model: llama3-8b\nmesh: {dp_shard: 99999999999999999999}\n", "dp_shard is larger than"),
        ("plan.yaml", b"\xff\xfe\x00", "no UTF-8 text"),
        ("plan.json", b'{"model": ', "Expecting value"),
        ("plan.json", b'{"model": ' + b"[" * 100_000, "nested too deeply"),
        ("plan.json", b'{"model": "llama3-8b", "efficiency": 1e999}', "efficiency is inf"),
        ("plan.toml", b"model = ", "Invalid value"),
        ("plan.txt", b"model: llama3-8b\n", "neither .yaml, .toml nor .json"),
        ("plan.yaml", b"#" * (2**20 + 1), "larger than 1048576 bytes"),
    ],
)
def test_files_of_strangers(name, data, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(data)
    result = run(path)
    assert result.exit_code == 2, result.stdout
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr


def test_names_are_shown_as_they_are_written(tmp_path):
    path, page = tmp_path / "plan.json", tmp_path / "plan.html"
    name = "</script><script>alert(1)</script>\x1b[31m"
    path.write_text(json.dumps({"model": {"preset": "llama3-8b", "name": name}, "mesh": "dp_shard=8"}))
    result = run(path, "-o", page)
    assert result.exit_code == 0
    assert "\x1b[31m" not in result.stdout
    assert "<script>alert(1)" not in page.read_text()


def test_help_has_examples():
    result = run("--help")
    assert result.exit_code == 0
    assert "tracekit estimate --model llama3-8b" in result.stdout


def test_the_program_as_a_user_starts_it(tmp_path):
    command = [sys.executable, "-m", "tracekit", "estimate", *SMALL, "--json", "-", "-q"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path)
    assert done.stderr == ""
    assert json.loads(done.stdout)["tracekit_version"]


def test_every_key_of_the_json_is_documented():
    text = (Path(__file__).resolve().parents[2] / "docs" / "estimate.md").read_text()
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    documented = set(re.findall(r"[a-z_0-9]+", " ".join(re.findall(r"`([^`]+)`", text))))
    found = document("--model", "llama3-8b", "--mesh", "pp=2,dp_shard=4", "--global-batch", "8")
    fit = document(*SMALL[:2], "--fit", "80GB", "--ranks", "2", "--recompute", "full")
    keys = set(found) | {key for row in (*found["memory"], *found["communication"]) for key in row}
    keys |= set(found["step"]) | set(found["flops"]) | set(found["pipeline"]) | set(found["hardware"]) | set(fit) | set(fit["meshes"][0])
    assert keys - documented == set()
    fields = {field.name for kind in (Plan, Batch, Strategy, Implementation, ModelShape, Recipe) for field in dataclasses.fields(kind)}
    assert fields - documented - {"name"} == set()
