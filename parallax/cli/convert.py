"""Write a run's parameters as safetensors files and read them back; also in the format of Hugging Face transformers.

    python -m parallax.convert export runs/mine exported/mine
    python -m parallax.convert import exported/mine runs/other
    python -m parallax.convert from-hf models/theirs --workdir runs/theirs --config.mesh.tp=2
    python -m parallax.convert to-hf runs/theirs models/ours
    python -m parallax.convert merge runs/tuned runs/merged
    python -m parallax.convert to-peft runs/tuned adapters/ours
    python -m parallax.convert from-peft adapters/theirs runs/theirs --workdir runs/tuned

train.init_from and `python -m parallax.generate` accept an imported run. Each folder may be in a bucket.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from parallax.display.progress import loading, waiting

with loading(__name__, sys.stderr):
    from parallax.cli.arguments import Parser, add_command, positive, run_path, source_of
    from parallax.cli.command import HELP, config_keys, key_default, read_line, run_quietly
    from parallax.config.reference import CONFIGS
    from parallax.config.settings import Settings, read_settings
    from parallax.errors import ConfigError
    from parallax.interop.adapters import from_peft, merge, to_peft
    from parallax.interop.export import export_params, import_params
    from parallax.interop.hf_config import check_own_keys
    from parallax.interop.huggingface import WEIGHT_DTYPES, from_hf, to_hf
    from parallax.step.resolve import VOCAB_MULTIPLE

SHARD_MBYTES = 4096


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert; returns the exit status. User errors are one line on stderr."""
    return run_quietly(lambda: run(parse(arguments)), one_line=True)


def run(flags: argparse.Namespace) -> None:
    """Run the conversion and print a summary."""
    acts = {"import": _import, "export": _export, "from-hf": _from_hf, "to-hf": _to_hf}
    acts |= {"merge": _merge, "to-peft": _to_peft, "from-peft": _from_peft}
    acts[flags.act](flags)


def _import(flags: argparse.Namespace) -> None:
    with waiting(f"importing {flags.source}"):
        import_params(flags.source, flags.workdir)
    print(f"the parameters in {flags.source} are step 0 of {flags.workdir}: train.init_from={flags.workdir}")


def _export(flags: argparse.Namespace) -> None:
    with waiting(f"exporting {flags.workdir}"):
        step = export_params(flags.workdir, flags.out, step=flags.step, shard_bytes=flags.shard_mbytes << 20)
    print(f"the parameters of step {step} of {flags.workdir} are in {flags.out}")


def _from_hf(flags: argparse.Namespace) -> None:
    with waiting(f"importing {flags.source}"):
        settings = settings_of_import(flags.settings, flags.workdir)
        model = from_hf(flags.source, flags.workdir, settings, dtype=dtype_of_import(flags.settings, settings))
    for note in model.notes:
        print(note)
    print(f"the {model.architecture} in {flags.source} is step 0 of {flags.workdir}: train.init_from={flags.workdir}")


def _to_hf(flags: argparse.Namespace) -> None:
    options = {"step": flags.step, "like": flags.like, "dtype": flags.dtype, "shard_bytes": flags.shard_mbytes << 20}
    with waiting(f"exporting {flags.workdir}"):
        step, what = to_hf(flags.workdir, flags.out, **options)
    print(f"the parameters of step {step} of {flags.workdir} are in {flags.out}: {what}")


def _merge(flags: argparse.Namespace) -> None:
    with waiting(f"merging {flags.workdir}"):
        step = merge(flags.workdir, flags.out, step=flags.step)
    print(f"step {step} of {flags.workdir}, its adapters merged, is step 0 of {flags.out}: train.init_from={flags.out}")


def _to_peft(flags: argparse.Namespace) -> None:
    with waiting(f"exporting {flags.workdir}"):
        step = to_peft(flags.workdir, flags.out, step=flags.step)
    print(f"the adapters of step {step} of {flags.workdir} are in {flags.out}")


def _from_peft(flags: argparse.Namespace) -> None:
    with waiting(f"importing {flags.source}"):
        what = from_peft(flags.source, flags.base, flags.workdir)
    print(
        f"{flags.base} with the adapters in {flags.source}, {what}, is step 0 of {flags.workdir}: train.init_from="
        f"{flags.workdir}"
    )


