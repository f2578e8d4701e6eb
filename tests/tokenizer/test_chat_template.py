"""Chat templates render as in transformers, and errors name the template's line or the malformed message."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat_templates import GREETING, render
from transformers.utils.chat_template_utils import render_jinja_template

from minillm.errors import ChatTemplateError, RequestError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' "
    "+ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SYSTEM_FIRST = """
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}
    {%- set system = 'You are ' ~ (name | default('nobody')) ~ '.' %}{% set rest = messages %}
{%- endif %}
{{ bos_token }}{{ system | trim }}
{% for message in rest %}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content.strip().replace('a', 'bb') }}{{ eos_token }}{% endgeneration %}
    {%- elif loop.first or message['content'].startswith('x') %}
        {{- "[%s|%3d] " % (message.role, loop.index) + message.content | upper }}
    {%- else %}
        {%- if loop.index > 4 %}{% break %}{% endif %}
        {{- '{} {:>9}'.format(message.role, message.content[:5]) }}
    {%- endif %}
{% endfor %}
{{- {'roles': messages | map(attribute='role') | list, 'n': messages | length, 'é<&': none} | tojson }}
{{- tools | tojson(indent=2) if tools is not none }}
"""
STATE = """
{%- macro turn(message, ns) %}{% set ns.count = ns.count + 1 %}<{{ message.role }} {{ ns.count }}>
    {%- for line in message.content.split('\n') if line %}{{ line | indent(2, true) }};{% endfor %}
{%- endmacro %}
{%- set ns = namespace(count=0, seen=[]) %}
{%- for message in messages %}
    {{- turn(message, ns) }}
    {%- set ns.seen = ns.seen + [message.role] %}
{%- endfor %}
{{- ns.seen | join(', ') }}|{{ ns.seen | unique | sort | join }}|{{ ns.count * 2 }}|{{ dict(a=1).items() | list }}
{{- messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('-') }}
{{- "%s:%s" | format('x', ns.count) }}
"""
TOOL_USE = """
{%- macro tag(name, attributes=[]) %}<{{ name }}{% for key, value in attributes %} {{ key }}="{{ value | string |
replace('"', '&quot;') }}"{% endfor %}>{% endmacro %}
{%- macro schema(value) %}
    {%- if value is mapping %}{
        {%- for key, item in value | dictsort if key != 'x' %}{{ key }}:{{ schema(item) }}{{ ',' if not loop.last }}
        {%- endfor %}}
    {%- elif value is string or value is number or value is none %}{{ value | tojson(ensure_ascii=false) }}
    {%- else %}[{% for item in value %}{{ schema(item) }}{% endfor %}]{% endif %}
{%- endmacro %}
{%- set ns = namespace(kept=[], last=none) %}
{%- for tool in tools or [] %}{{ schema(tool.function) | trim }}{% endfor %}
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
    {%- if message.role in ['system', 'user'] and message not in ns.kept %}
        {%- set ns.kept = ns.kept + [message] %}
    {%- endif %}
    {%- if asked and message == asked[-1] %}{{ tag('last', [('role', message.role), ('n', loop.index)]) }}{% endif %}
    {%- for later in messages[loop.index0 + 1:] %}
        {%- if later.role == 'assistant' %}{{ later['content'].split('a')[-1].lstrip('\n') }}{% break %}{% endif %}
    {%- endfor %}
{%- endfor %}
{{- ns.kept | map(attribute='content') | map('upper') | join('/') }}{{ messages[::-1][0].get('name', '?') }}
"""
CONTENT = st.text(max_size=20) | st.text("ax<&>\n '{}%", max_size=20)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": CONTENT}),
    min_size=1,
    max_size=7,
)
TOOLS = st.none() | st.just([{"type": "function", "function": {"name": "näme", "parameters": {"n": [1, 2.5, True]}}}])


@pytest.mark.parametrize("source", [CHATML, SYSTEM_FIRST, STATE, TOOL_USE])
@settings(max_examples=50)
@given(messages=MESSAGES, tools=TOOLS, prompt=st.booleans())
def test_templates_render_as_in_transformers(source, messages, tools, prompt):
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    (expected,), _ = render_jinja_template(
        [messages], tools=tools, chat_template=source, add_generation_prompt=prompt, **variables
    )
    assert render(source, messages, tools=tools, add_generation_prompt=prompt, **variables) == expected


@settings(max_examples=50)
@given(messages=MESSAGES, prompt=st.booleans())
def test_the_default_template_renders_as_in_transformers(default_checkpoint, messages, prompt):
    tokenizer = default_checkpoint.tokenizer
    (expected,), _ = render_jinja_template(
        [messages], chat_template=tokenizer.chat_template, add_generation_prompt=prompt, **tokenizer.special_tokens
    )
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=prompt) == expected


def test_strftime_now():
    assert render("{{ strftime_now('%Y-%m-%d') }}") >= "2024-01-01"


def test_long_conversations_are_within_the_budget():
    # 4.8 million characters
    messages = [{"role": "user", "content": f"{n} " + "lorem ipsum " * 200} for n in range(2000)]
    assert len(render(CHATML, messages)) > 4_800_000
    assert render(STATE, messages).count("<user ") == 2000
    assert len(render(TOOL_USE, messages[:300])) > 720_000  # its work is quadratic in the number of messages


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "empty"),
        ("Hi", "expected a list of dicts, got str"),
        (None, "got NoneType"),
        (["Hi"], r"messages\[0\]: expected a dict, got str"),
        ([*GREETING, {"role": "user"}], r"messages\[1\]\['content'\]: expected text, got nothing"),
        ([{"role": 3, "content": "x"}], r"\['role'\]: expected text, got int"),
        ([{"role": "user", "content": None}], "got NoneType"),
    ],
)
def test_malformed_messages_are_rejected(messages, message):
    with pytest.raises(RequestError, match=message):
        render(CHATML, messages)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% if %}", "line 2: Expected an expression"),
        ("a\nb\n{{ nobody() }}", "line 3: 'nobody' is undefined"),
        ("\n{{ raise_exception('Roles must alternate') }}", "line 2: Roles must alternate"),
        ("{{ messages.x.y }}", "line 1: .*has no attribute 'x'"),
        ("\n\n\n{{ 1 / 0 }}", "line 4: ZeroDivisionError"),
        ("{{ 'a' | nonsense }}", "nonsense"),
        ("{{ tools.x | tojson }}", "line 1"),
        (None, "expected text, got NoneType"),
        ("x" * 100_001, "expected at most 100,000 characters, got 100,001"),
        ("a\n{% block x %}{% endblock %}", "line 2: .*may not use Block"),
        ("\n{{ 2 ** 3 }}", "line 2: .*may not use Pow"),
        ("{% macro f() %}{{ varargs }}{% endmacro %}", "may not use the name 'varargs'"),
    ],
)
def test_errors_name_the_line_and_the_reason(source, message):
    with pytest.raises(ChatTemplateError, match=message):
        render(source)


CALLS = [  # every method of a string, a list or a dict that a template may call, with arguments
    *("text.replace('a', 'bb')", "text.replace('a', 'b', 1)", "text.split('a')", "text.split()", "text.rsplit('a', 1)"),
    *("text.strip()", "text.lstrip('a')", "text.rstrip()", "text.upper()", "text.lower()", "text.title()"),
    *("text.capitalize()", "text.swapcase()", "text.casefold()", "text.startswith('a')", "text.endswith(('a', 'b'))"),
    *("text.find('a')", "text.rfind('a')", "text.count('a')", "text.join(['x', 'y'])", "text.partition('a')"),
    *("text.rpartition('a')", "text.splitlines()", "text.removeprefix('a')", "text.removesuffix('a')", "text.zfill(9)"),
    *("text.center(9)", "text.ljust(9, '.')", "text.rjust(9)", "text.isdigit()", "text.isalpha()", "text.isspace()"),
    *("'{}-{x}'.format(text, x=1)", "'%s' % text", "text.index('a') if 'a' in text else 0"),
    *(
        "[1, 2, 2].count(2)",
        "[1, 2].index(2)",
        "{'a': text}.get('a')",
        "{'a': 1}.items() | list",
        "{'a': 1}.keys() | list",
    ),
    *("{'a': 1}.values() | list", "dict(a=text)", "range(3) | list", "namespace(a=text).a", "{'a': 1}.copy()"),
    *("text | replace('a', 'c')", "text | trim | upper", "[text] | join(',')", "text | tojson", "text | length"),
]
PLACES = {
    "template": "CALL",
    "loop": "{% for n in [1, 2] %}CALL{% set kept = n %}{% endfor %}",
    "nested loop": "{% for n in [1] %}{% for m in [1, 2] %}CALL{% endfor %}{% endfor %}",
    "condition in a loop": "{% for n in [1, 2] %}{% if n %}CALL{% endif %}{% endfor %}",
    "macro": "{% macro show(text) %}CALL{% endmacro %}{{ show(text) }}",
    "macro in a loop": "{% macro show(text) %}CALL{% endmacro %}{% for n in [1, 2] %}{{ show(text) }}{% endfor %}",
    "set block with a filter": "{% set kept | trim %}CALL{% endset %}{{ kept }}",
    "filter block": "{% filter upper %}{% for n in [1] %}CALL{% endfor %}{% endfilter %}",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("text", ["banana", " a\nb ", ""])
def test_every_method_works_wherever_it_is_called(place, text):
    for call in CALLS:
        source = PLACES[place].replace("CALL", "{{ " + call + " }};").replace("text", "messages[0]['content']")
        source = source.replace("show(messages[0]['content']) %}", "show(text) %}")
        message = [{"role": "user", "content": text}]
        (expected,), _ = render_jinja_template([message], chat_template=source, add_generation_prompt=False)
        assert render(source, message, add_generation_prompt=False) == expected, call
