"""Every cause on every mesh of up to three axes: is the culprit the first finding, and its gain what the step would win?

    python -m tests.sweep                     # 262 made-up jobs, five CPU minutes
    python -m tests.sweep --only pp --plain   # meshes with that axis; traces as another framework writes them, without ranges

One line a job that fails, and the sum at the end. Slow, so no test: run it after a change of graph/ or of findings.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from tests.jobs import AXES, Cause, MadeJob, Shape
from tracekit import analyses
from tracekit.job.load import LoadOptions, load_job
from tracekit.report.document import document

BLAMES = (
    "stragglers.rank",
    "stragglers.moving",
    "pipeline.slow_stage",
    "links.slow",
    "collectives.slow",
    "breakdown.compute",
    "kernels.uneven",
)
#: A gain may miss the counterfactual by this share of it.
TOLERANCE = 0.1


def meshes() -> Iterator[tuple[str, Shape]]:
    """Single axes of four and of two, pairs and triples of twos, and pairs with a four."""
    for axis in AXES:
        for size in (2, 4):
            yield f"{axis}{size}", Shape(**{axis: size})
    for count in (2, 3):
        for axes in combinations(AXES, count):
            yield " ".join(f"{axis}2" for axis in axes), Shape(**dict.fromkeys(axes, 2))
    for first, second in combinations(AXES, 2):
        yield f"{first}4 {second}2", Shape(**{first: 4, second: 2})
    yield "pp2 dp4", Shape(pp=2, dp=4)


def causes(shape: Shape) -> Iterator[tuple[Cause, set[str]]]:
    """Each cause that this mesh can have, with the names of findings that say it."""
    last, peers = shape.world - 1, shape.world // shape.pp > 1
    stage_or_rank = {"stragglers.rank"} if peers else {"pipeline.slow_stage", "stragglers.rank"}
    for rank in sorted({0, last // 2, last}):
        yield Cause("throttled", rank=rank), stage_or_rank
    yield Cause("more_work", rank=last), stage_or_rank
    yield Cause("loader", rank=last // 2), {"stragglers.rank"}
    yield Cause("pause", rank=last, us=9000), {"stragglers.rank"}
    yield Cause("pause", rank=0, us=3000), {"stragglers.rank"}
    if shape.dp > 2 and shape.pp == 1:
        yield Cause("rotating"), {"stragglers.moving"}
    if shape.pp > 1:
        for stage in (0, shape.pp - 1):
            yield Cause("stage", stage=stage, factor=2.0), {"pipeline.slow_stage"}
    if shape.ep > 1:
        yield Cause("expert", rank=last, factor=3), stage_or_rank
    for axis in AXES[1:]:
        if getattr(shape, axis) > 1 and shape.world > getattr(shape, axis):
            yield Cause("link", rank=last, axis=axis, factor=6), {"links.slow_group"}


def said(job: MadeJob, plain: bool) -> list[dict[str, Any]]:
    """The findings on the job's traces."""
    with tempfile.TemporaryDirectory() as folder:
        job.write(Path(folder))
        if plain:
            disguise(Path(folder))
        read = load_job([folder], LoadOptions(), analyses.reducers())
        found: list[dict[str, Any]] = document(read, analyses.run(read))["findings"]
        return found


#: Groups as another framework describes them.
_MEGATRON = {
    "mesh_tp": "TENSOR_MODEL_PARALLEL_GROUP",
    "mesh_dp": "DATA_PARALLEL_GROUP_WITH_CP",
    "mesh_ep": "EXPERT_MODEL_PARALLEL_GROUP",
    "mesh_pp": "PIPELINE_MODEL_PARALLEL_GROUP",
}


def disguise(folder: Path) -> None:
    """The same job as another framework would show it: its groups' names, other streams and numbers, no ranges but what autograd leaves."""
    for path in folder.glob("*.json"):
        trace = json.loads(path.read_text())
        for group in trace["distributedInfo"]["pg_config"]:
            group["pg_name"], group["pg_desc"] = f"{40 + int(group['pg_name'])}", _MEGATRON.get(group["pg_desc"], group["pg_desc"])
        trace["traceEvents"] = [event for event in map(_disguised, trace["traceEvents"]) if event]
        path.write_text(json.dumps(trace))


def _disguised(event: dict[str, Any]) -> dict[str, Any] | None:
    name, args = event["name"], event.get("args", {})
    if event.get("cat") == "user_annotation" and not name.startswith("ProfilerStep"):
        backward = name.startswith("backward") or re.match(r"PP:\d+B", name)
        if not backward and not name.startswith("forward") and not re.match(r"PP:\d+F", name):
            return None
        known = {"External id": 1} if backward else {"External id": 1, "Sequence number": 7}
        return {
            **event,
            "cat": "cpu_op",
            "name": "autograd::engine::evaluate_function: MmBackward0" if backward else "aten::mm",
            "args": known,
        }
    if "stream" in args:
        args["stream"] = 3 * args["stream"] + 1
        event["tid"] = args["stream"]
    if "Process Group Name" in args:
        args["Process Group Name"] = str(40 + int(args["Process Group Name"]))
        args["Process Group Description"] = _MEGATRON[args["Process Group Description"]]
    event["name"] = re.sub(r"^gemm_(\w)_(\d)", r"sm80_xmma_gemm_bf16bf16_\1_tilesize\2", name)
    return event


def wrong(job: MadeJob, names: set[str], findings: list[dict[str, Any]]) -> str:
    """What is wrong with the findings; '' where the culprit is first and its gain is right."""
    first, cause = findings[0], job.cause
    cost = job.step_us - job.healthy_us
    if cause.name == "none":
        blamed = [f["id"] for f in findings if f["id"].startswith(BLAMES)]
        return f"healthy, but {blamed}" if blamed else ""
    small = cost < 0.01 * job.step_us
    if small:
        return ""  # nobody promises to find what costs less than a hundredth of a step
    share = f"costs {cost:.0f} us of {job.step_us:.0f}"
    if first["id"] not in names:
        return f"{share}; first is {first['id']} (gain {first['gain_us']}): {first['text'][:110]}"
    subject = first.get("subject") or {}
    stage = cause.stage if cause.name == "stage" else job.shape.place(cause.rank)["pp"]
    if first["id"] == "pipeline.slow_stage" and subject.get("stage") != stage:
        return f"{share}; blames stage {subject.get('stage')}"
    if first["id"] in ("stragglers.rank", "links.slow_group") and cause.rank not in subject.get("ranks", ()):
        return f"{share}; blames {subject}"
    if first["gain_us"] is None or abs(first["gain_us"] - cost) > TOLERANCE * cost:
        return f"{share}; gain {first['gain_us']} ({first['id']})"
    return ""


def main() -> int:
    """Run the sweep; 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="meshes or causes with this word in their name")
    parser.add_argument("--plain", action="store_true", help="traces without ranges and under other names")
    options = parser.parse_args()
    done = failed = 0
    for name, shape in meshes():
        for cause, names in [(Cause(), set[str]()), *causes(shape)]:
            if options.only and options.only not in f"{name} {cause.name}":
                continue
            job = MadeJob(shape, cause)
            fault = wrong(job, names, said(job, options.plain))
            done, failed = done + 1, failed + bool(fault)
            if fault:
                print(f"{name:12} {cause.name:10} rank {cause.rank} stage {cause.stage} {cause.axis}: {fault}", flush=True)
    print(f"{done - failed} of {done} hold")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
