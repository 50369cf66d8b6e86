"""What the recorder writes beside a trace: mesh, process groups, model, optimizer, batch, and who owns which storage.

One manifest a rank, ``rank_00003.manifest.json`` beside ``rank_00003.pt.trace.json.gz``. Everything in it is optional for a reader: an
analysis that lacks a key says what it could not do. Times are Unix ns on the rank's own clock, the same as in the trace.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from tracekit.errors import InputError

SCHEMA_VERSION = 1
SUFFIX = ".manifest.json"
#: A manifest of a large model is a few MB; what is larger than this was not written by the recorder.
MOST_BYTES = 512 * 2**20
#: Every whole number of a manifest has a place in a column.
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Axis(msgspec.Struct, frozen=True):
    """One axis of the device mesh, slowest varying first in ``Manifest.mesh``."""

    name: str
    size: Int64


class Group(msgspec.Struct, frozen=True):
    """A process group this rank is in. ``ranks`` are all its global ranks in group order; ``axis`` '' where it is no axis of the mesh.

    ``axis`` may name several axes joined by ``_`` where the group spans them (``dp_shard_cp``).
    """

    name: str
    ranks: list[Int64]
    description: str = ""
    axis: str = ""
    backend: str = ""


class Parameter(msgspec.Struct, frozen=True):
    """One parameter as this rank holds it.

    ``shape`` is the full, unsharded shape; ``local_shape`` what is on this rank; ``address``/``bytes`` its storage (``bytes`` with
    padding); ``placements`` one word for each of ``axes``, the mesh axes of its DTensor (``Shard(0)``, ``Replicate()``), [] for a plain
    tensor. ``role`` is one of embedding, head, attention, mlp, norm, router, expert, other.
    """

    name: str
    shape: list[Int64]
    dtype: str
    unit: str = ""
    local_shape: list[Int64] = []
    address: Int64 = 0
    bytes: Int64 = 0
    trainable: bool = True
    placements: list[str] = []
    axes: list[str] = []
    role: str = "other"


class Unit(msgspec.Struct, frozen=True):
    """What is gathered, reduced or bucketed at once: an FSDP unit, a DDP bucket, a ZeRO bucket.

    ``elements`` of its full parameters, ``padded_elements`` as they travel, ``kind`` fsdp1, fsdp2, ddp_bucket, zero_bucket, module.
    """

    name: str
    kind: str
    parameters: list[str] = []
    elements: Int64 = 0
    padded_elements: Int64 = 0
    root: bool = False
    reshard_after_forward: bool | Int64 | None = None


class Optimizer(msgspec.Struct, frozen=True):
    """``state_elements``/``state_bytes``: of its tensors on this rank at the end of the recording; ``parameters`` it updates here."""

    kind: str
    parameters: Int64 = 0
    state_elements: Int64 = 0
    state_bytes: Int64 = 0
    options: dict[str, Any] = {}


class Precision(msgspec.Struct, frozen=True):
    """Element types by what they are for; '' not known. ``loss_scaling``: a gradient scaler was at work."""

    parameters: str = ""
    compute: str = ""
    reduce: str = ""
    gradients: str = ""
    loss_scaling: bool = False


class Batch(msgspec.Struct, frozen=True):
    """Samples: over all data-parallel ranks, of this rank, and of one forward; ``sequence`` tokens a sample. None: not known."""

    global_batch: Int64 | None = None
    local_batch: Int64 | None = None
    micro_batch: Int64 | None = None
    micro_batches: Int64 | None = None
    sequence: Int64 | None = None


#: In ``Owners.bytes``: the storage at the address was given back.
FREED = -1


class Owners(msgspec.Struct, frozen=True):
    """Who owns which storage from when on. Columns of one length; ``category``, ``name``, ``unit`` are indices into ``strings``.

    A row owns the block that is live at ``address`` at ``time_ns``; where several rows name one block, the latest one at the time asked
    for counts. ``bytes`` is the size of the storage; 0 not known; FREED where a storage that is older than the recording, and whose free
    the profiler therefore does not tell, was given back.
    """

    time_ns: list[Int64] = []
    address: list[Int64] = []
    bytes: list[Int64] = []
    category: list[Int64] = []
    name: list[Int64] = []
    unit: list[Int64] = []
    strings: list[str] = []


#: In ``DeviceUse.device``: host memory that the process has pinned for copies, by torch's allocator of it.
PINNED = "pinned host memory"


class DeviceUse(msgspec.Struct, frozen=True):
    """Memory of one whole device at the end of the window, as one rank saw it [bytes].

    ``free`` and ``total`` by the driver (``mem_get_info``), ``reserved`` by torch's allocator of this process. ``process`` is what all of
    this process holds there and ``others`` what all other processes do, ranks of the job among them; None where NVML does not tell them.
    Of PINNED only ``reserved`` is known, the most so far.
    """

    device: str = ""
    total: Int64 = 0
    free: Int64 = 0
    reserved: Int64 = 0
    process: Int64 | None = None
    others: Int64 | None = None


class Calls(msgspec.Struct, frozen=True):
    """Collectives that the backend's flight recorder saw, for backends that leave no group in a trace. Columns of one length.

    ``time_ns`` lies inside the c10d operator that issued the collective; ``group`` indexes ``Manifest.groups``; ``seq`` is its number
    within the group (of point-to-point operations: within its pair); ``name`` and ``elements_in``/``elements_out`` as recorded, -1 unknown;
    ``peer`` the other global rank of a point-to-point operation, -1; ``dtype`` the element type, an index into ``strings`` as ``name`` is
    (the column is empty in older manifests). ``lost`` counts those that were overwritten before they were read.
    """

    time_ns: list[Int64] = []
    group: list[Int64] = []
    seq: list[Int64] = []
    name: list[Int64] = []
    peer: list[Int64] = []
    elements_in: list[Int64] = []
    elements_out: list[Int64] = []
    strings: list[str] = []
    source: str = ""
    lost: Int64 = 0
    dtype: list[Int64] = []


class Expected(msgspec.Struct, frozen=True):
    """One class of collectives that a workload states for a rank and step.

    ``full_bytes`` is the sum over its ``count`` calls; -1 where it depends on the data (uneven exchanges between experts).
    """

    kind: str
    axis: str
    purpose: str
    count: Int64
    full_bytes: Int64


class ExpertLoad(msgspec.Struct, frozen=True):
    """What one mixture-of-experts layer did in one step on this rank, its micro-batches together.

    ``owned``: the experts that this rank holds, by number; ``routed``: rows (choices of tokens) of this rank for every expert of the layer,
    after dropping; ``received``: rows from all ranks for every owned expert, [] where the exchange is padded and does not tell;
    ``dropped``: choices of this rank beyond the capacity; ``capacity``: most rows of one rank's micro-batch for one expert, None no limit.
    """

    layer: str
    step: Int64
    owned: list[Int64]
    top_k: Int64
    padding: bool = False
    routed: list[Int64] = []
    received: list[Int64] = []
    dropped: Int64 = 0
    capacity: Int64 | None = None


class Manifest(msgspec.Struct, frozen=True):
    """Everything the recorder knows of one rank.

    ``strategy`` is what the workload or the user calls the job, ``options`` are its settings: labels, from which nothing follows. ``plan``:
    what the program says of its strategy and implementation, in the keys of a plan file of ``tracekit estimate``; {} where it says nothing.
    ``roles``: axis of ``mesh`` -> what the model uses it for: pp, dp_replicate, dp_shard, ep, cp or tp; an axis of which that is not known
    is not in it.
    """

    schema_version: Int64 = SCHEMA_VERSION
    tracekit_version: str = ""
    rank: Int64 = 0
    world_size: Int64 = 1
    backend: str = ""
    device: str = ""
    host: str = ""
    strategy: str = ""
    options: dict[str, Any] = {}
    command: str = ""
    recorded: str = ""
    versions: dict[str, str] = {}
    mesh: list[Axis] = []
    coordinate: dict[str, Int64] = {}
    groups: list[Group] = []
    model: dict[str, Any] = {}
    units: list[Unit] = []
    parameters: list[Parameter] = []
    optimizer: Optimizer | None = None
    precision: Precision | None = None
    batch: Batch | None = None
    steps: list[Int64] = []
    pipeline: dict[str, Any] = {}
    expected: list[Expected] = []
    experts: list[ExpertLoad] = []
    owners: Owners = Owners()
    calls: Calls = Calls()
    notes: list[str] = []
    plan: dict[str, Any] = {}
    roles: dict[str, str] = {}
    devices: list[DeviceUse] = []


def encode(manifest: Manifest) -> bytes:
    """JSON, one line."""
    return msgspec.json.encode(manifest)


def decode(data: bytes, name: str) -> Manifest:
    """The manifest in ``data``; InputError, with ``name`` of the file, where it is none or its columns do not fit together."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError) as error:
        raise InputError(f"{name}: is no manifest of the recorder ({error})", "it is left out; the traces are read without it") from error
    if manifest.schema_version > SCHEMA_VERSION:
        raise InputError(
            f"{name}: was written by a newer tracekit (schema {manifest.schema_version}, this one reads {SCHEMA_VERSION})",
            "update tracekit; the traces are read without it",
        )
    problem = _problem(manifest)
    if problem:
        raise InputError(f"{name}: {problem}", "it is left out; the traces are read without it")
    return manifest


def _problem(manifest: Manifest) -> str:
    """Why the manifest contradicts itself; '' where it does not."""
    if not 0 <= manifest.rank < manifest.world_size:
        return f"rank {manifest.rank} is none of {manifest.world_size} ranks"
    owners, calls = manifest.owners, manifest.calls
    columns = (owners.time_ns, owners.address, owners.bytes, owners.category, owners.name, owners.unit)
    if len({len(column) for column in columns}) > 1:
        return "the columns of its owners differ in length"
    if any(column and not 0 <= min(column) <= max(column) < len(owners.strings) for column in columns[3:]):
        return "its owners point outside their strings"
    types = calls.dtype or calls.name
    listed = (calls.time_ns, calls.group, calls.seq, calls.name, calls.peer, calls.elements_in, calls.elements_out, types)
    if len({len(column) for column in listed}) > 1:
        return "the columns of its collectives differ in length"
    if calls.group and not (min(calls.group) >= -1 and max(calls.group) < len(manifest.groups)):
        return "its collectives point to groups that it does not list"
    if any(column and not 0 <= min(column) <= max(column) < len(calls.strings) for column in (calls.name, calls.dtype)):
        return "its collectives point outside their strings"
    return ""
