"""Random requests to a tiny model, and the parts of their answers that tests compare."""

from hypothesis import strategies as st

from minillm import SamplingParams

TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}<s>assistant:"

token_ids = st.lists(st.integers(0, 261), min_size=1, max_size=30)
sampling_params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 12),
    temperature=st.sampled_from([0.0, 0.7, 3.0]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    seed=st.integers(0, 1000),
    ignore_eos=st.booleans(),
    logprobs=st.just(True),
)


def answer_of(output):
    """Return tokens, logprobs, text and finish reason, which depend only on the request."""
    return output.token_ids, output.logprobs, output.text, output.finish_reason
