"""Ten formats of chats as published models have them, written anew: template, special tokens, and a text of each.

Templates say with `{% generation %}` what the assistant says; `without_tags` is a template that does not.
"""

import json
from typing import NamedTuple

from parallax.data.chat import without_tags
from parallax.data.tokenizer import train_bpe


class ChatForm(NamedTuple):
    """A format; `text` is that of `CHAT`, or without its system message where there are none, and `answer` its last."""

    template: str
    tokens: dict[str, str]  # as in tokenizer_config.json
    special: list[str]
    text: str
    answer: str
    has_system: bool = True

    @property
    def chat(self):
        return CHAT if self.has_system else CHAT[1:]

    @property
    def published(self):
        """The template as it is published, without tags."""
        return without_tags(self.template)


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi,  there"},
    {"role": "assistant", "content": "Yes?\n\nWhat"},
    {"role": "user", "content": "2 + 2 = é"},
    {"role": "assistant", "content": "It is 4."},
]
QWEN = """
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] }}
{%- else %}
    {{- '<|im_start|>system\\nYou are helpful.' }}
{%- endif %}
{%- if tools %}
    {{- '\\n\\n# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- generation %}
        {%- if message.content %}
            {{- message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' + tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
LLAMA_2 = """
{%- if messages[0]['role'] == 'system' %}
    {%- set loop_messages = messages[1:] %}{%- set system_message = messages[0]['content'] %}
{%- else %}
    {%- set loop_messages = messages %}{%- set system_message = false %}
{%- endif %}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if loop.index0 == 0 and system_message != false %}
        {%- set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
    {%- else %}
        {%- set content = message['content'] %}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {%- generation %}{{- ' ' + content.strip() + ' ' + eos_token }}{%- endgeneration %}
    {%- endif %}
{%- endfor %}
"""
LLAMA_3 = """
{%- set loop_messages = messages %}
{%- for message in loop_messages %}
    {%- set head = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}
    {%- if loop.index0 == 0 %}{%- set head = bos_token + head %}{%- endif %}
    {{- head }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
MISTRAL = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, conversation roles must alternate') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.last and system_message is defined %}
            {{- '[INST] ' + system_message + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + '[/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {%- generation %}{{- ' ' + message['content'] + eos_token }}{%- endgeneration %}
    {%- endif %}
{%- endfor %}
"""
GEMMA = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' }}
    {%- if role == 'model' %}
        {%- generation %}{{- message['content'] | trim + '<end_of_turn>' }}{%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message['content'] | trim + '<end_of_turn>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""
PHI_3 = """
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
        {{- '<|assistant|>\\n' }}
        {%- generation %}{{- message['content'] + '<|end|>' }}{%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- eos_token }}{%- endif %}
"""
ZEPHYR = """
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
        {{- '<|assistant|>\\n' }}
        {%- generation %}{{- message['content'] + eos_token }}{%- endgeneration %}
    {%- else %}
        {{- '<|' + message['role'] + '|>\\n' + message['content'] + eos_token }}
    {%- endif %}
    {{- '\\n' }}
    {%- if loop.last and add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
{%- endfor %}
"""
DEEPSEEK = """
{%- set ns = namespace(system_prompt='') %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{%- set ns.system_prompt = ns.system_prompt + message['content'] %}{%- endif %}
{%- endfor %}
{{- bos_token }}{{- ns.system_prompt }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '<｜User｜>' + message['content'] }}{%- endif %}
    {%- if message['role'] == 'assistant' %}
        {{- '<｜Assistant｜>' }}
        {%- generation %}{{- message['content'] + '<｜end▁of▁sentence｜>' }}{%- endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}
"""
TULU = """
{{- bos_token }}
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] + eos_token }}{%- endgeneration %}
        {%- if not loop.last %}{{- '\\n' }}{%- endif %}
    {%- else %}
        {{- message['content'] + '\\n' }}
    {%- endif %}
    {%- if loop.last and add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
{%- endfor %}
"""
COMMAND_R = """
{{- bos_token }}
{%- for message in messages %}
    {%- set content = message['content'] | trim %}
    {%- if message['role'] == 'assistant' %}
        {{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}
        {%- generation %}{{- content + '<|END_OF_TURN_TOKEN|>' }}{%- endgeneration %}
    {%- else %}
        {{- '<|START_OF_TURN_TOKEN|><|' + message['role'] | upper + '_TOKEN|>' + content + '<|END_OF_TURN_TOKEN|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{%- endif %}
"""

FORMS = {
    "qwen2.5": ChatForm(
        QWEN,
        dict(eos_token="<|im_end|>", pad_token="<|endoftext|>"),
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi,  there<|im_end|>\n<|im_start|>assistant\n"
        "Yes?\n\nWhat<|im_end|>\n<|im_start|>user\n2 + 2 = é<|im_end|>\n<|im_start|>assistant\nIt is 4.<|im_end|>\n",
        "It is 4.<|im_end|>",
    ),
    "llama-2": ChatForm(
        LLAMA_2,
        dict(bos_token="<s>", eos_token="</s>"),
        ["<s>", "</s>"],
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi,  there [/INST] Yes?\n\nWhat </s>"
        "<s>[INST] 2 + 2 = é [/INST] It is 4. </s>",
        " It is 4. </s>",
    ),
    "llama-3": ChatForm(
        LLAMA_3,
        dict(bos_token="<|begin_of_text|>", eos_token="<|eot_id|>"),
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\nHi,  there<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nYes?\n\nWhat"
        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n2 + 2 = é<|eot_id|><|start_header_id|>assistant"
        "<|end_header_id|>\n\nIt is 4.<|eot_id|>",
        "It is 4.<|eot_id|>",
    ),
    "mistral": ChatForm(
        MISTRAL,
        dict(bos_token="<s>", eos_token="</s>"),
        ["<s>", "</s>", "[INST]", "[/INST]"],
        "<s>[INST] Hi,  there[/INST] Yes?\n\nWhat</s>[INST] 2 + 2 = é[/INST] It is 4.</s>",
        " It is 4.</s>",
        has_system=False,
    ),
    "gemma": ChatForm(
        GEMMA,
        dict(bos_token="<bos>", eos_token="<eos>"),
        ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
        "<bos><start_of_turn>user\nHi,  there<end_of_turn>\n<start_of_turn>model\nYes?\n\nWhat<end_of_turn>\n"
        "<start_of_turn>user\n2 + 2 = é<end_of_turn>\n<start_of_turn>model\nIt is 4.<end_of_turn>\n",
        "It is 4.<end_of_turn>",
        has_system=False,
    ),
    "phi-3": ChatForm(
        PHI_3,
        dict(bos_token="<s>", eos_token="<|endoftext|>"),
        ["<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
        "<|system|>\nBe brief.<|end|>\n<|user|>\nHi,  there<|end|>\n<|assistant|>\nYes?\n\nWhat<|end|>\n<|user|>\n"
        "2 + 2 = é<|end|>\n<|assistant|>\nIt is 4.<|end|>\n<|endoftext|>",
        "It is 4.<|end|>",
    ),
    "zephyr": ChatForm(
        ZEPHYR,
        dict(bos_token="<s>", eos_token="</s>"),
        ["<s>", "</s>"],
        "<|system|>\nBe brief.</s>\n<|user|>\nHi,  there</s>\n<|assistant|>\nYes?\n\nWhat</s>\n<|user|>\n2 + 2 = é"
        "</s>\n<|assistant|>\nIt is 4.</s>\n",
        "It is 4.</s>",
    ),
    "deepseek": ChatForm(
        DEEPSEEK,
        dict(bos_token="<｜begin▁of▁sentence｜>", eos_token="<｜end▁of▁sentence｜>"),
        ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi,  there<｜Assistant｜>Yes?\n\nWhat<｜end▁of▁sentence｜>"
        "<｜User｜>2 + 2 = é<｜Assistant｜>It is 4.<｜end▁of▁sentence｜>",
        "It is 4.<｜end▁of▁sentence｜>",
    ),
    "tulu": ChatForm(
        TULU,
        dict(bos_token="<|endoftext|>", eos_token="<|endoftext|>"),
        ["<|endoftext|>"],
        "<|endoftext|><|system|>\nBe brief.\n<|user|>\nHi,  there\n<|assistant|>\nYes?\n\nWhat<|endoftext|>\n"
        "<|user|>\n2 + 2 = é\n<|assistant|>\nIt is 4.<|endoftext|>",
        "It is 4.<|endoftext|>",
    ),
    "command-r": ChatForm(
        COMMAND_R,
        dict(bos_token="<BOS_TOKEN>", eos_token="<|END_OF_TURN_TOKEN|>"),
        ["<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"]
        + [f"<|{role}_TOKEN|>" for role in ("USER", "CHATBOT", "SYSTEM")],
        "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>"
        "<|USER_TOKEN|>Hi,  there<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>Yes?\n\nWhat"
        "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|>2 + 2 = é<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>It is 4.<|END_OF_TURN_TOKEN|>",
        "It is 4.<|END_OF_TURN_TOKEN|>",
    ),
}
WORDS = ["Be brief. Hi, there. Yes? What is 2 + 2? It is 4.\n\n", "<|user|>\n<|assistant|>\n [INST] [/INST] system"]


def write_tokenizer(folder, form, template):
    """The files of a tokenizer with this template, as they are published."""
    import tokenizers

    inner = tokenizers.Tokenizer.from_str(train_bpe(WORDS * 9, vocab=330)._text)
    inner.add_special_tokens(form.special)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(inner.to_str(), encoding="utf-8")
    config = dict(tokenizer_class="PreTrainedTokenizerFast", chat_template=template, **form.tokens)
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
