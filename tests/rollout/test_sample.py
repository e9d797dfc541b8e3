import pytest

from ulorl_megatron.rollout.sample import Sample, Segment, age, lost


def fresh() -> Sample:
    return Sample(id=3, group_id=0, prompt_index=0, prompt_tokens=[1], answer="", created_step=1)


def segment(tokens=2, log_probs=None, versions=None) -> Segment:
    return Segment(1, [5] * tokens, [-1.0] * tokens if log_probs is None else log_probs, versions or [0] * tokens)


@pytest.mark.parametrize(
    "bad",
    [segment(2, log_probs=[-1.0]), segment(2, versions=[0]), segment(2, log_probs=[-1.0, None]), segment(9)],
)
def test_unsound_segments_are_refused_and_change_nothing(bad):
    sample = fresh()
    with pytest.raises(ValueError, match="sample 3"):
        sample.grow(bad, finished=False, global_max_length=8)
    assert sample.segments == [] and not sample.complete


def test_a_complete_sample_does_not_grow():
    sample = fresh()
    sample.grow(segment(), finished=True, global_max_length=8)
    with pytest.raises(ValueError, match="complete"):
        sample.grow(segment(), finished=False, global_max_length=8)


def test_truncated_exactly_at_the_cap():
    sample = fresh()
    sample.grow(segment(7), finished=False, global_max_length=8)
    assert not sample.complete
    sample.grow(segment(1), finished=False, global_max_length=8)
    assert sample.truncated and not sample.finished and sample.length == 8


def test_lost_weights_are_never_the_current_ones_and_keep_their_age():
    assert [age(v, 7) for v in (7, 6, 0)] == [0, 1, 7]
    assert [age(lost(v), 7) for v in (7, 6, 0)] == [1, 1, 7]
    assert lost(lost(5)) == lost(5) < 0
