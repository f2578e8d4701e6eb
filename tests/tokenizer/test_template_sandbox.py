"""Hostile chat templates: they cannot reach outside the sandbox, run for long, or use much memory."""

import contextlib
import sys
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat_templates import GREETING, render

from minillm.errors import ChatTemplateError

BREAKOUTS = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['sys'] }}",
    "{{ strftime_now.__code__.co_consts }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ (messages | attr('__class__')).mro() }}",
    "{{ (messages | map(attribute='__class__') | first).mro() }}",
    "{{ '{0.__class__.mro}'.format(1) + 1 }}",
    "{{ '{0.__class__}'.format_map({}) }}",
    "{{ dict.mro() }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='system') }}",
    "{{ messages[0].pop('role') }}",
    "{{ lipsum.__globals__ }}",
    "{{ cycler.__init__ }}{{ cycler(1) }}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as x %}",
    "{% from 'x' import y %}",
    "{% extends '/etc/passwd' %}",
    "{{ environment.loader.x }}",
    "{{ 'a'.encode().decode() }}",
]
DOUBLING = "{{% set ns = namespace(x={start}) %}}{{% for i in range(99) %}}{step}{{% endfor %}}{{{{ ns.x | tojson }}}}"
# A value that is stored repeatedly, each time inside the next value.
NESTING = (
    "{{% set ns = namespace(t=()) %}}{{% macro f() %}}{{% set ns.t = {macro} %}}{{% endmacro %}}"
    "{{% for j in range(3) %}}{{% for i in range(90000) %}}{{% set _ = {step} %}}{{% endfor %}}{{% endfor %}}"
    "{{{{ {use} }}}}"
)
BOMBS = [
    "{{ 'a' * 10 ** 10 }}",
    "{{ 10 ** 10 * [1] }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{{ 'a' | center(10 ** 9) }}",
    "{{ 'a'.center(10 ** 9) }}{{ 'a'.ljust(10 ** 9) }}",
    "{{ 'a'.zfill(width) }}",
    "{{ '{:9999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 99999) }}",
    "{{ '{0:{1[0]}}'.format(1, [10 ** 9]) }}",
    "{{ '%0999999999d' % 1 }}",
    "{{ '%(a)999999999d' % {'a': 1} }}",
    "{{ '%.999999999f' | format(1.0) }}",
    "{{ '%*d' | format(99999, 1) }}",
    "{% set f = '{0}' * 1000 %}{{ f.format('a' * 10000) }}",
    "{% set b = 'a' * 100000 %}{{ ('%(b)s' * 1000) % {'b': b} }}",
    "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) if range(99999) | select('odd') | list == 0 %}{% endfor %}",
    "{{ range(10 ** 9) | list }}",
    "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(50) }}",
    "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "{% for a in [[1]] recursive %}{{ loop([a]) }}{{ loop([a]) }}{% endfor %}",
    DOUBLING.format(start="'a'", step="{% set ns.x = ns.x + ns.x %}"),
    DOUBLING.format(start="'a'", step="{% set ns.x = ns.x ~ ns.x %}"),
    DOUBLING.format(start="'a'", step="{% set ns.x = [ns.x, ns.x] | join %}"),
    DOUBLING.format(start="'a'", step="{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    DOUBLING.format(start="'a'", step="{% set ns.x = '%s%s' % (ns.x, ns.x) %}"),
    DOUBLING.format(start="'a'", step="{% set ns.x = '{0}{0}'.format(ns.x) %}"),
    DOUBLING.format(start="'a'", step="{% set ns.x = ns.x.replace('a', 'aa') %}"),
    DOUBLING.format(start="'&' * 10000", step="{% set ns.x = (ns.x | escape) ~ '' %}"),
    DOUBLING.format(start="[1]", step="{% set ns.x = ns.x + ns.x %}"),
    DOUBLING.format(start="[1]", step="{% set ns.x = [ns.x, ns.x] %}"),
    DOUBLING.format(start="[1]", step="{% set ns.x = (ns.x, ns.x) %}"),
    DOUBLING.format(start="[1]", step="{% set ns.x = {'a': ns.x, 'b': ns.x} %}"),
    DOUBLING.format(start="[1]", step="{% set ns.x = dict(a=ns.x, b=ns.x) %}"),
    DOUBLING.format(start="[1]", step="{% set ns.x = ns.x | map('string') | list + ns.x %}"),
    DOUBLING.format(start="[1]", step="{% set ns.x = namespace(a=ns.x, b=ns.x) %}"),
    "{% set b = 'a' * 100000 %}{{ b.replace('a', b) }}",
    "{% set b = 'a' * 100000 %}{{ b | replace(old='', new=b) }}",
    "{% set b = 'a' * 100000 %}{{ ([b] * 100000) | join }}",
    "{% set b = 'a' * 100000 %}{{ b.join(b) }}",
    "{{ ('a\n' * 100000) | indent(100000) }}",
    "{{ range(9999) | list | tojson(indent=100000) }}",
    "{{ 1.5 | round(10 ** 9, 'ceil') }}",
    "{{ 'a'.translate({97: 'b' * 1000}) }}",
    "{{ ('\t' * 1000).expandtabs(100000) }}",
    "{{ {}.fromkeys(range(9), 1) }}",
    "{{ (1).to_bytes(100000) }}",
    "{% for i in range(99999) %}" + "x" * 200_000 + "{% endfor %}",
    "{% for i in range(99999) %}{{ '" + "x" * 200_000 + "' }}{% endfor %}",
    "{% set b = 'a' * 1000000 %}{% for i in range(99999) %}{% set c = b[1:] %}{% endfor %}",
    "{% set ns = namespace(g=[]) %}{% for i in range(99999) %}{% set ns.g = ns.g | map('trim') %}{% endfor %}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "+".join(["a"] * 20_000) + " }}",
    "{{ a" + ".b" * 5000 + " }}",
    "{% if a %}" * 3000 + "{% endif %}" * 3000,
    "{% for a in b %}" * 50 + "{% endfor %}" * 50,
    "{{ " + "9" * 10_000 + " }}",
    "{{ strftime_now('%Y' * 1000000) }}",
    "{{ strftime_now('%099999d' * 100000) }}",
    "{{ strftime_now('%99999999d') }}",
    NESTING.format(macro="varargs", step="f(ns.t)", use="ns.t in {}"),
    NESTING.format(macro="varargs", step="f(ns.t, ns.t)", use="ns.t"),
    NESTING.format(macro="kwargs", step="f(a=ns.t, b=ns.t)", use="ns.t | tojson"),
    DOUBLING.format(start="(((1,),),)", step="{% set ns.x = (ns.x,) %}"),
    DOUBLING.format(start="[[[]]]", step="{% set ns.x = [ns.x] %}"),
    DOUBLING.format(start="{'a': 1}", step="{% set ns.x = {'a': ns.x | items | list} %}"),
    DOUBLING.format(start="['ab']", step="{% set ns.x = ns.x | groupby(0) %}"),
    "{% set b = 'a' * 100000 %}{{ range(99999) | map(attribute='x', default=b) | list | string | length }}",
    "{% set b = 'a' * 100000 %}{{ range(99999) | map(attribute='x') | map('default', b) | list | upper | length }}",
    "{{ " + " or ".join(["[range(99999) | list] == 1"] * 200) + " }}",
    "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% for b in range(99999) if false %}{% endfor %}" * 2000,
    "{{ range(99999) | reject('in', range(99999) | list) | list }}",
    "{{ ('a' * 500000) | trim('b' * 500000 ~ 'a') }}",
    "{{ ('a' * 500000).strip('b' * 400000 ~ 'a') }}",
    "{{ ('a' * 500000).rfind('b' ~ 'a' * 250000) }}",
    "{{ ('a' * 500000).rsplit('b' ~ 'a' * 250000) }}",
    "{{ ('a' * 500000).rpartition('b' ~ 'a' * 250000) }}",
    "{{ (('<!---->' * 80000) | safe).striptags() }}",
    "{{ (('&lt;' * 80000) | safe).unescape() }}",
    "{% for i in range(9) %}{{ loop.changed(i) }}{% endfor %}",
    "{{ ('%99d' * 99999) % range(99999) | list }}",
    "{{ '%.99f' * 99999 | format(1e308) }}",
    "{{ 3 ** 5000000 // 3 ** 2400000 }}",
    "{{ 0x" + "f" * 20000 + " // 3 }}",
    "{{ ('f' * 200000) | int(base=16) // 3 }}",
    "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x - ns.x * -9 %}{% endfor %}",
    "{{ (1).from_bytes([255] * 100000, 'big') // 3 }}",
    "{{ 1e300 | int // 3 }}",
    "{{ [[[1]]] | tojson(indent='a' * 100000) }}",
    "{{ [1] * 9999 | tojson(separators=('a' * 100000, 'b')) }}",
    "{{a}}" * 19_900,
    "{%if a%}{%endif%}" * 5_800,
    "{% set a = 1 %}" * 6_600,
    "{{ a" + " ~ a" * 20_000 + " }}",
    "{{ [" + "1," * 45_000 + "] }}",
    "{{ a" + "|e" * 45_000 + " }}",
    "{%if a%}" + "{%elif a%}" * 9_000 + "{%endif%}",
    "{% call f() %}{% endcall %}",
    "{{ range(99999) | max(attribute='real" + ".real" * 19_000 + "') }}",
    "{{ range(99999) | join(attribute='real" + ".real" * 19_000 + "') }}",
    "{{ range(9999) | list | sort(attribute='real" + ",real" * 9_000 + "') }}",
    "{{ range(99999) | rejectattr('real" + ".real" * 19_000 + "') | list }}",
    "{{ raise_exception('a' * 400000) }}",
]


