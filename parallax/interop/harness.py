"""A trained run as a model of lm-evaluation-harness, the package `lm_eval` (extra: lm-eval)."""

import functools
import importlib.util
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parallax.data.tokenizer import Tokenizer, with_begin
from parallax.display.tables import text_table
from parallax.errors import ConfigError, DataError, first_line, how_to_install, nearest, quoted
from parallax.inference.score import Continuation, Scorer, greedy_until
from parallax.pipeline import ShardedModel
from parallax.processes.job import broadcast, prepare_once
from parallax.storage.run_files import TASK_RESULT

MOST_NEW_TOKENS = 256  # of a text, unless its task says otherwise; as the harness's own backend
TASK_FILE = "*.yaml"


class TaskResults(NamedTuple):
    """Results by task, each by the names of its metric and filter, as "acc,none"."""

    by_task: dict[str, dict[str, float]]

    @property
    def by_metric(self) -> dict[str, float]:
        """The results as metrics.jsonl has them: "tasks/NAME/acc"."""
        return {
            f"{TASK_RESULT}{task}/{name.removesuffix(',none')}": value
            for task, values in self.by_task.items()
            for name, value in values.items()
        }

    def __str__(self) -> str:
        rows = [
            [task, name.removesuffix(",none"), f"{value:.4f}"]
            for task, values in self.by_task.items()
            for name, value in values.items()
        ]
        return "\n".join(text_table(["task", "metric", "value"], rows, left=2))


class Tasks:
    """Tasks of the harness for a model: called with its parameters.

    Args:
        ends: ids at which a text ends.
        names: of tasks, with commas between them.
        manager: of `known_tasks`, which knows them.
        limit: number of documents of each task; 0 is all.
        length: most tokens of a text; of longer ones the end is read, as by the harness's own backend.
        rows: texts at once.
    """

    def __init__(
        self,
        model: ShardedModel,
        tokenizer: Tokenizer,
        ends: Sequence[int],
        names: str,
        manager: Any,
        *,
        limit: int = 0,
        length: int,
        rows: int = 8,
    ):
        self.names, self.limit, self._manager = _listed(names), limit, manager
        prepare_once(self._load, "the documents of tasks")
        self._judged = harness_model(model, None, tokenizer, ends, length=length, rows=rows)

    def _load(self) -> None:
        """Read the documents of all tasks, so that what is missing is said now, and what is fetched is there later."""
        try:
            self._manager.load(self.names)
        except Exception as error:  # whatever reads them
            raise DataError(f"tasks {', '.join(self.names)} cannot be read: {first_line(error)}") from error

    def __call__(self, params: Any) -> TaskResults:
        """The results with these parameters. All processes of a job compute them together, and have those of the first
        one. Raises DataError if a task asks for what is not computed here."""
        from lm_eval import simple_evaluate

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        self._judged.params = params
        options = dict(limit=self.limit or None, log_samples=False, bootstrap_iters=0)
        done = simple_evaluate(self._judged, tasks=self.names, task_manager=self._manager, **options)
        # The harness returns nothing where a launcher's LOCAL_RANK is not 0.
        results = {task: _numbers(values) for task, values in done["results"].items()} if done else {}
        return TaskResults(json.loads(broadcast("the results of tasks", json.dumps(results))))


