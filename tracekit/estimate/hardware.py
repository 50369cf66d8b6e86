"""Devices and links, from their vendors' data sheets. Rates are peaks; what a job reaches is less (``efficiency``).

A100      NVIDIA A100 datasheet (2021): 312 TFLOP/s bf16, 2,039 GB/s, NVLink 600 GB/s both ways
H100      NVIDIA H100 datasheet (SXM): 989 TFLOP/s bf16, 1,979 fp8 (without sparsity), 3.35 TB/s, NVLink 900 GB/s both ways
H200      NVIDIA H200 datasheet: as H100 with 141 GB at 4.8 TB/s
B200      NVIDIA DGX B200 datasheet: 2,250 TFLOP/s bf16, 4,500 fp8 (dense), 180 GB at 8 TB/s, NVLink 1.8 TB/s both ways
GB200     NVIDIA GB200 NVL72 datasheet, one of its 72 GPUs: 2,500 / 5,000 TFLOP/s, 186 GB at 8 TB/s, all 72 on NVLink
V100      NVIDIA V100 datasheet (SXM2, 32 GB): 125 TFLOP/s fp16, 900 GB/s, NVLink 300 GB/s both ways
H800      as H100 with NVLink of 400 GB/s both ways
GB300     NVIDIA GB300 NVL72 datasheet, one of its 72 GPUs: 2,500 / 5,000 TFLOP/s, 288 GB at 8 TB/s
RTX 4090  NVIDIA Ada architecture whitepaper: 165 TFLOP/s bf16, 330 fp8 (fp32 sums, without sparsity), 24 GB at 1,008 GB/s, PCIe 4
MI250X    AMD Instinct MI250X datasheet, one of its two dies, which torch takes for a device: 191.5 TFLOP/s bf16, 64 GB at 1.6 TB/s
MI355X    AMD Instinct MI355X datasheet: 2,500 TFLOP/s bf16, 5,000 fp8, 288 GB at 8 TB/s, 7 Infinity Fabric links of 76.8 GB/s each way
MI300X    AMD Instinct MI300X datasheet: 1,307 TFLOP/s bf16, 2,610 fp8, 192 GB at 5.3 TB/s, 7 Infinity Fabric links of 64 GB/s each way
InfiniBand    HDR 200, NDR 400, XDR 800 Gbit/s a port and direction; one port a GPU
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from tracekit.errors import UsageError, choose

US = 1e-6


@dataclass(frozen=True)
class Link:
    """A link of one rank: ``gb_s`` 10^9 bytes a second in one direction; ``latency_us`` of one step of a collective."""

    name: str
    gb_s: float
    latency_us: float

    @property
    def seconds_per_byte(self) -> float:
        """Beta of the alpha-beta model [s/byte]."""
        return 1e-9 / self.gb_s

    @property
    def latency_s(self) -> float:
        """Alpha of the alpha-beta model [s]."""
        return self.latency_us * US


@dataclass(frozen=True)
class Hardware:
    """One device and its surroundings.

    ``memory_bytes`` as sold (10^9 bytes a GB); ``tflops`` of dense matrix products by bytes of an element (2: bf16, 1: fp8, 4: fp32 as
    tf32); ``memory_gb_s`` of its own memory; ``inside`` the link within a node (or NVLink domain) of ``per_node`` devices, ``outside``
    that of each device to other nodes.
    """

    name: str
    memory_bytes: int
    tflops: dict[int, float]
    memory_gb_s: float
    inside: Link
    outside: Link
    per_node: int = 8

    def peak_flops(self, element_bytes: int) -> float:
        """FLOP/s at this element size; that of bf16 where the device has no faster one for it."""
        return 1e12 * self.tflops.get(element_bytes, self.tflops[2])


#: Latency of one step, as NCCL's tuner counts it for its LL128 protocol: see ``nccl``.
NVLINK_LATENCY_US, NETWORK_LATENCY_US = 1.9, 4.0
NETWORKS = {
    "infiniband-hdr": Link("InfiniBand HDR", 25.0, NETWORK_LATENCY_US),
    "infiniband-ndr": Link("InfiniBand NDR", 50.0, NETWORK_LATENCY_US),
    "infiniband-xdr": Link("InfiniBand XDR", 100.0, NETWORK_LATENCY_US),
    "ethernet-100g": Link("Ethernet 100G", 12.5, 2 * NETWORK_LATENCY_US),
    "ethernet-400g": Link("RoCE 400G", 50.0, NETWORK_LATENCY_US),
}


def _nvlink(generation: int, gb_s: float) -> Link:
    return Link(f"NVLink {generation}", gb_s, NVLINK_LATENCY_US)


HARDWARE = {
    "a100": Hardware("A100 80GB", 80 * 10**9, {4: 156.0, 2: 312.0}, 2039.0, _nvlink(3, 300.0), NETWORKS["infiniband-hdr"]),
    "h100": Hardware("H100 SXM", 80 * 10**9, {4: 494.0, 2: 989.0, 1: 1979.0}, 3350.0, _nvlink(4, 450.0), NETWORKS["infiniband-ndr"]),
    "h200": Hardware("H200", 141 * 10**9, {4: 494.0, 2: 989.0, 1: 1979.0}, 4800.0, _nvlink(4, 450.0), NETWORKS["infiniband-ndr"]),
    "b200": Hardware("B200", 180 * 10**9, {4: 1125.0, 2: 2250.0, 1: 4500.0}, 8000.0, _nvlink(5, 900.0), NETWORKS["infiniband-ndr"]),
    "gb200": Hardware("GB200", 186 * 10**9, {4: 1250.0, 2: 2500.0, 1: 5000.0}, 8000.0, _nvlink(5, 900.0), NETWORKS["infiniband-ndr"], 72),
    "v100": Hardware("V100 32GB", 32 * 10**9, {4: 15.7, 2: 125.0}, 900.0, _nvlink(2, 150.0), NETWORKS["ethernet-100g"]),
    "h800": Hardware("H800 SXM", 80 * 10**9, {4: 494.0, 2: 989.0, 1: 1979.0}, 3350.0, _nvlink(4, 200.0), NETWORKS["infiniband-ndr"]),
    "gb300": Hardware("GB300", 288 * 10**9, {4: 1250.0, 2: 2500.0, 1: 5000.0}, 8000.0, _nvlink(5, 900.0), NETWORKS["infiniband-ndr"], 72),
    "rtx4090": Hardware(
        "RTX 4090", 24 * 10**9, {4: 82.6, 2: 165.2, 1: 330.3}, 1008.0, Link("PCIe 4", 32.0, NETWORK_LATENCY_US), NETWORKS["ethernet-100g"]
    ),
    "mi250x": Hardware(
        "MI250X die", 64 * 10**9, {4: 47.9, 2: 191.5}, 1638.0, Link("Infinity Fabric", 150.0, NVLINK_LATENCY_US),
        NETWORKS["infiniband-hdr"],
    ),
    "mi355x": Hardware(
        "MI355X", 288 * 10**9, {4: 1250.0, 2: 2500.0, 1: 5000.0}, 8000.0, Link("Infinity Fabric", 537.6, NVLINK_LATENCY_US),
        NETWORKS["infiniband-ndr"],
    ),
    "mi300x": Hardware(
        "MI300X", 192 * 10**9, {4: 654.0, 2: 1307.0, 1: 2610.0}, 5300.0, Link("Infinity Fabric", 448.0, NVLINK_LATENCY_US),
        NETWORKS["infiniband-ndr"],
    ),
}  # fmt: skip


def hardware(name: str) -> Hardware:
    """A known device. UsageError names the ones there are."""
    key = "".join(name.lower().replace("-", " ").split())
    if key not in HARDWARE:
        raise UsageError(f"there is no hardware called {name[:80]!r}", choose(name, HARDWARE))
    return HARDWARE[key]


@dataclass(frozen=True)
class Path:
    """How a group's bytes travel: ``nodes`` it lies on, ``inside`` its ranks of one node, the slowest link's rate for one rank [GB/s]."""

    nodes: int
    inside: int
    gb_s: float
    latency_us: float


def path_of(device: Hardware, size: int, stride: int) -> Path:
    """The path of a group of ``size`` ranks that lie ``stride`` apart, ranks numbered node by node.

    A ring that leaves the node does so through the network ports of all its ranks there, so that each node's share of the ring runs at
    ``inside`` times one port, at most at the speed of the link within the node. Its steps are counted by ``nccl`` one by one; for the
    plain model every step costs the slower latency.
    """
    inside = max(1, min(size, device.per_node // stride)) if stride < device.per_node else 1
    nodes = -(-size // inside)
    if nodes == 1:
        return Path(1, size, device.inside.gb_s, device.inside.latency_us)
    limit = device.inside.gb_s if inside > 1 else device.outside.gb_s
    return Path(nodes, inside, min(limit, inside * device.outside.gb_s), device.outside.latency_us)


def exchange_gb_s(device: Hardware, path: Path, size: int) -> float:
    """Rate at which each of ``size`` ranks sends to all others at once [GB/s]: no neighbour's port helps, unlike in a ring.

    Of x - 1 equal messages x - n leave a node with n members through the rank's own port; those within run beside.
    """
    if path.nodes == 1 or size < 2:
        return path.gb_s
    outside, inside = (size - path.inside) / (size - 1), (path.inside - 1) / (size - 1)
    return 1 / max(outside / device.outside.gb_s, inside / device.inside.gb_s)


def hardware_of(device: str) -> Hardware | None:
    """The preset whose name is a word of the device's name (``NVIDIA H100 80GB HBM3``); None for any other."""
    words = device.lower().replace("-", " ").split()
    words += [first + second for first, second in pairwise(words)]  # RTX 4090
    return next((preset for name, preset in HARDWARE.items() if name in words), None)
