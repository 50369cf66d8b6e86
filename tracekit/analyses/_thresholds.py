"""From which figure on a finding is said, and how loud: every threshold of every analysis, in one place.

Shares are of the mean step (or of the quantity named); times are nanoseconds. A share below ``info`` is not said at all.
"""

from __future__ import annotations

from dataclasses import dataclass

from tracekit.findings import Severity


@dataclass(frozen=True)
class Levels:
    """Lower bounds of the severities."""

    info: float
    warning: float
    critical: float = float("inf")

    def of(self, value: float) -> Severity | None:
        """The severity of a figure; None where it is not worth a sentence."""
        if value >= self.critical:
            return "critical"
        if value >= self.warning:
            return "warning"
        return "info" if value >= self.info else None


#: What a step would win without one cause, by replay, of the step.
GAIN = Levels(info=0.0, warning=0.01, critical=0.10)
#: Communication that no compute hides, of all axes together and of one axis.
EXPOSED = Levels(info=0.01, warning=0.10, critical=0.30)
EXPOSED_AXIS = Levels(info=0.03, warning=0.10, critical=0.30)
#: Copies beside which nothing runs.
EXPOSED_COPY = Levels(info=0.02, warning=0.05, critical=0.20)
#: (slowest rank - median) / median of the compute a step.
COMPUTE_IMBALANCE = Levels(info=0.05, warning=0.10, critical=0.30)
#: (longest step - median step) / median step.
STEP_VARIATION = Levels(info=0.10, warning=0.20)
#: Device time that starts outside every step.
OUTSIDE_STEPS = Levels(info=0.05, warning=2.0)
#: Nothing on the device because the host had not launched it yet.
HOST_BOUND = Levels(info=0.05, warning=0.10, critical=0.30)
#: Nothing on the device while a collective is waited for.
IDLE_WAITING = Levels(info=0.02, warning=0.05, critical=0.20)
#: What one rank costs each rank that waits for it, of a step.
STRAGGLER = Levels(info=0.002, warning=0.01, critical=0.10)
#: Waiting, of all time in matched collectives.
WAIT_SHARE = Levels(info=0.20, warning=2.0)
#: A bus bandwidth [GB/s] that no device reaches: its memory would have to be twice as quick as the quickest there is (B300: 8,000 GB/s).
IMPOSSIBLE_GB_S = 16_000
#: A group's bus bandwidth below this share of its siblings' median is slow.
SLOW_GROUP = 0.70
#: ... if its collectives take at least this share of a step (of the trace, where there are no steps).
SLOW_GROUP_COST = 0.002
#: A rank that comes last in more than this share of an axis' collectives (and in at least so many) is late as a rule, not by chance.
SYSTEMATIC_SHARE = 0.60
SYSTEMATIC_COUNT = 10
#: Communication operations that no other rank's trace holds, of all.
UNMATCHED = Levels(info=0.001, warning=0.10)
#: A kernel whose total differs between the ranks by more than this share of the mean, if it takes more than the second share of all.
KERNEL_SPREAD, KERNEL_SHARE = 0.25, 0.02
#: A kernel that starts this soon after a collective of another stream ended, though launched long before, waited for it.
EVENT_WAIT_NS = 50_000
#: Memory that is reserved but not in use at the peak, of what is reserved (private pools not counted).
FRAGMENTATION = Levels(info=0.10, warning=0.20, critical=0.50)
#: (highest - lowest peak) / highest peak of the ranks.
PEAK_SPREAD = Levels(info=0.05, warning=0.20)
#: Parts of the peak: full parameters of units beyond the one at work, DDP's buckets beside the gradients, what a loss makes of its logits.
GATHERED_AHEAD = Levels(info=0.05, warning=0.15)
BUCKETS = Levels(info=0.02, warning=0.10)
LOGITS = Levels(info=0.10, warning=0.25)
#: Bytes at the peak of which nobody knows the owner, and those from before the recording.
UNATTRIBUTED = Levels(info=0.01, warning=0.20)
OLDER_MEMORY = Levels(info=0.30, warning=2.0)
#: Memory of a device outside of torch's allocators, of all that it has.
OUTSIDE = Levels(info=0.05, warning=0.20)
#: Bytes a step that memory grows by, of the peak: a warning lasts 1,000 steps, a critical one 100.
GROWTH = Levels(info=0.0001, warning=0.001, critical=0.01)
#: Time in which a rank has no pipeline work, of a run of the schedule; what of it stands above the schedule's own bubble.
BUBBLE = Levels(info=0.02, warning=0.15, critical=0.40)
BUBBLE_ABOVE_IDEAL = Levels(info=0.03, warning=0.10, critical=0.30)
#: (slowest - mean) / mean of the work of the ranks of one pipeline for one micro-batch.
UNEQUAL_STAGES = Levels(info=0.05, warning=0.15)
#: An FSDP unit with at least this share of all parameters; it is a warning from so many elements on.
COARSE_UNIT, COARSE_ELEMENTS = 0.60, 100_000_000
#: From more than so many units on: all-gathers of small ones that take this share of the time of all.
FINE_UNITS, FINE_UNITS_TIME = 8, 0.05
#: Most tokens on one rank over the mean; tokens dropped, of all choices of tokens.
EXPERT_IMBALANCE = Levels(info=1.2, warning=1.5, critical=3.0)
DROPPED_TOKENS = Levels(info=1e-12, warning=0.01, critical=0.10)
