"""The rows of the benchmark, and the units of their amounts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm import RequestError
from minillm.bench.report import format_amount
from minillm.bench.rows import SIZES, Row, choose_rows
from minillm.engine.scheduler import POLICIES


@given(groups=st.lists(st.sampled_from(list(SIZES)), min_size=1), size=st.integers(1, 10**6))
def test_rows_are_chosen_by_group_or_by_name_once_each(groups, size):
    rows = choose_rows(groups)
    assert choose_rows([row.name for row in rows]) == rows
    policies = {group: 3 if group == "serve" else 1 for group in SIZES}
    assert len(set(rows)) == len(rows) == sum((len(SIZES[group]) or 1) * policies[group] for group in set(groups))
    assert choose_rows([f"prefill-{size}"]) == [Row("prefill", size)]
    assert choose_rows([f"serve-{size}"]) == [Row("serve", size, policy) for policy in POLICIES]
    assert choose_rows([f"serve-{size}-static"]) == [Row("serve", size, "static")]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "prefil",
        "prefill-",
        "prefill-0",
        "prefill-1x",
        "load-3",
        "-",
        "decode-99999999",
        "batch-4-chunked",
        "serve-4-",
    ],
)
def test_an_unknown_row_is_refused(name):
    with pytest.raises(RequestError, match="unknown"):
        choose_rows(["load", name])


@pytest.mark.parametrize(
    ("name", "amount", "text"),
    [
        ("prefill-512", 0.5, "1,024 tokens/s"),
        ("batch-4", 0.1, "40.0 tokens/s"),
        ("serve-4", 10.64, "100 tokens/s"),
        ("load", 0.5, "500 ms"),
        ("start", 1.234, "1.23 s"),
        ("memory", 3e8, "300 MB"),
        ("exactness", 0.00012, "1.2e-04"),
    ],
)
def test_amounts_have_the_units_of_their_rows(name, amount, text):
    assert format_amount(choose_rows([name])[0], amount) == text
