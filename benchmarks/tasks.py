"""Results of lm-evaluation-harness for a run, beside those of its own backend for the exported model.

    pip install -e ".[lm-eval,hf-tests]" -c constraints.txt
    python benchmarks/tasks.py

A small model is trained for --steps on the text of the package and exported by `parallax.convert to-hf`. Tasks are made
of that text: which of four sentences goes on (by log-likelihood), the perplexity of a page (in windows), and the words
that come next (written greedily). Both backends read them, in float32 on the CPU, with as many texts at once. Printed
are their results, and how many of the tokens read for the sentences are of contexts that were read before.
"""

import importlib
import json
import os
import random
import sys
import tempfile
from pathlib import Path

from arguments import Arguments, run_benchmark, whole_number

from parallax.data.tokenizer import Tokenizer
from parallax.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
ROWS, SEQ = 8, 128
FORMS = {
    "sentences": "output_type: multiple_choice\ndoc_to_choice: '{{choices}}'\n"
    "metric_list: [{metric: acc}, {metric: acc_norm}, {metric: brier_score}]\n",
    "pages": "output_type: loglikelihood_rolling\nmetric_list: [{metric: byte_perplexity}, {metric: bits_per_byte}]\n",
    "words": "output_type: generate_until\n"
    "generation_kwargs: {until: ['. ', ';'], max_gen_toks: 16, do_sample: false}\n"
    "metric_list: [{metric: exact_match}, {metric: chrf}]\n",
}


def main() -> None:
    parser = Arguments(description=__doc__, smallest={"steps": 2, "questions": 3})
    parser.add_argument("--steps", type=whole_number, default=300, help="of training")
    parser.add_argument("--questions", type=whole_number, default=32, help="of each task")
    args = parser.parse_args()
    check_installed()
    with tempfile.TemporaryDirectory() as folder:
        print("\n".join(measure(Path(folder), args.steps, args.questions)))


def check_installed() -> None:
    for name in ("lm_eval", "torch", "transformers"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(f"{name} cannot be imported ({error}); pip install -e '.[lm-eval,hf-tests]'") from error


def measure(folder: Path, steps: int, questions: int) -> list[str]:
    """The lines of a table of both backends' results."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    import parallax as px
    from parallax.interop.harness import Tasks, known_tasks

    trained_and_exported(folder, steps)
    tasks, run = written_tasks(folder / "tasks", questions), px.load(folder / "run")
    of_run = run.model, run.tokenizer, run.ends
    names = ",".join(FORMS)
    ours = Tasks(*of_run, names, known_tasks(names, str(tasks)), length=SEQ, rows=ROWS)(run.params).by_task
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    model = HFLM(str(folder / "exported"), dtype="float32", device="cpu", batch_size=ROWS)
    done = simple_evaluate(model, tasks=[*FORMS], task_manager=manager, log_samples=False, bootstrap_iters=0)
    lines = ["| task | metric | Parallax | transformers |", "|---|---|---|---|"]
    for task, values in ours.items():
        for name in (name for name in values if "_stderr" not in name):
            both = f"{values[name]:.6f} | {float(done['results'][task][name]):.6f}"
            lines.append(f"| {task} | {name.partition(',')[0]} | {both} |")
    return [*lines, read_again(run.tokenizer, tasks / "sentences.jsonl")]


def read_again(tokenizer: Tokenizer, file: Path) -> str:
    """How much of what is read of multiple choices is a context that was read with another choice."""
    documents = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    again, total = 0, 0
    for document in documents:
        context, *choices = (len(tokenizer.encode(text)) for text in (document["text"], *document["choices"]))
        again += context * (len(choices) - 1)
        total += context * len(choices) + sum(choices)
    return f"of {total} tokens in {file.stem}, {again} ({again / total:.1%}) are contexts that were read before"


def trained_and_exported(folder: Path, steps: int) -> None:
    from configs.tiny_gqa import get_config
    from parallax.cli.convert import main as convert
    from parallax.training.run import train

    config = get_config()
    config.data.update({"source": "moby", "seq": SEQ, "global_batch": ROWS, "tokenizer": "bpe", "bpe_vocab": 1024})
    config.data.cache = str(folder / "cache")
    config.train.update({"steps": steps, "eval_batches": 0})
    config.optimizer.warmup_steps = min(20, steps - 1)
    config.checkpoint.keep_best, config.sample.prompt = 0, ""
    train(config, folder / "run")
    if convert(["to-hf", str(folder / "run"), str(folder / "exported")]):
        raise ConfigError("the run cannot be exported")


def written_tasks(folder: Path, questions: int) -> Path:
    """Tasks of the package's text, as descriptions and documents in a folder."""
    text = " ".join((ROOT / "parallax" / "data" / "texts" / "moby_dick.txt").read_text(encoding="utf-8").split())
    sentences = [f" {each}." for each in text.split(". ") if 40 < len(each) < 200]
    draw = random.Random(0)
    documents: dict[str, list[dict]] = {name: [] for name in FORMS}
    for place in draw.sample(range(len(sentences) - 1), questions):
        answer = draw.randrange(4)
        choices = draw.sample(sentences, 4)
        choices[answer] = sentences[place + 1]
        documents["sentences"].append({"text": sentences[place].strip(), "choices": choices, "target": answer})
        page = "".join(sentences[place : place + 6]).strip()
        documents["pages"].append({"text": "", "target": page})
        words = sentences[place].split()
        documents["words"].append({"text": " ".join(words[:6]), "target": " " + " ".join(words[6:])})
    folder.mkdir()
    for name, form in FORMS.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(document) + "\n" for document in documents[name]), encoding="utf-8")
        about = (
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {file}}}}}\ntest_split: test\n"
        )
        about += "doc_to_text: '{{text}}'\ndoc_to_target: '{{target}}'\n"
        (folder / f"{name}.yaml").write_text(about + form, encoding="utf-8")
    return folder


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    run_benchmark(main)