def known_tasks(names: str, folder: str) -> Any:
    """The harness's manager of its tasks, or of those described in a folder, which has these. Descriptions may name
    code, which is then run.

    Raises:
        ConfigError: `lm_eval` is not installed, or there is no such task.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(f"tasks need the package lm_eval, which is not installed: {how_to_install('lm-eval')}")
    manager = _task_manager(folder)
    for name in _listed(names):
        if name not in manager.all_tasks:
            raise ConfigError(f"there is no task {quoted(name)}; {nearest(name, manager.all_tasks)}")
    return manager


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",")]


def _task_manager(folder: str) -> Any:
    from lm_eval.tasks import TaskManager

    if not folder:
        return TaskManager()
    path = Path(folder).expanduser()
    if not any(path.rglob(TASK_FILE)):
        raise ConfigError(
            f"the folder of tasks {quoted(folder)} has no {TASK_FILE}; name one with descriptions of tasks"
        )
    return TaskManager(include_path=str(path), include_defaults=False)


def harness_model(
    model: ShardedModel, params: Any, tokenizer: Tokenizer, ends: Sequence[int], *, length: int, rows: int = 8
) -> Any:
    """A model of the harness for one of ours, as its `simple_evaluate` takes it; for the arguments see
    `Tasks`."""
    return _model_class()(model, params, tokenizer, ends, length=length, rows=rows)


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    known = {name: value for name, value in values.items() if "," in name}
    return {name: float(value) for name, value in known.items() if isinstance(value, int | float | np.number)}


@functools.cache
def _model_class() -> type:
    """The class of `harness_model`, which is known to the harness as "parallax"."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    @register_model("parallax")
    class ParallaxModel(TemplateLM):
        """Texts are tokenized as the harness's own backend does: special tokens that they spell are tokens."""

        def __init__(
            self, model: ShardedModel, params: Any, tokenizer: Tokenizer, ends: Sequence[int], *, length: int, rows: int
        ):
            super().__init__()
            self.model, self.params, self.ids, self.ends = model, params, tokenizer, ends
            self.max_length, self.scorer = length, Scorer(model, rows=rows)

        @property
        def eot_token_id(self) -> int:
            return self.ids.end

        @property
        def prefix_token_id(self) -> int:
            return self.ids.begin[0] if len(self.ids.begin) else self.ids.end

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            ids = self.ids.encode(string, special_tokens="tokens")
            return (ids if add_special_tokens is False else with_begin(self.ids, ids)).tolist()

        def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            chosen = [self._cut(context, ids) for _, context, ids in requests]
            return [tuple(score) for score in self.scorer(self.params, chosen)]

        def _cut(self, context: Sequence[int], ids: Sequence[int]) -> Continuation:
            """The last tokens before a continuation, as many as there is room for."""
            if len(ids) > self.max_length:
                raise DataError(f"a continuation has {len(ids)} tokens, and a text at most {self.max_length}")
            return Continuation(context[-(self.max_length + 1 - len(ids)) :], ids)

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            lengths, windows = [], []
            for (text,) in (request.args for request in requests):
                ids = self.tok_encode(text, add_special_tokens=False)
                of_text = get_rolling_token_windows(
                    token_list=ids, prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1
                )
                mine = [Continuation(*make_disjoint_window(window)) for window in of_text]
                lengths, windows = [*lengths, len(mine)], [*windows, *mine]
            scores = iter(self.scorer(self.params, windows))
            return [sum(next(scores).log_likelihood for _ in range(length)) for length in lengths]

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            texts: dict[int, str] = {}
            for form in {repr(request.args[1]): request.args[1] for request in requests}.values():
                numbers = [number for number, request in enumerate(requests) if request.args[1] == form]
                texts |= zip(numbers, self._generated([requests[number].args[0] for number in numbers], form))
            return [texts[number] for number in range(len(requests))]

        def _generated(self, contexts: Sequence[str], form: dict[str, Any]) -> list[str]:
            form = normalize_gen_kwargs(form, MOST_NEW_TOKENS)
            if form.get("do_sample"):
                raise DataError(f"a task asks for samples, {form}, and only the most likely text is written here")
            stop, tokens = handle_stop_sequences(form.get("until"), eos=None), form["max_gen_toks"]
            room = self.max_length - tokens
            if room < 1:
                raise DataError(f"a task asks for {tokens} new tokens, and a text has at most {self.max_length}")
            prompts = [self.tok_encode(context)[-room:] or [self.prefix_token_id] for context in contexts]
            given = dict(tokens=tokens, ends=self.ends, stop=[text for text in stop if text], rows=self.scorer.rows)
            return greedy_until(self.model, self.params, self.ids, prompts, **given)

    return ParallaxModel