# Operations that each take a short time, repeated as often as the length limit of a template allows.
SETUP = "{% set x = (0.5,) * 60000 %}{% set y = (0.5,) * 60000 %}{% set z = {'a': 1} %}{% set s = 'a' * 200000 %}"
SLOW_OPERATIONS = [
    "x == y",
    "x < y",
    "x in [y, y]",
    "y in x",
    "x is eq y",
    "x is in z",
    "x == y != y == x",
    "z[x]",
    "z.get(x)",
    "{x: 1, y: 2}",
    "x[1:]",
    "x | sort",
    "x | string | length",
    "x | unique",
    "x | reject('eq', 5.5) | list",
    "x | rejectattr('real', 'lt', 0) | list",
    "x | map('trim') | list",
    "x | max",
    "x.index(5.5) if 5.5 in x",
    "'%s' % [x]",
    "'{}'.format(x)",
    "x ~ x",
    "[x]",
    "dict(x=x)",
    "namespace(x=x)",
    "s == s ~ ''",
    "s in s ~ 'b'",
    "s[1:]",
    "s.upper()",
    "s | trim",
    "s | list",
    "s.split('a')",
    "s.rfind('b' ~ s)",
]


@pytest.mark.parametrize("source", BREAKOUTS)
def test_a_template_cannot_reach_outside(source):
    messages = [dict(GREETING[0])]
    with pytest.raises(ChatTemplateError):
        render(source, messages)
    assert messages == GREETING


