"""The report's templates: what is left out where it is empty, and what is escaped."""

import pytest
from markupsafe import Markup

from scripts.demo import html
from scripts.demo.parts import NOTHING, Cell


def rendered(text):
    names = "card, details, grid, section, table, tiles"
    return html.TEMPLATES.from_string('{% from "parts.html" import ' + names + " %}" + text)


def test_what_is_empty_is_left_out():
    nested = (
        "{% call section('A') %}{% call grid(2) %}{% call card('B') %}{{ held }}{% endcall %}{% endcall %}{% endcall %}"
    )
    assert rendered(nested).render(held="").strip() == ""
    assert rendered("{% call details('A') %}{{ table(['a'], []) }}{% endcall %}{{ tiles([]) }}").render().strip() == ""
    assert "<h3>B</h3>" in rendered(nested).render(held="x")


def test_what_pages_are_given_is_escaped():
    cells = [["<b>", Cell("<i>", note="<u>", look='"x"'), NOTHING, Markup("<code>c</code>")]]
    content = rendered("{{ table(['<th>'], rows) }}").render(rows=cells)
    assert "&lt;th&gt;" in content and '<td class="l">&lt;b&gt;</td>' in content and "<code>c</code>" in content
    assert '<span class="&#34;x&#34;">&lt;i&gt;</span><small>&lt;u&gt;</small>' in content
    assert '<td class=""><span class="none">–</span></td>' in content


def test_a_word_that_no_page_is_given_is_an_error():
    with pytest.raises(Exception, match="'recommendation' is undefined"):
        html.TEMPLATES.get_template("recommendation.html").render()
