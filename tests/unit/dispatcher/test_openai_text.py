"""Texts of OpenAI's API: letters, stop sequences, chat templates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.fronts.openai import chat_templates
from dispatcher.fronts.openai.chat_templates import render
from dispatcher.fronts.openai.text import AnswerText
from dispatcher.fronts.rest.codec_process import CodecProcess
from trefoil.core.errors import InvalidInput, TrefoilError

HELLO = [{"role": "user", "content": "hi"}]


def cut(data: bytes, places: set[int]) -> list[bytes]:
    ends = sorted({*(place % (len(data) + 1) for place in places), len(data)})
    return [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def until_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """What a reader of one letter at a time keeps."""
    for end in range(len(text) + 1):
        found = [text[:end].removesuffix(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return min(found, key=len), True
    return text, False


@given(
    st.text("ab海é🌊", max_size=14),
    st.lists(st.text("ab海é", min_size=1, max_size=4), max_size=3),
    st.sets(st.integers(0, 60), max_size=12),
)
def test_a_text_is_the_same_however_it_is_cut(text, stops, places):
    made = AnswerText(stops)
    pieces = [made.add(piece) for piece in cut(text.encode(), places)]
    assert ("".join([*pieces, made.end()]), made.stopped) == until_stop(text, stops)
    assert made.add(b"more") == "" or not made.stopped


def test_a_stop_sequence_counts_where_it_ends():
    made = AnswerText(["ab"])
    assert [made.add(b"xab", may_stop=False), made.add(b"a", may_stop=False), made.stopped] == ["xab", "", False]
    assert [made.add(b"b!"), made.end(), made.stopped] == ["", "", True]


@given(st.binary(max_size=20), st.sets(st.integers(0, 60), max_size=8))
def test_bytes_that_are_no_text_never_come_as_half_a_letter(data, places):
    made = AnswerText([])
    text = "".join([*(made.add(piece) for piece in cut(data, places)), made.end()])
    assert data.decode(errors="replace").startswith(text)
    assert text.encode().decode() == text


def test_templates_are_those_of_hugging_face():
    chatml = (
        "{%- for m in messages %}\n{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}\n"
        "{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}"
    )
    assert render(chatml, HELLO, {}) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render("{{ bos_token }}{{ messages[0] | tojson }}", HELLO, {"bos_token": "<s>"}) == (
        '<s>{"role": "user", "content": "hi"}'
    )
    assert render("{% for m in messages %}{% break %}{% endfor %}x", HELLO, {}) == "x"
    with pytest.raises(InvalidInput, match="messages: the chat template refuses them: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", HELLO, {})


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in %}", "TemplateSyntaxError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ range(10 ** 9) | list }}", "OverflowError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].x.y }}", "UndefinedError"),
        ("{% include 'x' %}", "TypeError"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "processor time"),
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "characters"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_used_or_never_ends_is_refused(monkeypatch, template, words):
    monkeypatch.setattr(chat_templates, "CPU_S", 0.1)
    with pytest.raises(TrefoilError, match=f"chat_template: .*{words}") as caught:
        render(template, HELLO, {})
    assert not isinstance(caught.value, InvalidInput), "not the client's fault"
    assert render("{{ messages[0].content }}", HELLO, {}) == "hi"


async def test_a_template_that_takes_all_memory_ends_neither_the_worker_nor_other_chats():
    made = CodecProcess(2**27, 10.0)
    try:
        with pytest.raises(TrefoilError, match="memory"):
            await made.call("", render, "{{ 'x' * (2 ** 32) }}", HELLO, {})
        assert await made.call("", render, "{{ messages[0].content }}", HELLO, {}) == "hi"
    finally:
        await made.close()


async def test_a_template_that_does_not_come_back_is_cut_off(monkeypatch):
    made = CodecProcess(2**27, 0.0)
    try:
        with pytest.raises(TrefoilError, match="TimeoutError"):
            await made.call("", render, "x", HELLO, {})
    finally:
        await made.close()