def settings_of_import(written_settings: Sequence[str], workdir: Path) -> Settings:
    """The settings of an imported run, except its model; its tokenizer is the imported one.

    Raises:
        ConfigError: a flag is not a setting, or is one that the imported model determines.
    """
    # Flags of the command line come after these, so they take precedence.
    ours = [
        f"--config.model.vocab_multiple={VOCAB_MULTIPLE}",
        f"--config.data.tokenizer={workdir / 'tokenizer.json'}",
        "--config.sample.special_tokens=tokens",  # of the model's template
    ]
    config = read_line([__name__, *ours, *written_settings], {}, config=CONFIGS / "base.py").config
    check_own_keys(_keys(written_settings))
    return read_settings(config)


def dtype_of_import(written_settings: Sequence[str], settings: Settings) -> str | None:
    """The model.dtype that was chosen, by a flag or by a config that differs from the default; None if none was."""
    chosen = "model.dtype" in _keys(written_settings) or settings.model.dtype != key_default("model.dtype")
    return settings.model.dtype if chosen else None


def _keys(written_settings: Sequence[str]) -> list[str]:
    flags = [word.removeprefix("--config.") for word in written_settings if word.startswith("--config.")]
    return [flag.partition("=")[0] for flag in flags]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse flags; ConfigError if they are wrong."""
    parser = Parser("python -m parallax.convert", description=__doc__)
    acts = parser.add_subparsers(dest="act", required=True, metavar="COMMAND")
    _out_of_run(add_command(acts, "export", "write a checkpoint's parameters as safetensors files", __doc__))
    back = add_command(acts, "import", "make a run folder from the output of export", __doc__)
    back.add_argument("source", type=source_of, help="a folder with safetensors files, config.json and tokenizer.json")
    back.add_argument("workdir", type=run_path, help="a new folder")
    about_theirs = "make a run folder from a Hugging Face folder; --config and --config.KEY as in train.py"
    theirs = add_command(acts, "from-hf", about_theirs, __doc__)
    theirs.add_argument("--help-config", action="version", version=config_keys(), help=HELP["help-config"])
    theirs.add_argument(
        "source", type=source_of, help="a folder with config.json, safetensors files and tokenizer.json"
    )
    theirs.add_argument("--workdir", type=run_path, required=True, help="a new folder")
    ours = add_command(acts, "to-hf", "write a checkpoint as a Hugging Face folder", __doc__)
    _out_of_run(ours)
    ours.add_argument(
        "--like", type=run_path, help="the run of from-hf from which this one started, if it is not recorded"
    )
    ours.add_argument("--dtype", choices=list(WEIGHT_DTYPES), help="of all tensors; default: as imported, else float32")
    _of_step(add_command(acts, "merge", "make a run folder of a step whose adapters are merged", __doc__))
    _of_step(add_command(acts, "to-peft", "write a checkpoint's adapters as a folder of peft", __doc__))
    adapters = add_command(acts, "from-peft", "make a run folder from another and a folder of peft", __doc__)
    adapters.add_argument("source", type=source_of, help="a folder with adapter_config.json and its safetensors file")
    adapters.add_argument("base", type=run_path, help="the run with the weights to which they belong")
    adapters.add_argument("--workdir", type=run_path, required=True, help="a new folder")
    flags, rest = parser.parse_known_args(arguments)
    if rest and flags.act != "from-hf":
        raise ConfigError(f"unrecognized arguments: {' '.join(rest)}")
    flags.settings = rest
    return flags


def _out_of_run(parser: argparse.ArgumentParser) -> None:
    _of_step(parser)
    size = f"largest size of a file in MiB; default: {SHARD_MBYTES}"
    parser.add_argument("--shard-mbytes", type=positive, default=SHARD_MBYTES, help=size)


def _of_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workdir", type=run_path, help="the folder of the run")
    parser.add_argument("out", type=run_path, help="a new folder")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the newest")


if __name__ == "__main__":
    sys.exit(main())
