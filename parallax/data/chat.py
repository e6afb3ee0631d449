"""Chat templates: messages to the text that a model reads, and which of it the assistant says."""

import importlib.resources
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from parallax.config.sections import NAMED_TEMPLATES
from parallax.data.special_tokens import TEMPLATE_FILE, TOKENIZER_CONFIG, token_name
from parallax.errors import DataError, check_choice, errors_as, first_line, imported, names_of, quoted
from parallax.storage.files import files_below, object_of, read_bytes
from parallax.storage.remote import AnyPath, source_path

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool")
TOKENS_OF_OLD = "special_tokens_map.json"  # of old tokenizers; newer ones repeat it in their config
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ADDITIONAL_TEMPLATES = "additional_chat_templates"  # a folder beside chat_template.jinja, with templates by their names
ANSWER_MARK = "answer_mark"  # the variable of a template that holds the mark of what the assistant says

Messages = Sequence[Mapping[str, Any]]


class Piece(NamedTuple):
    """A part of a rendered conversation. Joined, pieces are the whole text."""

    text: str
    role: str  # of the message that begins here; "" where none does
    is_answer: bool  # whether the assistant says it, with the token that ends a turn


class ChatTemplate:
    """A Jinja template of a conversation, as `transformers` has them.

    It is somebody else's text: it runs in Jinja's sandbox, where it sees messages, tools and names of special tokens,
    and cannot change them.

    Args:
        text: the template.
        origin: its file or name, for messages.
        tokens: names of special tokens, as `bos_token`.
        now: gives the date to a template that asks for it.
    Raises:
        DataError: it is not a template.

    >>> chatml = ChatTemplate.named("chatml")
    >>> chatml.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    '<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n'
    """

    def __init__(
        self, text: str, origin: str, *, tokens: Mapping[str, str] | None = None, now: Callable = datetime.now
    ):
        self.text, self.origin, self.tokens = text, origin, dict(tokens or {})
        environment = _environment(now)
        try:
            self._template = environment.from_string(text)
        except (_jinja().TemplateSyntaxError, RecursionError) as error:
            line = f" in line {error.lineno}" if hasattr(error, "lineno") else ""
            raise DataError(f"{origin} is not a chat template: {first_line(error)}{line}") from None
        self._marks_answers = environment.has_generation
        self._for_tools: ChatTemplate | None = None

    @classmethod
    def named(cls, name: str, *, tokens: Mapping[str, str] | None = None, **options: Any) -> "ChatTemplate":
        """One of `NAMED_TEMPLATES`."""
        check_choice("the chat template", name, NAMED_TEMPLATES)
        file = importlib.resources.files("parallax.data") / "templates" / f"{name}.jinja"
        return cls(file.read_text(encoding="utf-8"), f"the chat template {name}", tokens=tokens, **options)

    @classmethod
    def of_file(cls, file: Path | str, *, tokens: Mapping[str, str] | None = None, **options: Any) -> "ChatTemplate":
        """A template in a file."""
        file = source_path(file, "the chat template")
        return cls(_read(file), str(file), tokens=tokens, **options)

    @classmethod
    def of_tokenizer(cls, path: Path | str, *, name: str = "", **options: Any) -> "ChatTemplate":
        """The template of a tokenizer's folder, or of the folder of its file: chat_template.jinja, or `chat_template`
        of tokenizer_config.json. The folder additional_chat_templates, or that key, may have several by name. Without a
        name it is "default", and "tool_use" for conversations with tools.

        Raises:
            DataError: there is none, or none of that name, or a file is damaged.
        """
        folder = source_path(path, "the tokenizer")
        folder = folder if folder.is_dir() else folder.parent
        templates = templates_in(folder)
        if not templates:
            raise DataError(
                f"{folder} has no chat template, neither {TEMPLATE_FILE} nor chat_template in {TOKENIZER_CONFIG}; "
                f"name one of {', '.join(NAMED_TEMPLATES)}, or a file"
            )
        name = name or "default"
        if name not in templates:
            raise DataError(f"{folder} has no chat template {quoted(name)}; it has {names_of(templates)}")
        made = cls(*templates[name], tokens=_tokens_in(folder), **options)
        if name == "default" and "tool_use" in templates:
            made._for_tools = cls(*templates["tool_use"], tokens=made.tokens, **options)
        return made

    @staticmethod
    def tokens_of(tokenizer: Path | str) -> dict[str, str]:
        """Names of the special tokens of a tokenizer's file or folder, as `bos_token`."""
        path = source_path(tokenizer, "the tokenizer")
        return _tokens_in(path if path.is_dir() else path.parent)

    @property
    def texts(self) -> list[str]:
        """The template, and another one for conversations with tools if there is one."""
        return [self.text, *([self._for_tools.text] if self._for_tools else [])]

    def render(
        self, messages: Messages, tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> str:
        """The text of a conversation; with `add_generation_prompt`, up to where the assistant answers.

        Raises:
            DataError: the template refuses the messages.
        """
        return self._chosen(tools)._render(messages, tools, add_generation_prompt, "")

    def spans(self, messages: Messages, tools: Sequence[Any] | None = None, *, first_learned: int = 0) -> list[Piece]:
        """The text of a conversation in pieces: what the assistant says, and what stands between.

        Where the template has `{% generation %}`, that says what the assistant says. Otherwise it is what follows the
        prompt for an answer, up to the text that ends a turn. Answers before message `first_learned` are not told apart
        from what stands between.

        Raises:
            DataError: the template refuses the messages, or does not say where an answer begins or ends.

        >>> chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
        >>> [piece.text for piece in ChatTemplate.named("chatml").spans(chat) if piece.is_answer]
        ['Yes?<|im_end|>']
        """
        chosen = self._chosen(tools)
        if chosen._marks_answers:
            mark = secrets.token_hex(16)  # no message can spell it
            parts = chosen._render(messages, tools, False, mark).split(mark)
        else:
            parts = chosen._parts_by_prompts(messages, tools)
        return self._pieces(parts, [message["role"] for message in messages], first_learned)

    @cached_property
    def turn_end(self) -> str:
        """The text that ends an assistant's turn, usually a special token; "" if the template writes none."""
        content = secrets.token_hex(16)
        chat = [{"role": "user", "content": "Hi"}, {"role": ASSISTANT, "content": content}]
        words = self.render(chat).rpartition(content)[2].split()
        end = words[0] if words else ""
        eos = self.tokens.get("eos_token", "")
        return end.removesuffix(eos) or end if eos else end

    @cached_property
    def stops(self) -> tuple[str, ...]:
        """Texts at which an answer ends: the end of a turn, and the tokenizer's end of a text."""
        return tuple(dict.fromkeys(filter(None, (self.turn_end, self.tokens.get("eos_token", "")))))

    def _chosen(self, tools: Sequence[Any] | None) -> "ChatTemplate":
        return self._for_tools if self._for_tools and tools is not None else self

    def _render(self, messages: Messages, tools: Sequence[Any] | None, prompts: bool, mark: str) -> str:
        # As in `transformers`: templates know a field that is missing, and not one that is null.
        messages = [{name: value for name, value in message.items() if value is not None} for message in messages]
        about = {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": prompts,
            ANSWER_MARK: mark,
        }
        try:
            return self._template.render(**self.tokens, **about)
        except Exception as error:  # whatever the template does
            raise DataError(f"{self.origin} refuses the messages: {first_line(error)}") from None

    def _parts_by_prompts(self, messages: Messages, tools: Sequence[Any] | None) -> list[str]:
        """Texts of others and answers in turn, as prompts for each answer divide them."""
        text = self.render(messages, tools)
        answers = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
        begins = [self._prompt_end(text, messages[:place], tools) for place in answers]
        parts, last = [], 0
        for place, begin, following in zip(answers, begins, [*begins[1:], len(text)]):
            end = begin + self._answer_length(text[begin:following], messages[place], is_last=following == len(text))
            parts += [text[last:begin], text[begin:end]]
            last = end
        return [*parts, text[last:]]

    def _prompt_end(self, text: str, before: Messages, tools: Sequence[Any] | None) -> int:
        prompt = self.render(before, tools, add_generation_prompt=True)
        if not text.startswith(prompt):
            raise DataError(
                f"{self.origin} writes earlier messages in another form when more follow, so it does not say where the "
                f"answer to message {len(before)} begins; put {{% generation %}} and {{% endgeneration %}} around what "
                "the assistant says"
            )
        return len(prompt)

    def _answer_length(self, text: str, message: Mapping[str, Any], *, is_last: bool) -> int:
        """Where an answer ends in a text that begins with it, with the end of its turn."""
        content = message.get("content")
        content = content.strip() if isinstance(content, str) else ""
        start = text.find(content)
        after = start + len(content) if start >= 0 else 0
        end = text.find(self.turn_end, after) if self.turn_end else len(text) if is_last else after
        if end < 0 or (not end and not self.turn_end):
            raise DataError(
                f"{self.origin} does not say where an answer ends; put {{% generation %}} and {{% endgeneration %}} "
                "around what the assistant says"
            )
        return end + len(self.turn_end)

    def _pieces(self, parts: Sequence[str], roles: Sequence[str], first_learned: int) -> list[Piece]:
        """Pieces of parts of which every second one is an answer."""
        answers = [place for place, role in enumerate(roles) if role == ASSISTANT]
        read = sum(place < first_learned for place in answers)
        if len(parts) // 2 == len(answers):
            following = [0, *(place + 1 for place in answers)]
            begins = [roles[place] if place < len(roles) and place not in answers else "" for place in following]
        elif read:
            raise DataError(
                f"{self.origin} joins or divides answers, so it does not say where those of the completion begin"
            )
        else:  # the template joins or divides answers: a user follows each
            begins = [*["user"] * (len(parts) // 2), ""]
        said = (
            Piece(text, ASSISTANT, place // 2 >= read) if place % 2 else Piece(text, begins[place // 2], False)
            for place, text in enumerate(parts)
        )
        return [piece for piece in said if piece.text]


def check_messages(messages: object, where: str, *, needs_answer: bool = True) -> None:
    """Raise DataError, which says where it is, unless this is a conversation, in which the assistant speaks if it
    `needs_answer`."""
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where} holds {quoted(messages)}, not a list of messages")
    for number, message in enumerate(messages, start=1):
        _check_message(message, f"{where}: message {number}")
    if needs_answer and all(message["role"] != ASSISTANT for message in messages):
        raise DataError(f"{where}: no message is the assistant's, so there is nothing to learn")


def _check_message(message: object, where: str) -> None:
    if not isinstance(message, dict):
        raise DataError(f'{where} is {quoted(message)}, not an object; write {{"role": "user", "content": "text"}}')
    if "role" not in message:
        raise DataError(f"{where} has no role; use one of {', '.join(ROLES)}")
    if message["role"] not in ROLES:
        raise DataError(f"{where} has the role {quoted(message['role'])}; use one of {', '.join(ROLES)}")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise DataError(f"{where}: tool_calls is {quoted(calls)}, not a list of objects")
    content = message.get("content")
    if isinstance(content, str) and (content or message["role"] == "tool"):
        return
    if not content and calls:
        return
    is_of_texts = isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    )
    if not (content and is_of_texts):
        what = "no content" if content in (None, "", []) else f"the content {quoted(content)}"
        raise DataError(f'{where} has {what}; use a text, or a list of {{"type": "text", "text": "..."}}')


def without_tags(text: str) -> str:
    """A template without the tags of `{% generation %}`, which older libraries do not know."""
    return re.sub(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}", lambda tag: f"{{#{tag[1]} {tag[2]}#}}", text)


# ---- files


def _read(file: AnyPath) -> str:
    with errors_as(DataError, f"{file} cannot be read: ", "", UnicodeDecodeError, missing=f"{file} does not exist"):
        return read_bytes(file).decode("utf-8")


def _config(file: AnyPath) -> dict[str, Any]:
    if not file.is_file():
        return {}
    with errors_as(DataError, f"{file} cannot be read: ", "", ValueError):
        return object_of(read_bytes(file), odd_numbers=True)


def _tokens_in(folder: AnyPath) -> dict[str, str]:
    written, others = _config(folder / TOKENIZER_CONFIG), _config(folder / TOKENS_OF_OLD)
    if lost := [name for name in TOKEN_NAMES if token_name(others.get(name)) and not token_name(written.get(name))]:
        raise DataError(
            f"{folder / TOKENS_OF_OLD} names {lost[0]}={quoted(others[lost[0]])}, and {TOKENIZER_CONFIG}, which goes "
            "with a run, does not; write it there"
        )
    return {name: token for name in TOKEN_NAMES if (token := token_name(written.get(name)))}


def templates_in(folder: AnyPath) -> dict[str, tuple[str, str]]:
    """Text and origin of each template of a tokenizer, by name."""
    file, config = folder / TEMPLATE_FILE, folder / TOKENIZER_CONFIG
    if file.is_file():
        more = folder / ADDITIONAL_TEMPLATES
        others = [each for each in files_below(more) if each.suffix == ".jinja"] if more.is_dir() else []
        return {each.stem: (_read(each), str(each)) for each in others} | {"default": (_read(file), str(file))}
    written = _config(config).get("chat_template")
    if written is None:
        return {}
    listed = written if isinstance(written, list) else [{"name": "default", "template": written}]
    for each in listed:
        if not (isinstance(each, dict) and all(isinstance(each.get(key), str) for key in ("name", "template"))):
            raise DataError(f"{config} has chat_template={quoted(written)}; use a text, or a list of name and template")
    return {each["name"]: (each["template"], f"{config}, chat_template") for each in listed}


# ---- Jinja


def _jinja() -> Any:
    return imported("jinja2", "a chat template", "data")


def _environment(now: Callable) -> Any:
    """Jinja's sandbox with the tags, filters and functions that templates of `transformers` expect."""
    jinja2 = _jinja()
    sandbox = imported("jinja2.sandbox", "a chat template", "data")
    extensions = [_generation_tag(), imported("jinja2.ext", "a chat template", "data").loopcontrols]
    made = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)

    def raise_exception(message: object) -> None:
        raise jinja2.TemplateError(str(message))

    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: now().strftime(form)
    made.globals["dict"] = lambda *pairs, **values: dict(*pairs, **values)
    made.globals["namespace"] = lambda *pairs, **values: jinja2.utils.Namespace(_public(dict(*pairs, **values)))
    return made


def _public(values: dict[str, Any]) -> dict[str, Any]:
    if hidden := [name for name in values if str(name).startswith("_")]:
        raise ValueError(f"a namespace has no name {quoted(hidden[0])}")
    return values


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without the escapes of HTML that Jinja's own filter writes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _generation_tag() -> type:
    """The extension of Jinja for `{% generation %}`, which puts the mark, if there is one, around what it encloses."""
    jinja2 = _jinja()
    extension = imported("jinja2.ext", "a chat template", "data").Extension

    class Generation(extension):
        tags = frozenset({"generation"})

        def __init__(self, environment: Any):
            super().__init__(environment)
            environment.extend(has_generation=False)

        def parse(self, parser: Any) -> Any:
            self.environment.has_generation = True
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        @jinja2.pass_context
        def _marked(self, context: Any, caller: Callable) -> str:
            mark = context.get(ANSWER_MARK, "")
            return f"{mark}{caller()}{mark}"

    return Generation
