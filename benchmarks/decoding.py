"""Tokens a second of generation beside Hugging Face's `transformers`, with the same model, prompts and batch.

    pip install -e ".[hf-tests]" -c constraints.txt
    python benchmarks/decoding.py

A random model that `transformers` makes is saved and imported. Both continue the same prompts of random ids, greedily,
with their caches, in float32, in turns in one process and on the same cores. Printed for one prompt and for several are
tokens per CPU second and per second, medians of all repetitions, the ratios, and the share of ids that are equal; the
prompt's own pass and everything else of a call count. "compiled in" is what the first call of ours took more, in CPU
seconds. --ours leaves `transformers` out.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from arguments import Arguments, run_benchmark, whole_number

from parallax.errors import ConfigError

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"

PROMPT = 32  # tokens
VOCAB = 8192
HEADS = 8
FAMILIES = {"gqa": "Llama", "mla": "DeepseekV3"}

SPEEDS = ("tokens a CPU second", "tokens a second")
HEAD = (
    "attention",
    "prompts",
    *(f"{who}: {speed}" for who in ("ours", "theirs") for speed in SPEEDS),
    "ratio",
    "equal",
    "compiled in",
)


class Seconds(NamedTuple):
    cpu: float
    wall: float


def main() -> None:
    smallest = {"layers": 1, "width": 32, "tokens": 4, "repetitions": 1, "rows": [2]}
    parser = Arguments(description=__doc__, smallest=smallest)
    parser.add_argument("--ours", action="store_true", help="without transformers")
    parser.add_argument("--attention", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--rows", type=whole_number, nargs="+", default=[1, 32], help="prompts in a batch")
    parser.add_argument("--layers", type=whole_number, default=8)
    parser.add_argument("--width", type=whole_number, default=256, help="d_model")
    parser.add_argument("--tokens", type=whole_number, default=64, help="new ones of each prompt")
    parser.add_argument("--repetitions", type=whole_number, default=5)
    parser.add_argument("--unrolled", type=whole_number, metavar="LAYERS", help="up to which ours has no loop")
    parser.add_argument("--cores", type=whole_number, default=1, help="that both may use")
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    if args.unrolled:
        from parallax.inference import layer_sequences

        layer_sequences.UNROLLED_LAYERS = args.unrolled
    print(f"| {' | '.join(HEAD)} |")
    print(f"|{'---|' * len(HEAD)}")
    for attention in args.attention:
        ours, theirs = pair(attention, args)
        for rows in args.rows:
            print(measured(attention, rows, ours, theirs, args), flush=True)


def pair(attention: str, args: Any) -> tuple[Callable, Callable | None]:
    """Functions of prompts, as arrays of ids, to new ids."""
    if args.ours:
        return generator_of(own_model(attention, args), args.tokens), None
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ConfigError(f"{error.name} cannot be imported; pip install -e '.[hf-tests]', or use --ours") from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(args.cores)
    model = their_model(attention, args, transformers, torch)
    with tempfile.TemporaryDirectory() as folder:
        ours = imported(model, Path(folder))

    def theirs(ids):
        ids = torch.tensor(ids)
        settings = dict(do_sample=False, max_new_tokens=args.tokens, min_new_tokens=args.tokens, pad_token_id=0)
        with torch.inference_mode():
            return model.generate(ids, attention_mask=torch.ones_like(ids), **settings).numpy()[:, ids.shape[1] :]

    return generator_of(ours, args.tokens), theirs


def their_model(attention: str, args: Any, transformers: Any, torch: Any) -> Any:
    width = args.width // HEADS
    sizes = dict(
        vocab_size=VOCAB,
        hidden_size=args.width,
        intermediate_size=args.width * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=HEADS,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    )
    latent = dict(kv_lora_rank=args.width // 2, q_lora_rank=None, qk_nope_head_dim=width, v_head_dim=width)
    latent |= dict(qk_rope_head_dim=16, num_key_value_heads=HEADS, first_k_dense_replace=args.layers)
    sizes |= {"gqa": dict(num_key_value_heads=2), "mla": latent}[attention]
    torch.manual_seed(0)
    family = FAMILIES[attention]
    return getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes)).eval()


def imported(model: Any, folder: Path) -> tuple[Any, Any]:
    """The same model here, by way of the folders that both write and read."""
    import contextlib

    import parallax as px
    from parallax.cli.convert import main as convert
    from parallax.data.tokenizer import Bytes

    model.save_pretrained(folder / "theirs")
    Bytes().save(folder / "theirs")
    with contextlib.redirect_stdout(sys.stderr):
        if convert(["from-hf", str(folder / "theirs"), "--workdir", str(folder / "run")]):
            raise ConfigError("the model could not be imported")
    run = px.load(folder / "run")
    return run.model, run.params


def own_model(attention: str, args: Any) -> tuple[Any, Any]:
    import dataclasses

    import jax
    import numpy as np

    from parallax.config.sections import MeshConfig
    from parallax.config.settings import default_settings
    from parallax.pipeline import ShardedModel
    from parallax.sharding.mesh import make_mesh

    width, settings = args.width // HEADS, default_settings()
    sizes = dict(vocab=VOCAB, layers=args.layers, d_model=args.width, d_ff=args.width * 11 // 4, heads=HEADS)
    sizes |= dict(attention=attention, kv_heads=2, d_head=width, d_latent=args.width // 2, d_rope=16)
    changed = dataclasses.replace(settings, model=dataclasses.replace(settings.model, **sizes))
    model = ShardedModel(changed, make_mesh(MeshConfig(pp=1, dp=1, tp=1, simulate=0), jax.devices()[:1]))
    random = np.random.default_rng(0)
    draw = lambda leaf: jax.numpy.asarray(0.02 * random.standard_normal(leaf.shape), leaf.dtype)  # noqa: E731
    return model, jax.tree.map(draw, model.shapes)


def generator_of(model_and_params: tuple[Any, Any], tokens: int) -> Callable:
    import numpy as np

    from parallax.config.sections import SampleConfig
    from parallax.inference.generate import generate

    sample = SampleConfig(prompt="", tokens=tokens, temperature=0.0)
    return lambda ids: np.array(generate(*model_and_params, ids, sample))


def measured(attention: str, rows: int, ours: Callable, theirs: Callable | None, args: Any) -> str:
    """A line of the table."""
    import jax
    import numpy as np

    jax.config.update("jax_enable_compilation_cache", False)
    ids = np.random.default_rng(0).integers(VOCAB, size=(rows, PROMPT))
    compiling = timed(ours, ids).cpu
    writers = [ours, theirs] if theirs else [ours]
    written = [writer(ids) for writer in writers]
    secs = [[timed(writer, ids) for writer in writers] for _ in range(args.repetitions)]
    of_each = [Seconds(*(statistics.median(kind) for kind in zip(*column))) for column in zip(*secs)]
    speeds = [f"{rows * args.tokens / value:,.0f}" for each in of_each for value in each]
    compiled = f"{compiling - of_each[0].cpu:.1f}"
    if not theirs:
        return f"| {attention} | {rows} | {' | '.join(speeds)} | - | - | - | - | {compiled} |"
    ratio = statistics.median(there.cpu / here.cpu for here, there in secs)
    equal = (written[0] == written[1]).mean()
    return f"| {attention} | {rows} | {' | '.join(speeds)} | {ratio:.2f} | {equal:.1%} | {compiled} |"


def timed(writer: Callable, ids: Any) -> Seconds:
    cpu, wall = time.process_time(), time.perf_counter()
    writer(ids)
    return Seconds(time.process_time() - cpu, time.perf_counter() - wall)


if __name__ == "__main__":
    run_benchmark(main)
