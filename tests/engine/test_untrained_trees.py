"""Random models that mix untrained state of every kind: equal groups, exact resume, and no altered
constant.
"""

from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.groups import unlike
from tests.engine.test_untrained import Run, assert_same_states
from tests.untrained_parts import PARTS, altered_constants, broken, tree

END = 14


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 99),
    numbers=st.lists(st.integers(0, len(PARTS) - 1), min_size=1, max_size=6),
    groups=st.sampled_from([2, 4]),
    saved_at=st.integers(1, END - 1),
    mixing=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_groups_of_random_models_agree_resume_exactly_and_keep_constants(
    seed: int, numbers: list[int], groups: int, saved_at: int, mixing: float
) -> None:
    random_groups = partial(
        Run, partial(tree, seed, numbers), groups, lr=0.02, overlap_steps=1, mixing=mixing
    )
    run = random_groups()
    initial = run.local()[0]
    run.until(saved_at)
    resumed = random_groups().load(run).until(END)
    run.until(END)
    mean = run.groups.group_mean()
    shown = [run.shown(group, mean) for group in range(groups)]
    for values in shown:
        assert unlike(values, shown[0]) == []
    assert_same_states(resumed.finish(), run.finish())
    final = run.local()
    for values in final:
        assert unlike(values, final[0]) == []
        assert altered_constants(values, initial) == []
        assert broken(values, END) == []
