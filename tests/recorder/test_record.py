"""The recorder around a training loop of one process: what it leaves, and that it never fails the loop."""

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.workloads.recording import run  # noqa: E402
from tracekit import record  # noqa: E402
from tracekit.errors import UsageError  # noqa: E402
from tracekit.job.load import LoadOptions, load_job  # noqa: E402
from tracekit.manifest import decode  # noqa: E402
from tracekit.readers.kineto import read_trace  # noqa: E402
from tracekit.readers.sources import find_sources  # noqa: E402
from tracekit.recorder import private  # noqa: E402
from tracekit.recorder.meta import parameters_of_module  # noqa: E402
from tracekit.recorder.units import plain_name, role_of, units  # noqa: E402
from tracekit.trace.events import Category  # noqa: E402
from tracekit.vocabulary import CATEGORIES  # noqa: E402

NOISE = "ignore:.*(Profiler clears events|profiler).*:UserWarning"
pytestmark = pytest.mark.filterwarnings(NOISE)


def model():
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)])

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = blocks
            self.head = torch.nn.Linear(8, 2)

        def forward(self, x):
            for block in self.blocks:
                x = torch.relu(block(x))
            return self.head(x)

    return Model()


def train(folder, steps=5, **options):
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    with record(folder, model=net, optimizer=optimizer, **options) as recorder:
        for _ in range(steps):
            net(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
    return net, recorder


def read(folder):
    return decode((folder / "rank_00000.manifest.json").read_bytes(), "m")


def names(folder, *categories):
    tables = read_trace(find_sources([str(folder)]).sources[0])
    rows = tables.rows(*categories)
    return [tables.text(int(code)) for code in tables.name[rows]]


def test_a_loop_leaves_one_trace_and_one_manifest(tmp_path):
    train(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank_00000.manifest.json", "rank_00000.pt.trace.json.gz"]
    manifest = read(tmp_path)
    assert manifest.steps == [2, 3, 4]
    assert [u.name for u in manifest.units] == ["blocks.0", "blocks.1", ""]
    assert [u.elements for u in manifest.units] == [72, 72, 18]
    assert [p.name for p in manifest.parameters][:2] == ["blocks.0.weight", "blocks.0.bias"]
    assert manifest.optimizer.kind == "Adam"
    assert manifest.optimizer.state_bytes == 2 * 162 * 4 + 6 * 4  # two moments, a step counter for each parameter
    job = load_job([str(tmp_path)], LoadOptions())
    assert job.steps == [2, 3, 4]


def test_phases_and_units_stand_in_the_trace(tmp_path):
    train(tmp_path, active=1)
    seen = names(tmp_path, Category.USER_ANNOTATION)
    assert seen.count("forward") == 1
    assert seen.count("unit blocks.0") == seen.count("unit blocks.0 backward") == 1
    order = [name for name in seen if name.startswith("unit")]
    assert set(order) == {"unit blocks.0", "unit blocks.1", "unit blocks.0 backward", "unit blocks.1 backward"}


def test_every_registered_storage_is_one_that_the_profiler_saw(tmp_path):
    net, _ = train(tmp_path, saved_tensors=True)
    owners = read(tmp_path).owners
    kinds = {owners.strings[code] for code in owners.category}
    assert {"parameters", "gradients", "optimizer_state", "activations", "inputs"} <= kinds <= set(CATEGORIES)
    at_start = {owners.strings[n] for n, c in zip(owners.name, owners.category, strict=True) if owners.strings[c] == "parameters"}
    assert at_start == {name for name, _ in net.named_parameters()}
    tables = read_trace(find_sources([str(tmp_path)]).sources[0])
    addresses = set(tables.side["memory"].columns["Addr"].tolist())
    gradients = [a for a, c in zip(owners.address, owners.category, strict=True) if owners.strings[c] == "gradients"]
    assert gradients
    assert set(gradients) <= addresses


def test_hooks_are_gone_after_the_window(tmp_path):
    net, _ = train(tmp_path, steps=8)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())


def test_what_is_in_place_for_the_window_is_gone_behind_it(tmp_path):
    """A long run goes on unhindered: no labels, no hooks on saved tensors, no dispatch mode once the steps are recorded."""
    owner = private.process_group_type()
    original = owner.send
    net = model()
    with record(tmp_path, model=net, active=1, saved_tensors=True) as recorder:
        for number in range(6):
            assert (owner.send is not original) == (number in (1, 2))
            net(torch.randn(4, 8)).sum().backward()
            recorder.step()
        registered = len(read(tmp_path).owners.time_ns)
        net(torch.randn(4, 8)).sum().backward()
        assert len(recorder._window.owners.columns().time_ns) == registered
    with record(tmp_path / "dispatch", model=net, active=1, labels="dispatch") as recorder:
        for number in range(6):
            assert (torch.utils._python_dispatch._get_current_dispatch_mode() is not None) == (number in (1, 2))
            recorder.step()


def test_a_loop_that_ends_in_the_middle_of_the_window_keeps_what_there_was(tmp_path):
    train(tmp_path, steps=4)
    assert read(tmp_path).steps == [2, 3]


def test_a_loop_that_ends_before_the_window_is_told(tmp_path):
    with pytest.warns(UserWarning, match="recorded nothing: 1 steps were run"):
        train(tmp_path, steps=1)
    assert not list(tmp_path.iterdir())


def test_an_exception_of_the_loop_passes_through_and_the_window_is_kept(tmp_path):
    net = model()
    with pytest.raises(ZeroDivisionError), record(tmp_path, model=net) as recorder:
        for number in range(5):
            net(torch.randn(4, 8)).sum().backward()
            recorder.step()
            if number == 3:
                raise ZeroDivisionError
    assert read(tmp_path).steps == [2, 3]


def test_a_failure_of_the_recorder_is_a_warning_and_the_loop_goes_on(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("torch has changed")

    monkeypatch.setattr("tracekit.recorder.hooks.Hooks.standing", broken)
    running = []
    step = torch.optim.Adam.step
    monkeypatch.setattr(torch.optim.Adam, "step", lambda self: running.append(torch.autograd._profiler_enabled()) or step(self))
    with pytest.warns(UserWarning, match="tracekit stopped recording: RuntimeError: torch has changed"):
        net, recorder = train(tmp_path)
    assert recorder.failed
    assert running == [False] * 5  # the profiler does not go on collecting events
    assert all(p.grad is None for p in net.parameters())  # every step was run


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="tracekit stopped recording"):
        train(tmp_path / "file" / "below")


def test_a_category_that_there_is_not_is_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="'weights' is no category"), record(tmp_path) as recorder:
        recorder.own(torch.zeros(2), "weights")
        for _ in range(5):
            recorder.step()


