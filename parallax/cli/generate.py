"""Generate text with a trained model.

    python -m parallax.generate --workdir=runs/mine --prompt="def "
    python -m parallax.generate --workdir=runs/mine --prompt="def " --prompt="class " --stop=return --config.mesh.tp=2
    python -m parallax.generate --workdir=runs/mine --chat --system="Answer briefly."
    python -m parallax.generate --workdir=runs/mine --prompts=questions.jsonl --out=answers.jsonl

A text ends where the model says, or before a text of --stop. Texts go to stdout, those of several prompts below a line
with their number, and everything else to stderr. Missing values, also of the mesh, are those of the run's config.json;
flags as --config.mesh.tp=2 change them.

--chat holds a conversation on the terminal, with the tokenizer's chat template or that of --template: /reset begins it
anew, /exit or Ctrl-D ends it. A file of --prompts has a text in each line, or if its name ends in .jsonl
{"prompt": "text"} or {"messages": [...]}; each line of --out, by default of stdout, has one of them with what was
generated, in the order of the file.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from parallax.display.progress import loading, waiting

with loading(__name__, sys.stderr):
    from parallax.checkpoint.steps import complete_steps
    from parallax.cli.arguments import Parser, local_path, run_path, source_of, write_output
    from parallax.cli.command import Flag, read_line_of_run, run_quietly, unknown_flag, written_mesh
    from parallax.config.sections import MeshConfig, SampleConfig
    from parallax.config.settings import OF_A_MODEL, Settings, load_settings, read_settings
    from parallax.errors import ConfigError, DataError, errors_as, nearest, printable, tell
    from parallax.inference.chat import ContextIsFull, Conversation, template_beside
    from parallax.inference.generate import complete, encode, stays_text
    from parallax.inference.prompts import complete_prompts, read_prompts, with_completion
    from parallax.inference.run import MESH_KEYS, Run, load_trained, mesh_config, sizes_of, tokenizer_file
    from parallax.storage.files import try_appending

OF_OTHER_FORMS = ("--chat", "--system", "--template", "--prompts", "--out", "--rows")
ROWS_OF_A_BATCH = 32  # of a batch from a file
# Flags from keys of the config's sections.
SAMPLE_FIELDS = [field for field in dataclasses.fields(SampleConfig) if field.name != "prompt"]
MESH_FIELDS = [field for field in dataclasses.fields(MeshConfig) if field.name in MESH_KEYS]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the text; returns the exit status. User errors are one line on stderr."""
    return run_quietly(lambda: _act(parse(arguments)))


def _act(flags: argparse.Namespace) -> None:
    if flags.chat:
        chat(flags)
    elif flags.prompts:
        complete_file(flags)
    else:
        show(run(flags))


def show(texts: Sequence[str]) -> None:
    """Print the generated texts; on a terminal, with unprintable characters escaped."""
    for number, text in enumerate(texts, 1):
        if len(texts) > 1:
            print(f"==> {number} of {len(texts)} <==")
        print(printable(text) if sys.stdout is not None and sys.stdout.isatty() else text)


def run(flags: argparse.Namespace) -> list[str]:
    """Each prompt and the text that the run's model generates after it; the speed goes to stderr."""
    settings, axes = settings_of(flags)
    prompts = flags.prompt or [settings.sample.prompt] * bool(settings.sample.prompt)
    if not prompts:
        raise ConfigError('there is no prompt; write --prompt "TEXT", once for each text to generate')
    for text in flags.stop:
        if not text:
            raise ConfigError("--stop='' holds no text; leave it out, or write at least one character")
    trained, sample = _load(flags, settings, axes)
    name = "--prompt" if flags.prompt else "sample.prompt"
    special = sample.special_tokens
    ids = [encode(trained.tokenizer, prompt, special_tokens=special, name=name) for prompt in prompts]
    _say_loaded(flags, trained)
    length, seq = max(map(len, ids)) + sample.tokens, settings.data.longest_seq
    if length > seq:
        _say(f"note: {length} tokens are more than the {seq} of the windows in training (data.seq)")
    if spelled := stays_text(trained.tokenizer, prompts, sample.special_tokens):
        _say(f"note: {spelled}")
    start = time.perf_counter()
    with waiting(f"compiling, and writing up to {sample.tokens} tokens"):
        ends = {"ends": trained.ends, "stop": flags.stop}
        texts = complete(trained.model, trained.params, trained.tokenizer, ids, sample, **ends)
    secs, tokens = time.perf_counter() - start, len(ids) * sample.tokens
    _say(f"up to {tokens} tokens in {secs:.1f} s, {tokens / secs:.1f} tokens/s, compilation included")
    return texts


