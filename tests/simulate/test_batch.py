"""Fixed global and fixed local batch: steps, times and gradients by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.errors import UsageError
from tracekit.simulate.batch import Arguments, run


def frames(experiment):
    return {t.title: t.frame for t in experiment.tables}


def test_a_fixed_global_batch_is_shared_out_and_a_fixed_local_one_grows():
    found = frames(run(Arguments(worlds=(1, 2, 4), global_batch=64, local_batch=16, samples=128)))
    assert found["Fixed global batch: samples and steps"][["world", "global_batch", "local_batch", "steps"]].to_numpy().tolist() == [
        [1, 64, 64, 2],
        [2, 64, 32, 2],
        [4, 64, 16, 2],
    ]
    assert found["Fixed local batch: samples and steps"][["global_batch", "local_batch", "steps", "learning_rate"]].to_numpy().tolist() == [
        [16, 16, 8, 0.1],
        [32, 16, 4, 0.2],
        [64, 16, 2, 0.4],
    ]


def test_a_step_is_micro_batches_and_an_all_reduce():
    """16 samples of 2 ms in 2 micro-batches of 4 ms each; 1 GB over 2 ranks at 50 GB/s: 20 ms and 2 messages of 10 us."""
    found = frames(run(Arguments(worlds=(2,), global_batch=32)))
    assert found["Fixed global batch: samples and steps"]["micro_batches"].tolist() == [2]
    frame = found["Fixed global batch: times"]
    assert frame["compute"].tolist() == [40.0]
    assert frame["all_reduce"].tolist() == pytest.approx([20.02])
    assert frame["step"].tolist() == pytest.approx([60.02])


def test_uneven_batches_give_another_gradient_unless_they_are_weighted():
    frame = frames(run(Arguments(worlds=(2, 4))))["Is it the same gradient?"]
    errors = frame.groupby("case")["error"].max()
    assert errors["uneven"] > 1e-4
    assert errors["even"] < 1e-12 and errors["uneven, weighted by samples"] < 1e-12


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(12, 60), st.integers(1, 20), st.integers(0, 9))
def test_every_check_holds(worlds, global_batch, local_batch, seed):
    experiment = run(Arguments(worlds=tuple(worlds), global_batch=global_batch, local_batch=local_batch, seed=seed))
    assert [check for check in experiment.checks if not check.holds] == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"worlds": ()}, "--worlds is empty"),
        ({"worlds": (0,)}, "--worlds 0"),
        ({"worlds": (128,)}, "without a sample"),
        ({"bandwidth_gb_s": 0.0}, "--bandwidth-gb-s 0"),
        ({"micro_batch": 0}, "--micro-batch 0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, reason):
    with pytest.raises(UsageError, match=reason):
        run(Arguments(**arguments))