def test_what_the_loop_says_of_itself_is_in_the_manifest(tmp_path):
    train(tmp_path, strategy="mine", model_shape={"layers": 2}, mesh={"dp": 1})
    manifest = read(tmp_path)
    assert manifest.strategy == "mine"
    assert manifest.model == {"parameters": 162, "layers": 2}
    assert [(axis.name, axis.size) for axis in manifest.mesh] == [("dp", 1)]


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("module.layers.0.q.weight", "layers.0.q.weight"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.q.weight", "layers.0.q.weight"),
        ("layers.0._checkpoint_wrapped_module.q.weight", "layers.0.q.weight"),
        ("_orig_mod.head.weight", "head.weight"),
    ],
)
def test_names_are_those_of_the_plain_model(name, plain):
    assert plain_name(name) == plain


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("embedding.tokens.weight", "embedding"),
        ("layers.0.attention.q.weight", "attention"),
        ("layers.0.attention_norm.weight", "norm"),
        ("layers.0.mlp.up.weight", "mlp"),
        ("layers.0.mlp.experts.3.up.weight", "expert"),
        ("layers.0.mlp.router.weight", "router"),
        ("head.weight", "head"),
        ("conv.weight", "other"),
    ],
)
def test_the_role_of_a_parameter_is_told_by_its_name(name, role):
    assert role_of(name) == role


def test_no_interface_of_torch_is_missing():
    """A torch that lacks one leaves a note in the manifest; this one, which CI installs, has all."""
    private.missing.clear()
    private.fsdp2_types()
    private.fsdp1_handle_type()
    private.fsdp1_runtime()
    private.pipeline_stage_type()
    private.process_group_type()
    private.flight_recorder()
    assert private.missing == set()


def test_an_interface_that_is_missing_is_noted_and_nothing_else_happens():
    private.missing.clear()
    undo = private.replaced(torch.nn.Module, "no_such_method", lambda original: original)
    undo()
    assert private.missing == {"Module.no_such_method"}
    private.missing.clear()