def _load(flags: argparse.Namespace, settings: Settings, axes: dict[str, int]) -> tuple[Run, SampleConfig]:
    sample = dataclasses.replace(settings.sample, **_given(flags, SAMPLE_FIELDS))
    mesh = mesh_config(settings.mesh, {**axes, **_given(flags, MESH_FIELDS)})
    choose = ", ".join(f"--config.mesh.{key}" for key in MESH_KEYS)
    trained = load_trained(flags.workdir, settings, mesh, flags.step, choose)
    return trained, sample


def _say_loaded(flags: argparse.Namespace, trained: Run) -> None:
    _say(f"step {trained.step} of {flags.workdir} on {sizes_of(trained.model)}")


def chat(flags: argparse.Namespace) -> None:
    """Hold a conversation: messages from stdin, answers to stdout."""
    settings, axes = settings_of(flags)
    system = [{"role": "system", "content": flags.system}] * bool(flags.system)
    _check_template(flags, [[*system, {"role": "user", "content": "It is"}]])
    trained, sample = _load(flags, settings, axes)
    template, context = template_beside(trained.tokenizer_file, flags.template), settings.data.longest_seq
    _say_loaded(flags, trained)
    conversation = Conversation(trained, template, sample, context, flags.system, flags.stop)
    _say(f"{template.origin}; {context} tokens of context; /reset begins anew, /exit or Ctrl-D ends")
    for message in _messages():
        if message == "/reset":
            conversation.reset()
        elif message:
            _answer(conversation, message)


def _check_template(flags: argparse.Namespace, conversations: Sequence[Sequence[dict]]) -> None:
    """Raise DataError if the template refuses messages, before a model is loaded: that of every step which may be."""
    steps = sorted(complete_steps(flags.workdir / "checkpoints"), reverse=True)
    refusals = []
    for step in steps if flags.step is None else {flags.step} & {*steps}:
        try:
            template = template_beside(tokenizer_file(flags.workdir, step), flags.template)
            for messages in conversations:
                template.render(messages, add_generation_prompt=True)
            return
        except DataError as error:  # of a damaged step, too, and one before it is loaded then
            refusals.append(error)
    if refusals:
        raise refusals[0]


def _messages() -> Iterator[str]:
    """Lines of stdin, up to /exit or its end."""
    if sys.stdin is None:
        return
    with errors_as(DataError, "stdin cannot be read: ", "", UnicodeDecodeError), contextlib.suppress(EOFError):
        while (message := input("> " if sys.stdin.isatty() and sys.stdout.isatty() else "").strip()) != "/exit":
            yield message


def _answer(conversation: Conversation, message: str) -> None:
    """Print an answer as it comes; Ctrl-C ends it."""
    is_terminal = sys.stdout.isatty()
    try:
        for piece in conversation.answer(message):
            print(printable(piece) if is_terminal else piece, end="", flush=True)
    except ContextIsFull as error:
        _say(f"{error}; /reset begins anew")
    except (ConfigError, DataError) as error:
        _say(str(error))
    except KeyboardInterrupt:
        _say("\nthe answer is forgotten, and what it answers")
    print(flush=True)


def complete_file(flags: argparse.Namespace) -> None:
    """Write each prompt of a file with what is generated after it, as JSON lines."""
    prompts = read_prompts(flags.prompts)
    if flags.template and not any("messages" in prompt for prompt in prompts):
        raise ConfigError(f"--template={flags.template} is for messages, and {flags.prompts} has none; leave it out")
    rows = ROWS_OF_A_BATCH if flags.rows is None else flags.rows
    if rows < 1:
        raise ConfigError(f"--rows={flags.rows} must be 1 or more")
    if flags.out is not None:  # what cannot be written is said at once
        with errors_as(ConfigError, f"--out={flags.out} cannot be written: "):
            try_appending(flags.out)
    settings, axes = settings_of(flags)
    if asked := [prompt["messages"] for prompt in prompts if "messages" in prompt]:
        _check_template(flags, asked)
    trained, sample = _load(flags, settings, axes)
    _say_loaded(flags, trained)
    texts, tokens, start = [""] * len(prompts), 0, time.perf_counter()
    rest = dict(rows=rows, template=lambda: template_beside(trained.tokenizer_file, flags.template), stop=flags.stop)
    with waiting(f"generating from {len(prompts)} prompts") as show_progress:
        for done, completion in enumerate(complete_prompts(trained, prompts, sample, **rest), 1):
            texts[completion.number] = completion.text
            tokens += completion.tokens
            show_progress(done, len(prompts))
    secs = time.perf_counter() - start
    lines = "".join(json.dumps(with_completion(*pair), ensure_ascii=False) + "\n" for pair in zip(prompts, texts))
    if flags.out is None:
        print(lines, end="")
    else:
        write_output("out", flags.out, lines)
    _say(f"{tokens} tokens in {secs:.1f} s, {tokens / secs:.1f} tokens/s, compilation included")