@pytest.mark.parametrize("source", BOMBS, ids=lambda source: source[:70])
def test_bombs_are_stopped_early(source):
    start = time.monotonic()
    with pytest.raises(ChatTemplateError, match="chat template"):
        render(source, width=10**9)
    assert time.monotonic() - start < 10  # 2.5 s on an idle machine


@pytest.mark.parametrize("operation", SLOW_OPERATIONS)
def test_slow_operations_are_limited_to_seconds(operation):
    start = time.thread_time()
    with contextlib.suppress(ChatTemplateError):
        render(SETUP + f"{{% set r = {operation} %}}" * min(2000, (99_000 - len(SETUP)) // (len(operation) + 15)))
    assert time.thread_time() - start < 4


@pytest.mark.parametrize("source", [bomb for bomb in BOMBS if "100000" in bomb or "10 **" in bomb][:12])
def test_bombs_use_little_memory(source):
    tracemalloc.start()
    with pytest.raises(ChatTemplateError):
        render(source)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40_000_000


def test_templates_import_no_modules():
    before = set(sys.modules)
    for source in BREAKOUTS:
        with pytest.raises(ChatTemplateError):
            render(source)
    assert set(sys.modules) == before


SYNTAX = [
    *("{{", "}}", "{%", "%}", "{#", "#}", "for", "in", "if", "endif", "endfor", "set", "macro", "endmacro", "ns"),
    *("'", "a", "1", "+", "*", "~", "|", "(", ")", "[", "]", ".", "messages", "range", "loop", "=", " ", "\n", "join"),
]


@settings(max_examples=300)
@given(source=st.lists(st.sampled_from(SYNTAX), max_size=25).map(" ".join) | st.text(max_size=30))
def test_fuzzed_templates_render_or_raise_chat_template_error(source):
    with contextlib.suppress(ChatTemplateError):
        assert isinstance(render(source), str)
