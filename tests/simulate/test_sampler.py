"""The distributed sampler: small cases by hand, and index for index what torch's DistributedSampler gives."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.errors import UsageError
from tracekit.simulate.sampler import Arguments, deal, per_rank, run


def table(experiment, title):
    (found,) = [t.frame for t in experiment.tables if t.title == title]
    return found


def test_ten_samples_in_order_on_four_ranks():
    """Three a rank: 12, so the first two are seen twice."""
    experiment = run(Arguments(samples=10, world=4, epochs=1, shuffle="no"))
    assert table(experiment, "What every rank sees")["samples"].tolist() == ["0, 4, 8", "1, 5, 9", "2, 6, 0", "3, 7, 1"]
    assert table(experiment, "Epochs")[["repeated", "left_out", "steps"]].to_numpy().tolist() == [["0, 1", "none", 2]]
    assert table(experiment, "Every sample")["times"].tolist() == [2, 2, 1, 1, 1, 1, 1, 1, 1, 1]
    assert experiment.holds


def test_drop_last_leaves_out_what_does_not_divide():
    experiment = run(Arguments(samples=10, world=4, epochs=1, shuffle="no", drop_last="yes"))
    assert table(experiment, "What every rank sees")["samples"].tolist() == ["0, 4", "1, 5", "2, 6", "3, 7"]
    assert table(experiment, "Epochs")["left_out"].tolist() == ["8, 9"]


def test_a_batch_that_is_not_full_may_be_left_out_too():
    experiment = run(Arguments(samples=6, world=2, epochs=1, shuffle="no", batch=2, drop_last_batch="yes"))
    assert table(experiment, "Epochs")[["left_out", "steps"]].to_numpy().tolist() == [["4, 5", 1]]


def test_without_set_epoch_every_epoch_is_the_first():
    same = table(run(Arguments(epochs=3, set_epoch="no")), "Epochs")["same"].tolist()
    assert same == [True, True, True]
    assert table(run(Arguments(epochs=3)), "Epochs")["same"].tolist() == [True, False, False]


def test_more_ranks_than_samples():
    experiment = run(Arguments(samples=2, world=5, epochs=1, shuffle="no", batch=1))
    assert table(experiment, "What every rank sees")["samples"].tolist() == ["0", "1", "0", "1", "0"]
    assert experiment.holds
    assert per_rank(2, 5, drop_last=True) == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.integers(1, 9), st.integers(0, 2**40), st.integers(0, 3), st.booleans(), st.booleans())
def test_indices_are_those_of_torch(samples, world, seed, epoch, shuffle, drop_last):
    data = pytest.importorskip("torch.utils.data")
    if drop_last and samples < world:
        return  # torch computes a negative number of samples there
    arguments = Arguments(
        samples=samples, world=world, seed=seed, shuffle="yes" if shuffle else "no", drop_last="yes" if drop_last else "no"
    )
    found = [dealt.tolist() for dealt in deal(arguments, epoch).dealt]
    wanted = []
    for rank in range(world):
        sampler = data.DistributedSampler(range(samples), world, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
        sampler.set_epoch(epoch)
        wanted.append(list(sampler))
    assert found == wanted


@pytest.mark.parametrize(
    ("arguments", "reason"), [({"samples": 0}, "--samples 0"), ({"world": 257}, "--world 257"), ({"shuffle": "maybe"}, "--shuffle maybe")]
)
def test_arguments_that_make_no_sense_are_refused(arguments, reason):
    with pytest.raises(UsageError, match=reason):
        run(Arguments(**arguments))