def settings_of(flags: argparse.Namespace) -> tuple[Settings, dict[str, int]]:
    """The run's settings with the keys that --config flags change, and those of them that are of the mesh."""
    if not flags.config:
        return load_settings(flags.workdir), {}
    argv = [__name__, f"--workdir={flags.workdir}", *flags.config]
    line = read_line_of_run(argv, {"workdir": Flag("the folder of the run")}, OF_A_MODEL)
    settings = read_settings(line.config)
    return settings, written_mesh(argv, settings.mesh)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse flags; missing ones are None. ConfigError suggests the nearest name for an unknown flag."""
    parser = Parser("python -m parallax.generate", description=__doc__)
    parser.add_argument("--workdir", type=run_path, required=True, help="the folder of the run")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the newest")
    prompt = "text to go on from; several give as many texts; default: the run's sample.prompt"
    parser.add_argument("--prompt", action="append", default=[], help=prompt)
    parser.add_argument("--chat", action="store_true", help="hold a conversation on the terminal")
    parser.add_argument("--system", default="", help="with --chat: the system's message")
    templates = "of messages: chatml, gemma, llama3, zephyr, or a file; default: the tokenizer's own"
    parser.add_argument("--template", default="", help=templates)
    parser.add_argument("--prompts", type=source_of, help="file of prompts: a text in each line, or .jsonl")
    parser.add_argument("--out", type=local_path, help="with --prompts: file for the results; default: stdout")
    parser.add_argument(
        "--rows", type=int, help=f"with --prompts: how many are generated from together; default: {ROWS_OF_A_BATCH}"
    )
    stop = "text before which generation ends, besides the model's own ends; may be given several times"
    parser.add_argument("--stop", action="append", default=[], help=stop)
    for origin, keys in (("the run's sample.{}", SAMPLE_FIELDS), ("as in training", MESH_FIELDS)):
        for key in keys:
            meaning = f"{key.metadata['key'].meaning}; default: {origin.format(key.name)}"
            parser.add_argument(_flag(key), type=key.type, help=meaning)
    flags, unknown = parser.parse_known_args(arguments)
    if unknown and not unknown[0].startswith("--config."):
        name = unknown[0].partition("=")[0]
        if name.startswith("-") and "." in name:
            raise ConfigError(unknown_flag(name.lstrip("-"), ()))
        known = [
            "--workdir",
            "--step",
            "--prompt",
            "--stop",
            *OF_OTHER_FORMS,
            *map(_flag, SAMPLE_FIELDS),
            *map(_flag, MESH_FIELDS),
        ]
        raise ConfigError(f"unknown argument {unknown[0]!r}; {nearest(name, known)}")
    flags.config = unknown
    _check_together(flags)
    return flags


def _check_together(flags: argparse.Namespace) -> None:
    """Raise ConfigError for flags that would be ignored."""
    forms = {"--chat": flags.chat, "--prompts": flags.prompts, "--prompt": flags.prompt}
    chosen = [name for name, given in forms.items() if given]
    if len(chosen) > 1:
        raise ConfigError(f"{chosen[0]} and {chosen[1]} are two ways to generate; leave one out")
    needs = {
        "--system": ("--chat",),
        "--out": ("--prompts",),
        "--template": ("--chat", "--prompts"),
        "--rows": ("--prompts",),
    }
    for name, forms in needs.items():
        if getattr(flags, name.strip("-")) not in ("", None) and not {*forms} & {*chosen}:
            raise ConfigError(f"{name} needs {' or '.join(forms)}")


def _say(text: str) -> None:
    tell(text, sys.stderr)


def _flag(key: dataclasses.Field) -> str:
    return f"--{key.name}".replace("_", "-")


def _given(flags: argparse.Namespace, keys: Sequence[dataclasses.Field]) -> dict[str, Any]:
    return {key.name: getattr(flags, key.name) for key in keys if getattr(flags, key.name) is not None}


if __name__ == "__main__":
    sys.exit(main())
