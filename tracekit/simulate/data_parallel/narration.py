"""Which moments of a step are pictured, and what is said of them: one table for the FSDP experiment, one for ZeRO.

Event -> (title, text); an event that a table lacks is not pictured. ``when`` is the phase, with several micro-batches also which one.
"""

_PLACES = "In brackets which elements of the parameter, row by row; after them the offset in the "
_FREED = "Gradients are freed: what is left is what each rank holds between two steps."

FSDP = {
    "start": (
        "after init",
        "Each rank keeps its shard of every unit, and the two Adam moments of it (torch allocates them in the first update; here they are "
        f"there from the start, so that the bytes are those of any later step). {_PLACES}shard.",
    ),
    "load": ("batch", "Each rank takes its own part of the batch."),
    "gather_flat": (
        "{when}: all-gather of {unit}",
        "The shards of all ranks end to end are the unsharded flat parameter; the parameters are views into it.",
    ),
    "gather_rows": ("{when}: all-gather of {unit}", "The shards of all ranks arrive in one buffer, rank by rank."),
    "gather_alone": ("{when}: all-gather of {unit}", "Each parameter gets its own storage."),
    "copy_out": ("{when}: {unit} copied out", "Each parameter gets its own storage; the buffer {fate}."),
    "forward": ("{when}: layer {layer}", "h{layer} is computed from h{below}; both stay for backward."),
    "free": ("{when}: {unit} freed", "The gathered parameters are freed; the shards were there all the time."),
    "loss": ("loss", "Each rank's loss is the mean over its own samples; its gradient starts backward."),
    "backward": ("{when}: layer {layer}", "Full gradients of layer {layer}, on each rank of its own samples: every rank has others."),
    "join": ("{when}: flat gradient of {unit}", "The gradients of the views are joined to one; for a moment both are there."),
    "lay_out": ("{when}: gradients of {unit} laid out", "The input of the reduce-scatter: a piece for each rank, in order, padded."),
    "scatter": (
        "{when}: reduce-scatter of {unit}",
        "Each rank gets its own piece, summed over all ranks and divided by their number.",
    ),
    "scatter_in_replica": ("{when}: reduce-scatter of {unit}", "Each rank gets its own piece, the mean over its replica."),
    "all_reduce_replicas": (
        "{when}: all-reduce of {unit}",
        "Ranks with the same shard in each replica add up what they have: the mean over all samples.",
    ),
    "update_owned": ("optimizer: Adam on the shards", "Each rank updates its own shard with the mean gradient; nothing is sent."),
    "finish": ("between steps", _FREED),
}

ZERO = {
    "start": ("between steps, before", f"What each rank holds when a step begins. {_PLACES}flat vector or the rank's part of it."),
    "gather_flat": ("{when}: all-gather of {unit}", "The owners' parts are joined before use."),
    "forward": ("{when}: layer {layer}", "h{layer} is computed and kept for backward."),
    "backward": ("{when}: layer {layer}", "Gradients of the micro-batch, on each rank of its own samples."),
    "accumulate": ("{when}: {unit} accumulated", "Gradients are added up on each rank; nothing is sent yet."),
    "all_reduce": ("{when}: all-reduce of {unit}", "Every rank gets the mean of all gradients."),
    "all_reduce_owned": (
        "{when}: all-reduce of {unit}",
        "Every rank gets the mean of all gradients, and will use its own part alone.",
    ),
    "scatter": ("{when}: reduce-scatter of {unit}", "Every rank gets the mean of the part it owns."),
    "before_update": ("before the update", "All gradients are reduced; activations are gone."),
    "update_all": ("update", "Each rank updates everything, all ranks alike."),
    "update_owned": ("update", "Each rank updates what it owns."),
    "update_owners": ("update", "Each rank updates the parameters that it owns."),
    "synchronise": ("{unit} synchronised", "Every rank gets the parts that others have updated."),
    "broadcast": ("rank {root} broadcasts", "Everybody gets what rank {root} has updated: {names}."),
    "finish": ("between steps, after", _FREED),
}
