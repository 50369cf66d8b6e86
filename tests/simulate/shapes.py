"""Hypothesis strategies: lists of parameters, and worlds."""

from hypothesis import strategies as st

from tracekit.simulate.data_parallel.layouts import ParameterShape

WORLDS = st.integers(1, 8)


def parameters(smallest_side: int = 0, scalars: bool = True) -> st.SearchStrategy[list[ParameterShape]]:
    shapes = st.lists(st.integers(smallest_side, 6), min_size=0 if scalars else 1, max_size=3)
    return st.lists(shapes, max_size=6).map(lambda found: [ParameterShape(f"p{i}", tuple(shape)) for i, shape in enumerate(found)])
