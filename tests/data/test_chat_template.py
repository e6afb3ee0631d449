"""Chat templates: what they render, which of it the assistant says, and what they may not do."""

import json
from datetime import datetime

import pytest
from support.chat_formats import FORMS

from parallax.data.chat import NAMED_TEMPLATES, ChatTemplate, check_messages, without_tags
from parallax.errors import ConfigError, DataError

CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "2 + 2"},
    {"role": "assistant", "content": "4"},
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": [2]}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds <b>.", "parameters": {}}}
WITH_TOOLS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "It is 4."},
]


def answers(template, messages, tools=None, **options):
    return [piece.text for piece in template.spans(messages, tools, **options) if piece.is_answer]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "chatml",
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\n2 + 2<|im_end|>\n"
            "<|im_start|>assistant\n4<|im_end|>\n",
            ["Yes?<|im_end|>", "4<|im_end|>"],
        ),
        (
            "gemma",
            "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nYes?<end_of_turn>\n<start_of_turn>user\n"
            "2 + 2<end_of_turn>\n<start_of_turn>model\n4<end_of_turn>\n",
            ["Yes?<end_of_turn>", "4<end_of_turn>"],
        ),
        (
            "llama3",
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant"
            "<|end_header_id|>\n\nYes?<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n2 + 2<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n4<|eot_id|>",
            ["Yes?<|eot_id|>", "4<|eot_id|>"],
        ),
        (
            "zephyr",
            "<|user|>\nHi</s>\n<|assistant|>\nYes?</s>\n<|user|>\n2 + 2</s>\n<|assistant|>\n4</s>\n",
            ["Yes?</s>", "4</s>"],
        ),
    ],
)
def test_named_templates_render_and_say_what_the_assistant_says(name, text, said):
    template = ChatTemplate.named(name)
    assert name in NAMED_TEMPLATES
    assert template.render(CHAT) == text == "".join(piece.text for piece in template.spans(CHAT))
    assert answers(template, CHAT) == said
    assert answers(template, CHAT, first_learned=3) == answers(template, CHAT, first_learned=2) == said[1:]
    assert "".join(piece.text for piece in template.spans(CHAT, first_learned=3)) == text
    assert template.stops == (said[0].removeprefix("Yes?"),)
    assert template.render(CHAT) == template.render(CHAT[:3], add_generation_prompt=True) + text[text.rindex("4<") :]


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_answers_are_the_same_without_the_tags_that_say_them(name):
    template = ChatTemplate.named(name)
    assert ChatTemplate(without_tags(template.text), "alike").spans(CHAT) == template.spans(CHAT)


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_a_content_may_be_a_list_of_texts(name):
    template = ChatTemplate.named(name)
    parts = [{"type": "text", "text": "2 +"}, {"type": "text", "text": " 2"}]
    assert template.spans([*CHAT[:2], {"role": "user", "content": parts}, CHAT[3]]) == template.spans(CHAT)


@pytest.mark.parametrize("name", [name for name in NAMED_TEMPLATES if name != "chatml"])
@pytest.mark.parametrize(("messages", "tools"), [(WITH_TOOLS, None), (CHAT, [TOOL])])
def test_a_template_without_a_form_for_tools_says_so(name, messages, tools):
    with pytest.raises(DataError, match="has no form for tools; use chatml"):
        ChatTemplate.named(name).render(messages, tools)


def test_each_message_of_the_system_stands_before_the_next_of_the_user():
    template, system = ChatTemplate.named("gemma"), {"role": "system", "content": "Be brief."}
    text = template.render([system, system, *CHAT[:2], system, *CHAT[2:]])
    assert "user\nBe brief.\n\nBe brief.\n\nHi<" in text and "user\nBe brief.\n\n2 + 2<" in text
    with pytest.raises(DataError, match="no message of the user follows a system message"):
        template.render([*CHAT, system])


