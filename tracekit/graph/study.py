"""Everything that the replay of one job gives, worked out once for all analyses that ask."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tracekit.graph.build import NoGraph, graph_of
from tracekit.graph.critical import CriticalPath, critical_path
from tracekit.graph.culprits import Search, culprits_of
from tracekit.graph.kinds import Kinds, Places, kinds_of, places_of
from tracekit.graph.slowdown import Slowdown, slowdown_of
from tracekit.graph.stages import ANALYSIS
from tracekit.graph.step_graph import StepGraph
from tracekit.job.model import Job

#: A replay that misses the measured step by more is no ground for conclusions.
LARGEST_ERROR = 0.05


@dataclass(frozen=True)
class Study:
    """The graph of a job and what follows from it. Everything is worked out when it is asked for, once."""

    job: Job
    graph: StepGraph
    places: Places
    kinds: Kinds

    @cached_property
    def step_ns(self) -> float:
        """The mean step as replayed with measured costs and delays [ns]."""
        return self.graph.step_ns(self.graph.replay())

    @cached_property
    def error(self) -> float:
        """By how much that differs from the measured step, of it."""
        measured = float(int(self.graph.end.max()) - self.graph.begin) / self.graph.steps
        return abs(self.step_ns - measured) / measured if measured > 0 else 0.0

    @property
    def trusted(self) -> bool:
        """Whether conclusions may be drawn."""
        return self.error <= LARGEST_ERROR

    @cached_property
    def apart(self) -> StepGraph:
        """The graph with each step by itself."""
        return self.graph.apart()

    @cached_property
    def path(self) -> CriticalPath:
        """The chain from the end of the last step back to the begin of the first."""
        return critical_path(self.graph)

    @cached_property
    def slowdowns(self) -> list[Slowdown]:
        """S by kind, and by role where there are stages."""
        both = (False, True) if self.places.stages else (False,)
        return [slowdown_of(self.apart, self.kinds, self.places, by_stage) for by_stage in both]

    @cached_property
    def search(self) -> Search:
        """Who makes the step longer."""
        return culprits_of(self.job, self.graph, self.kinds, self.places)


def study_of(job: Job) -> Study | NoGraph:
    """The study of a job, or why there is none."""
    if ANALYSIS not in job.held:
        graph = graph_of(job, ANALYSIS)
        if isinstance(graph, NoGraph):
            job.held[ANALYSIS] = graph
        else:
            places = places_of(job, graph)
            job.held[ANALYSIS] = Study(job, graph, places, kinds_of(job, graph, places))
    found: Study | NoGraph = job.held[ANALYSIS]
    return found
