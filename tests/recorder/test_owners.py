"""What is said of tensors before the window: registered at its beginning, if it still holds."""

import pytest

torch = pytest.importorskip("torch")


def test_a_batch_that_the_loop_lets_go_in_the_window_is_not_registered_as_standing() -> None:
    from tracekit.recorder.owners import OwnerLog

    log, gone, kept, weight = OwnerLog(), torch.zeros(8), torch.zeros(16), torch.zeros(32)
    for tensor, category in ((gone, "inputs"), (kept, "inputs"), (weight, "parameters")):
        log.own(tensor, category)
    log.begin()
    del gone, tensor
    log.own(torch.zeros(4), "inputs")
    log.end()
    owners = log.columns()
    in_time = sorted(zip(owners.time_ns, owners.bytes, strict=True))
    assert sorted(owners.bytes) == [4 * 4, 16 * 4, 32 * 4]
    assert in_time[0][1] == 16 * 4  # at the beginning, though only the end tells that it stayed