def test_tools_and_their_results_are_rendered():
    template = ChatTemplate.named("chatml")
    text = template.render(WITH_TOOLS, [TOOL])
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n") and "Adds <b>." in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\nIt is 4.<|im_end|>\n"
    )
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": [2]}}\n</tool_call><|im_end|>'
    assert answers(template, WITH_TOOLS, [TOOL]) == [call, "It is 4.<|im_end|>"]
    assert answers(ChatTemplate(without_tags(template.text), "alike"), WITH_TOOLS, [TOOL])[0] == call
    assert [piece.role for piece in template.spans(WITH_TOOLS)] == ["system", "assistant", "tool", "assistant", ""]


def test_an_answer_may_spell_what_ends_a_turn():
    chat = [*CHAT[:1], {"role": "assistant", "content": "write <|im_end|> there"}]
    template = ChatTemplate.named("chatml")
    for same in (template, ChatTemplate(without_tags(template.text), "alike")):
        assert answers(same, chat) == ["write <|im_end|> there<|im_end|>"]


def test_a_template_may_end_the_whole_text_with_another_token():
    text = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
    )
    template = ChatTemplate(text, "phi", tokens={"eos_token": "<|endoftext|>"})
    assert answers(template, CHAT) == ["Yes?<|end|>", "4<|end|>"]
    assert template.stops == ("<|end|>", "<|endoftext|>")


def test_a_template_that_ends_no_turn():
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    text = turns + "{% if add_generation_prompt %}assistant: {% endif %}"
    template = ChatTemplate(text, "plain")
    assert template.turn_end == "" and template.stops == ()
    assert answers(template, CHAT) == ["Yes?", "4\n"]


def test_a_template_that_changes_earlier_turns_must_say_what_answers_are():
    text = "{{ messages | length }}{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    with pytest.raises(DataError, match="counting writes earlier messages in another form .* {% generation %}"):
        ChatTemplate(text, "counting").spans(CHAT)


def tokenizer_folder(folder, **config):
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_the_template_of_a_tokenizer(tmp_path):
    with pytest.raises(DataError, match="has no chat template, .* name one of chatml, "):
        ChatTemplate.of_tokenizer(tmp_path)
    bos = {"content": "<s>", "lstrip": False}
    folder = tokenizer_folder(tmp_path, bos_token=bos, chat_template="{{ bos_token }}{{ messages[0].content }}")
    assert ChatTemplate.of_tokenizer(folder).render(CHAT) == "<s>Hi"
    assert ChatTemplate.of_tokenizer(folder / "tokenizer.json").tokens == {"bos_token": "<s>"}
    (folder / "chat_template.jinja").write_text("{{ bos_token }}")
    assert ChatTemplate.of_tokenizer(folder).render(CHAT) == "<s>"
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    with pytest.raises(DataError, match="special_tokens_map.json names eos_token='</s>', and tokenizer_config.json"):
        ChatTemplate.of_tokenizer(folder)


def test_a_tokenizer_may_have_several_templates(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    folder = tokenizer_folder(tmp_path, chat_template=named)
    template = ChatTemplate.of_tokenizer(folder)
    assert template.render(CHAT) == "plain" and template.render(CHAT, [TOOL]) == "tools"
    assert ChatTemplate.of_tokenizer(folder, name="tool_use").render(CHAT) == "tools"
    with pytest.raises(DataError, match="has no chat template 'rag'; it has default, tool_use"):
        ChatTemplate.of_tokenizer(folder, name="rag")
    (folder / "chat_template.jinja").write_text("of a file")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    template = ChatTemplate.of_tokenizer(folder)
    assert template.render(CHAT) == "of a file" and template.render(CHAT, [TOOL]) == "with tools"
    (folder / "chat_template.jinja").unlink()
    tokenizer_folder(tmp_path, chat_template=[{"name": "default"}])
    with pytest.raises(DataError, match="use a text, or a list of name and template"):
        ChatTemplate.of_tokenizer(folder)


def test_filters_and_functions_are_those_of_transformers():
    text = "{{ {'a': '<é>'} | tojson }} {{ strftime_now('%d %b %Y') }}"
    text += "{% for i in [1, 2] %}{{ i }}{% break %}{% endfor %}"
    template = ChatTemplate(text, "here", now=lambda: datetime(2024, 7, 26))
    assert template.render(CHAT) == '{"a": "<é>"} 26 Jul 20241'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{{ raise_exception('alternate!') }}", "alternate!"),
        ("{{ messages.append(1) }}", "unsafe|safely"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{{ raise_exception.__globals__.os }}", "unsafe"),
        ("{{ namespace(__class__=1) }}", "no name"),
        ("{{ range(10 ** 9) }}", "Range"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages[9].content.x }}", "no element|has no"),
    ],
)
def test_a_template_runs_no_code_and_reads_no_file(text, why):
    with pytest.raises(DataError, match=f"^mine refuses the messages: .*({why})"):
        ChatTemplate(text, "mine").render(CHAT)


