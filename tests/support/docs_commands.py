"""The commands of the documentation: where they stand, what stands for those that take long, and which are not run.

A command stands in a block fenced as bash, or behind `    $ ` in a block that shows what it prints.
"""

import pathlib
import re
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *ROOT.glob("docs/**/*.md")]
)
EXTEND = ROOT / "docs" / "extend.md"  # makes changes: its blocks run in a copy of the repository
FENCED = re.compile(r"^```(\S*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.M | re.S)


INLINE = re.compile(r"`((?:python|make|pip) [^`]+)`")


class Block(NamedTuple):
    language: str
    title: str | None
    text: str


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [Block(language, title or None, body) for language, title, body in FENCED.findall(text)]


def without_fences(text: str) -> str:
    return FENCED.sub("", text)


def commands(page: pathlib.Path) -> list[str]:
    """The commands of a page, in order, comments and line ends left out."""
    text = page.read_text()
    found = [(m.start(3), m[3]) for m in FENCED.finditer(text) if m[1] == "bash"]
    found += [(m.start(), m[1]) for m in re.finditer(r"(?m)^    \$ ((?:.*\\\n)*.*)$", text)]
    lines = [line for _, body in sorted(found) for line in re.sub(r"\\\n\s*", "", body).splitlines()]
    return [line for line in (re.sub(r"(^|\s+)# .*$", "", line).strip() for line in lines) if line]


def named_in_text(page: pathlib.Path) -> list[str]:
    """The commands in a page's sentences and tables, which need not be whole: those that end in … are begun alone."""
    return [" ".join(command.split()) for command in INLINE.findall(without_fences(page.read_text()))]


TINY = (
    "--config.train.steps=2 --config.train.eval_batches=1 --config.model.layers=2 --config.model.d_model=16 "
    "--config.model.d_ff=32 --config.model.heads=4 --config.model.d_head=8 --config.data.seq=32 "
    "--config.sample.tokens=4 --config.optimizer.warmup_steps=1 --config.optimizer.name=adamw"
)
BYTES = "--config.data.source=moby --config.data.tokenizer=bytes"
FIRST = f"python train.py --config=configs/quickstart.py {TINY} {BYTES}"
RUN = "python train.py --config=configs/tiny_gqa.py"
RECIPE = "python train.py --config=configs/text_to_chat.py --workdir=runs"
RECIPE_CHATS = "--config.data.source=jsonl --config.data.path=conversations.jsonl --config.data.format=chat"
TUNED = f"--config.train.init_from=runs/text {RECIPE_CHATS} --config.data.chat_template=chatml"
RATE = "--config.optimizer.learning_rate=2e-3"
DP_512 = " --config.mesh.dp=512 --config.mesh.cp=1 --config.pipeline.microbatches=2"
RECIPE_X8 = "python train.py --config=configs/text_to_chat_x8.py --workdir=runs"
MEANWHILE = "python -m parallax.launch --processes 3 --devices-per-process 1 -- benchmarks/checkpoints.py --meanwhile"

# What takes more than seconds, and what is run in its place: the same program and flags, with less to do.
CHEAPER = {
    "python train.py --config=configs/quickstart.py --config.mesh.pp=1 --config.mesh.dp=-1 --config.mesh.tp=4": (
        f"{FIRST} --config.mesh.pp=1 --config.mesh.dp=-1 --config.mesh.tp=4"
    ),
    "python train.py --config=configs/quickstart.py": FIRST,
    "python train.py --config=configs/quickstart.py --workdir=runs/first": (
        f"{FIRST} --config.model.layers=4 --workdir=runs/first"
    ),
    "python train.py --workdir=runs/first --config.train.steps=400 --config.mesh.tp=4 --config.mesh.pp=1": (
        "python train.py --workdir=runs/first --config.train.steps=4 --config.mesh.tp=4 --config.mesh.pp=1"
    ),
    'python -m parallax.generate --workdir=runs/first --prompt="def "': (
        'python -m parallax.generate --workdir=runs/first --prompt="def " --tokens=4'
    ),
    "python -m parallax.generate --workdir=runs/first --chat --template=chatml": (
        "echo Hello | python -m parallax.generate --workdir=runs/first --chat --template=chatml --tokens=4"
    ),
    "python -m parallax.generate --workdir=runs/first --prompts=questions.jsonl --out=answers.jsonl": (
        "python -m parallax.generate --workdir=runs/first --prompts=questions.jsonl --out=answers.jsonl --rows=2"
    ),
    f"{RUN} --config.model.layers=8 --config.optimizer.learning_rate=1e-3": (
        f"{RUN} --config.mesh.simulate=1 {TINY} --config.model.layers=8 --config.optimizer.learning_rate=1e-3"
    ),
    "python train.py --config=configs/quickstart.py --config.data.source=text --config.data.path='corpus/**/*.txt'": (
        f"{FIRST} --config.data.source=text --config.data.path='corpus/**/*.txt'"
    ),
    "python train.py --config=configs/quickstart.py --config.data.source=prepared --config.data.path=prepared": (
        f"python train.py --config=configs/quickstart.py {TINY} --config.data.source=prepared "
        "--config.data.path=prepared"
    ),
    **{
        f"{RUN} {mesh}": f"{RUN} {TINY} {mesh}"
        for mesh in (
            "--config.mesh.simulate=1",
            "--config.mesh.simulate=8",
            "--config.mesh.simulate=4 --config.mesh.dp=1 --config.mesh.tp=4",
            "--config.mesh.simulate=4 --config.mesh.pp=2 --config.pipeline.microbatches=4",
        )
    },
    "python train.py --config=configs/quickstart.py --config.mesh.pp=4 --config.mesh.dp=-1 --config.mesh.tp=1 "
    "--config.pipeline.schedule=one_f_one_b --config.pipeline.microbatches=8": (
        f"{FIRST} --config.model.layers=4 --config.mesh.pp=4 --config.mesh.dp=-1 --config.mesh.tp=1 "
        "--config.pipeline.schedule=one_f_one_b --config.pipeline.microbatches=8"
    ),
    "python train.py --config=runs/theirs/config.json --workdir=runs/tuned --config.train.init_from=runs/theirs "
    '--config.data.source=text --config.data.path="corpus/*.txt" --config.data.seq=1024': (
        "python train.py --config=runs/theirs/config.json --workdir=runs/tuned --config.train.init_from=runs/theirs "
        '--config.data.source=text --config.data.path="corpus/*.txt" --config.data.seq=16 '
        "--config.mesh.simulate=1 --config.train.steps=2 --config.train.eval_batches=1 "
        "--config.optimizer.warmup_steps=1"
    ),
    (
        of_chats := "python train.py --config=runs/theirs/config.json --workdir=runs/tuned "
        "--config.train.init_from=runs/theirs --config.data.source=jsonl --config.data.path=chats.jsonl "
        "--config.data.format=chat --config.data.chat_template=chatml --config.data.seq=256"
    ): f"{of_chats} --config.mesh.simulate=1 --config.train.steps=2 --config.train.eval_batches=1 "
    "--config.optimizer.warmup_steps=1",
    f"{RECIPE}/text": f"{RECIPE}/text {TINY} --config.data.seq=128",
    f"{RECIPE}/chat {TUNED} {RATE} --config.train.steps=600": (
        f"{RECIPE}/chat {TUNED} {RATE} {TINY} --config.data.seq=128"
    ),
    "python -m parallax.generate --workdir=runs/chat --chat": (
        "echo Hello | python -m parallax.generate --workdir=runs/chat --chat --tokens=4"
    ),
    f"{MEANWHILE} --steps 60 --every 20 --arrays 4": f"{MEANWHILE} --smoke",
    "python -m parallax.watch runs/first": "python -m parallax.watch runs/first --once",  # else it shows on
    "python train.py --config=configs/quickstart.py --workdir=runs/first --config.train.profile_steps=50:52": (
        f"{FIRST} --workdir=runs/first --config.train.steps=4 --config.train.profile_steps=3:4"
    ),
    "python train.py --config=runs/first/config.json --workdir=runs/lower "
    "--config.train.continue_from=runs/first/checkpoints/120 --config.optimizer.learning_rate=3e-3": (
        "python train.py --config=runs/first/config.json --workdir=runs/lower "
        "--config.train.continue_from=runs/first/checkpoints/2 --config.optimizer.learning_rate=3e-3"
    ),
    "python -m parallax.launch --processes 2 --devices-per-process 4 -- train.py --config=configs/quickstart.py": (
        "python -m parallax.launch --processes 2 --devices-per-process 4 -- "
        f"{FIRST.removeprefix('python ')} --workdir=runs/two"
    ),
    **{
        f"python -m parallax.plan --config=configs/{words}": (
            f"python -m parallax.plan --config=configs/{words} --analytic"
        )
        for words in (
            "llama_1b_16.py --topology=v5e:4x4",
            "llama2_7b_64.py --topology=v5p:4x4x4",
            "gpu_80gb_x8.py --topology=H100:1x8",
        )
    },
}

NETWORK = "needs the network"
POD = "needs a pod, or a scheduler"
SETUP = "makes an environment, or does in it what other commands here do"
CORPORA = "reads a corpus that is not here"
LONG = "measures or compares for minutes, or compiles a model of billions of parameters"
# Not run, and why. Programs of the project read these lines, and stop where they have; the rest is parsed by bash.
PARSED = {
    "git clone $REPOSITORY parallax": NETWORK,
    "cd parallax": NETWORK,
    "python3 -m venv .venv": SETUP,
    ". .venv/bin/activate": SETUP,
    'pip install -e ".[tests]" -c constraints.txt': NETWORK,
    'pip install -e ".[data,tpu]" -c constraints.txt': NETWORK,
    'pip install -e ".[data,gpu]" -c constraints.txt': NETWORK,
    'pip install -e ".[hf-tests]" -c constraints.txt': NETWORK,
    'python -m parallax.data prepare --source dataset --path "allenai/c4?config=en&revision=1588ec4" --tokenizer bpe '
    "--out c4": NETWORK,
    "python train.py --config=configs/quickstart.py --config.data.source=jsonl --config.data.path=web "
    """--config.data.where='score >= 0.5 and lang in ["de", "en"] and meta.year > 2019'""": CORPORA,
    "python train.py --config=configs/quickstart.py --workdir=runs/mine --config.train.steps=2000 "
    """--config.data.mixture="old=(source='stdlib') new=(path='web', weight=0)" """
    '--config.data.phases="next=(from_step=1001, old=0, new=1)"': CORPORA,
    'pip install -e ".[lm-eval]" -c constraints.txt': NETWORK,
    'pip install -e ".[lm-eval,hf-tests]" -c constraints.txt': NETWORK,
    'python -m pytest -m "slow or not slow" tests/interop/test_hf_chat.py': LONG,
    "python benchmarks/tasks.py": LONG,
    "python benchmarks/hf_table.py --write": LONG,
    "pip install -e '.[tpu]'": NETWORK,
    "pip install -e '.[gpu-compiler]' -c constraints.txt": NETWORK,
    "python -m parallax.plan --config=configs/gpu_80gb_x8.py --topology=H100:1x8 --sweep": LONG,
    "python -m parallax.plan --config=configs/gpu_80gb_x8.py --topology=H100:1x8 --sweep --keep=3": LONG,
    "python -m parallax.plan --config=configs/gpu_80gb_16x8.py --topology=H100:16x8 --sweep --keep=3": LONG,
    "python -m parallax.report --config=configs/gpu_80gb_x8.py --topology=H100:1x8": LONG,
    "python -m parallax.plan --config=configs/llama_1b_16.py --topology=v5e:4x4 --config.model.layers=4 "
    "--config.model.vocab=4096 --config.pipeline.remat=layer --config.fsdp.bucket=layer": LONG,
    "python -m pytest": SETUP,
    "make setup": SETUP,
    "make train": SETUP,
    'make train ARGS="--config.train.steps=50"': SETUP,
    "make test": SETUP,
    "make lint": SETUP,
    "gcloud compute tpus tpu-vm create pod --zone=$ZONE --accelerator-type=v5litepod-16 "
    "--version=v2-alpha-tpuv5-lite": POD,
    "gcloud compute tpus tpu-vm ssh pod --zone=$ZONE --worker=all "
    '--command="git clone $REPOSITORY parallax && cd parallax && make setup && '
    ".venv/bin/pip install -e '.[data,tpu]' -c constraints.txt\"": POD,
    "WORKDIR=/shared/runs/first bash launch/tpu_vm.sh pod $ZONE": POD,
    "RUN_NAME=first sbatch launch/slurm.sh --config.data.path=FILES --config.data.tokenizer=FILE.json": POD,
    "CONFIG=configs/gpu_24gb.py RUN_NAME=first sbatch --gpus-per-node=1 --cpus-per-task=8 launch/slurm.sh "
    "--config.data.path=FILES --config.data.tokenizer=FILE.json": POD,
    "python -m parallax.firstrun": POD,
    "python benchmarks/one_gpu.py --out=runs/one_gpu": LONG,
    "python -m parallax.firstrun --config=configs/llama_1b_16.py --config.mesh.dp=-1 --steps=20 --out=first-run.md": (
        POD
    ),
    "python train.py --config=configs/gpu_80gb_x8.py --config.data.path=FILES --config.data.tokenizer=FILE.json": POD,
    "python -m parallax.data prepare --source parquet --path 'corpus/*.parquet' --tokenizer bpe --bpe-vocab 65536 "
    "--reserve '<|im_start|>' '<|im_end|>' --out runs/corpus": CORPORA,
    f"{RECIPE_X8}/text_x8 --config.model.depth=20 --config.data.source=prepared --config.data.path=runs/corpus "
    "--config.data.tokenizer=auto": POD,
    f"{RECIPE_X8}/chat_x8 --config.model.depth=20 --config.train.init_from=runs/text_x8 {RECIPE_CHATS} "
    "--config.data.chat_template=chatml --config.data.tokenizer=auto --config.optimizer.learning_rate=3e-4 "
    "--config.train.steps=300": POD,
    "python -m parallax.launch --processes 8 --gpus-per-process 1 -- train.py --config=configs/gpu_80gb_x8.py "
    "--config.data.path=FILES --config.data.tokenizer=FILE.json": POD,
    "python -m parallax.report --config=configs/llama_1b_16.py --topology=v5e:4x4": LONG,
    "python -m parallax.report --config=configs/llama3_70b.py --topology=v5p:4x8x8": LONG,
    "python -m parallax.report --config=configs/qwen3_235b.py --topology=v5p:4x8x8": LONG,
    "python -m parallax.report --config=configs/deepseek_v3.py --topology=v5p:8x8x8": LONG,
    "python -m parallax.report --config=configs/llama3_70b.py --topology=v7x:4x4x8": LONG,
    "python -m parallax.report --config=configs/llama3_405b.py --topology=v7x:4x8x8": LONG,
    **{
        f"python -m parallax.report --config=configs/llama3_405b.py --topology=v5p:8x8x8{layout}{key}": LONG
        for layout, key in (
            ("", ""),
            ("", " --config.loss.chunk_tokens=2048"),
            (DP_512, ""),
            (DP_512, " --config.loss.chunk_tokens=8192"),
        )
    },
    "python -m parallax.plan --config=configs/llama_1b_16.py --topology=v5e:4x4 --sweep --analytic --keep=5 "
    "--svg=docs/plan.svg": LONG,
    "python -m parallax.plan --config=configs/llama2_7b_64.py --topology=v5p:4x4x4 --sweep --svg=layouts.svg": LONG,
    **{
        f"python benchmarks/{words}": LONG
        for words in (
            "step.py --policy zero1 --steps 2 --rounds 2 --meshes 1,1,1 1,4,2 2,2,2 1,1,8 8,1,1 --same-rows --floor",
            "step.py --policy zero1 --steps 2 --rounds 2 --meshes 2,2,2 --schedule one_f_one_b",
            "bare.py",
            "guard.py",
            "compile_time.py",
            "first_step.py",
            "schedules.py memory",
            "schedules.py time --rounds 3",
            "schedules.py flops",
            "schedules.py compile",
            "predictions.py",
            "predictions.py --tpu",
            "plan.py --rounds 3",
            "attention.py",
            "gspmd.py",
            "gspmd.py --rows 0 --set loss.chunk_tokens=1024 data_parallel.exceptions=",
            "gspmd.py --layout tp --rows 0 1",
            "gspmd.py --layout cp --rows 0 1",
            "gspmd.py --layout ep --rows 0 1",
            "large.py",
            "one_gpu.py",
            "rates.py",
            "tpu_compile.py --topology v5e:4x4 --mesh 4,2,2",
            "tpu_compile.py --topology v5p:2x2x4 --mesh 4,2,2",
            "data.py",
            "decoding.py --repetitions 3 --tokens 48",
            "decoding.py --ours --attention gqa --rows 1 --tokens 24 --repetitions 3 --layers 32",
        )
    },
    # Each compiles whole steps for chips that are not here.
    **{
        command: LONG
        for page in PAGES
        for command in commands(page)
        if command.startswith(("python benchmarks/overlap.py", "python benchmarks/timeline.py"))
    },
}
# Pages about machines, schedulers and clouds that are not here.
PLATFORMS = sorted(ROOT.glob("docs/platforms/*.md"))
PARSED |= {command: POD for page in PLATFORMS for command in commands(page)}
PARSED |= {command: NETWORK for command in commands(ROOT / "docs" / "buckets.md")}
# What compiles, or traces for seconds: run with the slow tests.
SLOW = re.compile(
    r"train\.py|dpo\.py|parallax\.(watch|report|parity|plan|generate|convert|evaluate|launch)|pytest|benchmarks/"
    r"|data prepare --source stdlib|data conversations|in_a_notebook"
)
# A command that is in no block, and that nobody would run here.
COMMAND = re.compile(r"(?m)^    (?:python3?|make|pip|git|gcloud|bash|sbatch) .+")
# Files that commands read.
CORPUS = {f"corpus/{name}.txt": f"{name} is a document. " * 40 for name in "abcdefgh"}
SCHEDULE = {"mine.csv": "0F0,0F1+0B0,,0B1\n,1F0+1B0,1F1+1B1,\n"}
CHATS = {
    "chats.jsonl": "".join(
        f'{{"messages": [{{"role": "user", "content": "What is {n} + {n}?"}}, '
        f'{{"role": "assistant", "content": "It is {2 * n}."}}]}}\n'
        for n in range(99)
    )
}
QUESTIONS = {"questions.jsonl": '{"prompt": "Call me"}\n{"prompt": "It is"}\n'}
FILES = CORPUS | SCHEDULE | CHATS | QUESTIONS
# Runs that a page takes for granted.
THEIRS = """python -c '
import pathlib, sys
sys.path.insert(0, "tests")
from support.hf_folders import config_of, random_tensors, shapes_of, write_folder
config = config_of("LlamaForCausalLM")
write_folder(pathlib.Path("models/theirs"), config, random_tensors(shapes_of(config)))
'"""
BEFORE = {
    "docs/reliability.md": [f"{FIRST} --workdir=runs/mine"],
    "docs/chat.md": [THEIRS],
    "docs/convert.md": [THEIRS],
    "docs/serving.md": [f"{FIRST} --workdir=runs/first"],
    "docs/watching.md": [
        *(f"{FIRST} --workdir=runs/{name}" for name in ("first", "second")),
        f"{FIRST} --workdir=runs/mixture --config.model.layers_of=moe*2 --config.model.d_expert=16",
    ],
}
# Commands that show an error, with their status.
STATUS = {"python -m parallax.schedules mine.csv": 2}
