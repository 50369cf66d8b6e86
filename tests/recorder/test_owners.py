"""What is said of tensors before the window: registered at its beginning, if it still holds."""

import importlib

import pytest

torch = pytest.importorskip("torch")


def test_a_batch_that_the_loop_lets_go_in_the_window_is_not_registered_as_standing() -> None:
    from tracekit.recorder.owners import OwnerLog

    log, gone, kept, weight = OwnerLog(), torch.zeros(8), torch.zeros(16), torch.zeros(32)
    for tensor, category in ((gone, "inputs"), (kept, "inputs"), (weight, "parameters")):
        log.own(tensor, category)
    log.begin()
    log.settled()
    del gone, tensor
    log.own(torch.zeros(4), "inputs")
    log.end()
    owners = log.columns()
    in_time = sorted(zip(owners.time_ns, owners.bytes, strict=True))
    assert sorted(owners.bytes) == [4 * 4, 16 * 4, 32 * 4]
    assert in_time[0][1] == 16 * 4  # at the beginning, though only the end tells that it stayed


def test_what_stood_and_is_given_back_in_the_window_is_told_unless_somebody_keeps_its_storage() -> None:
    from tracekit.manifest import FREED
    from tracekit.recorder.owners import OwnerLog

    log, gradient, bucket, kept = OwnerLog(), torch.zeros(8), torch.zeros(16), torch.zeros(32)
    view, address = bucket[:16], gradient.data_ptr()
    log.begin()
    for tensor in (gradient, view, kept):
        log.own(tensor, "gradients")
    log.settled()
    del gradient, view, tensor
    log.own(torch.zeros(4), "gradients")  # born in the window: the profiler tells its free
    log.end()
    owners = log.columns()
    assert [place for place, size in zip(owners.address, owners.bytes, strict=True) if size == FREED] == [address]
    assert kept.numel() + bucket.numel() == 48


def test_every_way_to_make_buffers_for_communication_is_followed():
    from tracekit.recorder import private

    names = {kind.__name__ for kind in private.fsdp2_allocators()}
    assert "DefaultAllocMixin" in names
    assert not [kind for kind in private.fsdp2_allocators() if "allocate" not in vars(kind)]
    made = vars(importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_collectives"))
    assert names == {name for name in made if name.endswith("AllocMixin")}