def test_what_is_no_template_is_refused(tmp_path):
    with pytest.raises(DataError, match="mine is not a chat template: .* in line 2"):
        ChatTemplate("\n{% for %}", "mine")
    with pytest.raises(ConfigError, match="did you mean 'chatml'"):
        ChatTemplate.named("chatm")
    with pytest.raises(DataError, match="does not exist"):
        ChatTemplate.of_file(tmp_path / "none.jinja")


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ("Hi", "f.jsonl:3 holds 'Hi', not a list of messages"),
        ([], r"f.jsonl:3 holds \[\], not a list"),
        (["Hi"], 'f.jsonl:3: message 1 is \'Hi\', not an object; write {"role": "user"'),
        ([{"content": "Hi"}], "f.jsonl:3: message 1 has no role; use one of system, "),
        ([{"role": "human", "content": "Hi"}], "message 1 has the role 'human'; use one of system, "),
        ([{"role": 3, "content": "Hi"}], "message 1 has the role 3;"),
        ([{"role": ["user"], "content": "Hi"}], r"message 1 has the role \['user'\];"),
        ([CHAT[0], {"role": "assistant", "content": ""}], "message 2 has no content"),
        ([CHAT[0], {"role": "assistant"}], "message 2 has no content"),
        ([{"role": "user", "content": None}], "message 1 has no content"),
        ([{"role": "user", "content": 7}], "message 1 has the content 7; use a text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 1 has the content .*use a text"),
        ([CHAT[0], {"role": "assistant", "tool_calls": "add"}], "message 2: tool_calls is 'add', not a list"),
        (CHAT[:1], "no message is the assistant's, so there is nothing to learn"),
    ],
)
def test_messages_that_are_wrong_are_refused(messages, error):
    with pytest.raises(DataError, match=error):
        check_messages(messages, "f.jsonl:3")


def test_messages_that_are_right():
    check_messages(WITH_TOOLS, "f.jsonl:3")
    check_messages([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, CHAT[1]], "f.jsonl:3")


@pytest.mark.parametrize("name", FORMS)
def test_ten_published_formats_are_rendered_with_and_without_tags(name):
    form = FORMS[name]
    marked, plain = (ChatTemplate(text, name, tokens=form.tokens) for text in (form.template, form.published))
    assert plain.render(form.chat) == marked.render(form.chat) == form.text
    said = answers(marked, form.chat)
    assert said[-1] == form.answer and len(said) == 2
    assert plain.spans(form.chat) == marked.spans(form.chat)
    assert plain.stops[0] == form.answer.partition("4.")[2].strip()
    prompt = plain.render(form.chat[:-1], add_generation_prompt=True)
    assert form.text.startswith(prompt + form.answer)


def test_a_template_that_joins_answers_does_not_say_which_are_of_a_completion():
    template = ChatTemplate(
        "{% generation %}{% for message in messages %}{{ message.content }}{% endfor %}{% endgeneration %}", "mine"
    )
    assert answers(template, CHAT) == answers(template, CHAT, first_learned=1) == ["HiYes?2 + 24"]
    with pytest.raises(DataError, match="mine joins or divides answers, so it does not say where those of the comple"):
        template.spans(CHAT, first_learned=3)
