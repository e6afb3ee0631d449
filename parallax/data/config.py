"""What a run reads: the settings of the section `data`."""

from dataclasses import dataclass

from parallax.data.tokenizer import SMALLEST_BPE_VOCAB
from parallax.runtime.errors import ConfigError, check_choice, quoted

FILES = ("text", "jsonl", "parquet")  # sources that read `path` through a tokenizer
BUILT_IN = ("stdlib", "moby", "synthetic")  # sources that need no path
SOURCES = ("stdlib", "moby", "text", "jsonl", "parquet", "prepared", "synthetic")

AUTO = "auto"  # a tokenizer that follows from what else is asked for


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which text, as which tokens, in which windows; `configs/base.py` says what each field means.

    Raises:
        ConfigError: a field is out of range, or does not fit `source`.
    """

    source: str
    path: str
    field: str
    tokenizer: str
    bpe_vocab: int
    cache: str
    seq: int
    global_batch: int
    eval_fraction: float
    seed: int
    synthetic_tokens: int

    def __post_init__(self):
        check_choice("data.source", self.source, SOURCES)
        _check_path(self.source, self.path, self.field)
        if self.cache and self.source == "prepared":
            raise ConfigError(
                f"data.cache={quoted(self.cache)} is not used by data.source='prepared', which is ready; leave it empty"
            )
        if self.tokenizer != AUTO:
            check_tokenizer(self.tokenizer, self.bpe_vocab, f"{AUTO!r}, ")
        for key, least in (("seq", 1), ("global_batch", 1), ("seed", 0), ("synthetic_tokens", 2)):
            _check_least(key, getattr(self, key), least)
        if not 0 <= self.eval_fraction < 1:
            raise ConfigError(
                f"data.eval_fraction={self.eval_fraction} is not a share; use 0 (hold out nothing) to below 1"
            )


def check_tokenizer(tokenizer: str, bpe_vocab: int, others: str = "") -> None:
    """Raise ConfigError unless `tokenizer` is a known name or a tokenizer.json; `others` are more names to use."""
    if tokenizer.endswith(".json"):
        return
    if tokenizer not in ("bytes", "bpe"):
        raise ConfigError(
            f"data.tokenizer={quoted(tokenizer)} is unknown; use {others}'bytes', 'bpe' or the path of a tokenizer.json"
        )
    if tokenizer == "bpe":
        _check_least("bpe_vocab", bpe_vocab, SMALLEST_BPE_VOCAB)


def _check_path(source: str, path: str, field: str) -> None:
    if source in BUILT_IN and path:
        raise ConfigError(
            f"data.path={quoted(path)} is not read by data.source={source!r}; use {', '.join(FILES)} or prepared"
        )
    if source not in BUILT_IN and not path:
        raise ConfigError(f"data.path='' but data.source={source!r} needs a file, folder or glob")
    if source in ("jsonl", "parquet") and not field:
        raise ConfigError(f"data.field='' but data.source={source!r} needs the name of the field that holds a document")


def _check_least(key: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"data.{key}={value} is too small; use {least} or more")
