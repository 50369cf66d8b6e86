"""What makes a culprit slow, as far as its trace tells it from its peers'."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from tracekit.collectives.purpose import role_of_axis
from tracekit.graph.culprits import Culprit
from tracekit.graph.host import doing_words
from tracekit.graph.step_graph import launch_bound
from tracekit.graph.study import Study
from tracekit.trace.events import BoolArray
from tracekit.units import NULL

Kind = Literal["more_kernels", "slower_kernels", "tokens", "host", "pause", "gap", "link", "stage", "moving", "moving_host"]
#: Kernels of one name that take this much longer are slower; of so much of the compute, the device is.
_SLOWER, _MOST = 1.03, 0.7
#: A device that is slower is so in all it computes, or nearly; experts are busier with so many times the mean's tokens.
_ALL, _BUSIER = 0.98, 1.15
#: More kernels than this above the peers are other work.
_MORE = 1.02


@dataclass(frozen=True)
class Reason:
    """``factor`` of what the kind is about (kernels, their durations); ``doing``: what the host did; ``name``: kernel or host range."""

    kind: Kind
    factor: float = 1.0
    doing: str = ""
    name: str = ""


def reason_of(study: Study, culprit: Culprit) -> Reason:
    """The kind of cause: from what exceeds the peers' most."""
    if culprit.scope == "group":
        return Reason("link")
    loads = study.search.loads
    compute, gap = (float(part[culprit.entries].sum()) for part in (loads.compute_excess, loads.gap_excess))
    if culprit.scope == "moving":
        return Reason("moving" if compute >= gap else "moving_host")
    own = np.isin(study.graph.rank, culprit.ranks) & ~study.graph.comm
    peers = _peers(study, culprit) & ~study.graph.comm
    if culprit.scope != "stage" and gap > compute:
        return _late(study, culprit)
    count = _ratio(int(own.sum()) / len(culprit.ranks), int(peers.sum()), len(np.unique(study.graph.rank[peers])))
    slower, share, factor = _slower(study, own, peers)
    tokens = _tokens(study, culprit)
    if slower and share < _ALL and tokens > _BUSIER and culprit.scope in ("rank", "team"):
        return Reason("tokens", factor, name=slower)
    if count > _MORE and share < _MOST:
        return Reason("stage" if culprit.scope == "stage" else "more_kernels", count)
    if slower and share >= _MOST:
        return Reason("slower_kernels", factor, name=slower)
    experts = any(role_of_axis(axis.name) == "expert" for axis in study.job.mesh.axes)
    if slower and experts and culprit.scope in ("rank", "team") and not 0 <= tokens <= 1:
        return Reason("tokens", factor, name=slower)
    return Reason("stage" if culprit.scope == "stage" else "slower_kernels", factor, name=slower)


def _tokens(study: Study, culprit: Culprit) -> float:
    """What the culprit's experts get of tokens, times the mean of the ranks: by what a rank sends back when outputs are combined (in
    backward the gradients of that go the other way). -1 where that is not known.

    Ranks that send back alike (padded to one capacity) say nothing of it.
    """
    rows = study.job.operations
    rows = rows[(rows["purpose"] == "expert_combine") & (rows["sent_bytes"] != NULL) & (rows["phase"] != "backward")]
    sent = rows.groupby("rank")["sent_bytes"].sum()
    own = sent[sent.index.isin(culprit.ranks)]
    if not len(own) or len(sent) < 2 or sent.max() <= _MORE * sent.min():
        return -1.0
    return float(own.mean() / sent.mean())


def _peers(study: Study, culprit: Culprit) -> BoolArray:
    """Nodes of the other ranks of the culprit's stage; of a whole stage (or a rank alone in it) those of the other stages."""
    places, graph = study.places, study.graph
    stages = set(places.stage[np.isin(places.ranks, culprit.ranks)].tolist())
    of_node = places.of(graph.rank, places.stage)
    others: BoolArray = ~np.isin(graph.rank, culprit.ranks)
    same = others & np.isin(of_node, list(stages))
    return same if same.any() else others


def _ratio(own: float, peers: int, ranks: int) -> float:
    return own / (peers / ranks) if peers and ranks else 1.0


def _slower(study: Study, own: BoolArray, peers: BoolArray) -> tuple[str, float, float]:
    """(name that costs most among slower ones, share of the common compute that is slower, by how much it is)."""
    graph = study.graph
    mine = pd.Series(graph.cost[own]).groupby(graph.name[own]).agg(["mean", "sum"])
    theirs = pd.Series(graph.cost[peers]).groupby(graph.name[peers]).mean()
    both = mine.join(theirs.rename("theirs"), how="inner")
    both = both[both["theirs"] > 0]
    ratio = both["mean"] / both["theirs"]
    slow = both[ratio > _SLOWER]
    if not len(slow) or not both["sum"].sum():
        return "", 0.0, 1.0
    worst = int(slow.index[int(np.argmax(slow["sum"].to_numpy()))])
    factor = float(slow["sum"].sum() / (slow["theirs"] * slow["sum"] / slow["mean"]).sum())
    return graph.names[worst], float(slow["sum"].sum() / both["sum"].sum()), factor


def _late(study: Study, culprit: Culprit) -> Reason:
    """The host was late: what it did before the launches that its peers made earlier."""
    graph, loads = study.graph, study.search.loads
    inside = culprit.entries[loads.of_node] & (graph.gap > 0)
    heavy = inside & (loads.gap_excess[loads.of_node] > 0)
    said: Counter[str] = Counter()
    for code, ns in zip(graph.doing[heavy].tolist(), graph.gap[heavy].tolist(), strict=True):
        said[graph.names[code] if code >= 0 else ""] += ns
    name = max(said, key=lambda text: said[text], default="")
    if name and said[name] < 0.3 * sum(said.values()):
        name = ""
    late = launch_bound(graph) & heavy
    known = int(graph.gap[late].sum()) * 2 > int(graph.gap[heavy].sum())
    once = culprit.steps <= max(1, graph.steps // 4) and graph.steps > 2
    return Reason("pause" if once else "host" if known else "gap", doing=doing_words(name), name=name)
