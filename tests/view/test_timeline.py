"""Timeline: the state of every sequence in every step."""

from hypothesis import given, settings
from support.simulated_runs import simulated_runs
from support.traces import traces

from minillm.trace import sequence_name
from minillm.view import Timeline


@settings(max_examples=60)
@given(trace=simulated_runs())
def test_a_prefill_is_a_recompute_exactly_if_it_repeats_a_position(trace):
    timeline, num_computed = Timeline(trace.facts), {}
    for record in trace:
        timeline.push(record)
        for chunk in record.chunks:
            cell = timeline.tracks[chunk.name].cells[record.step]
            assert cell.num_tokens == chunk.num_tokens
            if cell.state in ("prefill", "recompute"):
                assert (cell.state == "recompute") == (chunk.start < num_computed.get(chunk.name, 0))
            num_computed[chunk.name] = max(num_computed.get(chunk.name, 0), chunk.stop)
            for token in chunk.sampled:  # forks start with everything that the first completion has computed
                num_computed.setdefault(sequence_name(chunk.request_id, token.completion), chunk.stop)


@given(trace=traces() | simulated_runs())
def test_limits(trace):
    """Without limits a timeline keeps all tracks and all cells, also of names that are used again."""
    unlimited, seen = Timeline(trace.facts, max_cells=None, max_finished=None), {}
    for record in trace:
        unlimited.push(record)
        seen |= {track.number: track for track in unlimited.tracks.values()}
    tracks = unlimited.all_tracks()
    assert [track.number for track in tracks] == list(range(len(tracks)))
    assert all(tracks[number] is track for number, track in seen.items())
    limited = Timeline(trace.facts, max_cells=1, max_finished=0)
    for record in trace:
        limited.push(record)
    assert all(len(track.cells) <= 1 and track.finish_reason is None for track in limited.all_tracks())
