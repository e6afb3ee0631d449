"""Chats of `transformers` are rendered, tokenized, masked and learned here as there."""

import pytest
from support.chat_formats import CHAT, FORMS, write_tokenizer

from parallax.data.chat import ChatTemplate
from parallax.data.conversations import ID, LEARNED, RecordFormat, encode_marked
from parallax.data.tokenizer import load_tokenizer

EXTRA = 'needs the extra hf-tests: pip install -e ".[hf-tests]" -c constraints.txt'
torch = pytest.importorskip("torch", reason=EXTRA)
pytest.importorskip("transformers", reason=EXTRA)

from transformers import AutoTokenizer

MORE = [
    {"role": "user", "content": "A\n"},
    {"role": "assistant", "content": "  spaces  and\n\n\nlines, 日本 "},
    {"role": "user", "content": "What?"},
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": "It is"},
    {"role": "assistant", "content": "4"},
]


@pytest.mark.parametrize("name", FORMS)
def test_text_ids_and_mask_are_theirs(tmp_path, name):
    """Of a template with tags, and of the same without: their mask is of the first."""
    form = FORMS[name]
    marked = write_tokenizer(tmp_path / "marked", form, form.template)
    plain = write_tokenizer(tmp_path / "plain", form, form.published)
    theirs = AutoTokenizer.from_pretrained(marked)
    for chat in (form.chat, CHAT[1:], MORE):
        text = theirs.apply_chat_template(chat, tokenize=False)
        there = theirs.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        assert 0 < sum(there["assistant_masks"]) < len(there["input_ids"])
        for folder in (marked, plain):
            template = ChatTemplate.of_tokenizer(folder)
            document = RecordFormat("chat", ("messages",), template).document({"messages": chat}, "here")
            assert document == template.render(chat) == text
            (ids,) = encode_marked(load_tokenizer(folder), [document], special_tokens="tokens")
            assert (ids & ID).tolist() == there["input_ids"]
            assert ((ids & LEARNED) > 0).tolist() == [bool(mask) for mask in there["assistant_masks"]]
        prompt = theirs.apply_chat_template(chat[:-1], tokenize=False, add_generation_prompt=True)
        assert template.render(chat[:-1], add_generation_prompt=True) == prompt
    assert FORMS[name].text == theirs.apply_chat_template(form.chat, tokenize=False)