def test_a_plain_model_is_cut_into_its_blocks():
    found = [(u.name, u.kind, u.root) for u in units([model()])]
    assert found == [("blocks.0", "module", False), ("blocks.1", "module", False), ("", "module", True)]


def test_importing_tracekit_does_not_import_torch():
    text = "import sys, tracekit, tracekit.job.load; assert 'torch' not in sys.modules; tracekit.record; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", text], check=True)


def test_a_rank_that_dies_leaves_the_files_of_the_others(tmp_path):
    done = run("record", "ddp", "-o", str(tmp_path), "--die", "1:3", "--nproc", "3", expect=1)
    assert "rank 1 of 3 failed: ended by SIGKILL" in done.stderr.splitlines()[-1]
    job = load_job([str(tmp_path)], LoadOptions())
    assert job.ranks == [0, 2]
    assert job.missing_ranks == [1]
    assert 2 in job.steps


def test_workloads_are_listed_with_what_they_do():
    done = run("record", "--help")
    assert "fsdp2" in done.stdout
    assert "parameter by parameter" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nosuch"], "there is no workload 'nosuch'"),
        (["ddp", "--bogus", "1"], "ddp has no option --bogus"),
        (["ddp", "--nproc", "x"], "invalid int value"),
        (["fsdp2", "--mesh", "tp=2"], "the mesh has no axis dp_shard"),
        (["fsdp2", "--mesh", "dp_shard=0"], "is not NAME=SIZE"),
        (["hsdp", "--nproc", "3"], "3 ranks do not make up the usual mesh dp_replicate=2,dp_shard=2"),
        (["fsdp2", "--backend", "fake", "--rank", "9"], "rank 9 is none of 2 ranks"),
        (["ddp", "--batch", "3", "--micro-batches", "2"], "6 samples do not divide"),
        (["fsdp2", "--precision", "fp8"], "--precision fp8 needs a GPU of compute capability 8.9"),
        (["fsdp2", "--backend", "nccl"], "no GPU that torch can use"),
    ],
)
def test_careless_arguments_are_refused_in_one_line(arguments, told, tmp_path):
    done = run("record", *arguments, "-o", str(tmp_path / "out"), expect=2)
    assert told in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_the_parameters_of_a_module_on_the_meta_device(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [
        "from torch.nn import Linear, ModuleDict, ModuleList",
        "def build():",
        "    return ModuleDict({'stem': Linear(4, 8), 'blocks': ModuleList([Linear(8, 8)])})",
    ]
    text = "\n".join(lines)
    (tmp_path / "my_model.py").write_text(text)
    found = parameters_of_module("my_model:build")
    assert [(p.name, p.shape, p.unit) for p in found] == [
        ("stem.weight", (8, 4), "stem"),
        ("stem.bias", (8,), "stem"),
        ("blocks.0.weight", (8, 8), "blocks.0"),
        ("blocks.0.bias", (8,), "blocks.0"),
    ]
    assert not any(path == str(tmp_path) for path in sys.path)


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("my_model", "is not package.module:function"),
        ("no_such_module:build", "No module named 'no_such_module'"),
        ("json:nothing", "no attribute 'nothing'"),
        ("json:dumps", "raised TypeError"),
        ("os:getcwd", "gives a str"),
    ],
)
def test_a_module_that_cannot_be_built_is_refused(target, told):
    with pytest.raises(UsageError, match=told):
        parameters_of_module(target)


def test_the_analyzer_imports_neither_torch_nor_the_workloads(tmp_path):
    """Reading a recording of a workload needs nothing of what made it."""
    sample = Path(__file__).resolve().parents[2] / "sample_traces" / "ddp_2"
    lines = [
        "import sys, tracekit.cli.main, tracekit.cli.analyze, tracekit.cli.run",
        "sys.argv = ['tracekit', 'analyze', sys.argv[1], '-o', sys.argv[2], '--no-cache', '-q']",
        "try: tracekit.cli.main.cli.main(standalone_mode=False)",
        "finally: print(sorted(name for name in sys.modules if name == 'torch' or name.startswith('tracekit.workloads')))",
    ]
    command = [sys.executable, "-c", "\n".join(lines), str(sample), str(tmp_path / "report.html")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert (tmp_path / "report.html").exists()
