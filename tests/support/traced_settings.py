"""Settings of a tiny model whose programs are kept: each value of what changes a step's collectives occurs in a row.

Only names of `import parallax as px` are used, so that the same rows are read in checkouts whose modules differ.
"""

import parallax as px
from configs.base import get_config

ROWS, SEQ, VOCAB = 16, 16, 64
MODEL = dict(layers=4, d_model=32, d_ff=64, heads=4, kv_heads=2, d_head=8, d_latent=16, d_rope=4, vocab=VOCAB)
SECTIONS = {  # of the keys of a row
    "mesh": ["pp", "dp", "tp", "replica", "cp", "ep"],
    "layout": ["tensor_parallel", "residual", "embedding", "context"],
    "pipeline": ["schedule", "virtual", "microbatches", "remat"],
    "data_parallel": ["policy", "exceptions"],
    "fsdp": ["reduce", "prefetch"],
    "loss": ["z_coefficient", "chunk_tokens"],
    "optimizer": ["name", "warmup_steps", "learning_rate", "clip_norm"],
    "data": ["seq", "global_batch"],
}
RESIDUALS = {"hidden": "batch/dp seq d_model/tp", "seq": "batch/dp seq/tp d_model"}
COLUMNS = ["mesh", "attention", "tensor_parallel", "residual", "schedule", "remat", "policy", "reduce", "prefetch"]
COLUMNS += ["head", "name"]  # of the optimizer
# What stands behind the columns is further keys. A schedule on one pipeline rank is gradient accumulation.
TABLE = """
alone           1x1x1 mla column_row hidden gpipe         layer       zero3      float32 0 tied   adamw
alone-muon      1x1x1 gqa scatter    seq    gpipe         none        zero1      compute 0 untied muon

gpipe           2x1x1 gqa column_row hidden gpipe         layer       zero3      float32 0 tied   adamw
gpipe-uneven    2x1x1 mla scatter    seq    gpipe         stage       zero1      compute 0 untied muon  layers=5 \
    tables=zero3
1f1b            2x1x1 mla column_row seq    one_f_one_b   attention   zero1      float32 0 untied adamw
interleaved     2x1x1 gqa scatter    hidden interleaved   elementwise zero3      float32 1 tied   adamw virtual=2
zb              2x1x1 gqa column_row hidden zero_bubble   none        zero3      float32 0 untied adamw
zb-v            2x1x1 mla column_row hidden zero_bubble_v layer       zero1      float32 0 tied   muon tables=zero3

dp              1x2x1 mla column_row hidden gpipe         layer       zero3      float32 0 tied   adamw
dp-ahead        1x2x1 gqa column_row hidden gpipe         none        zero3      float32 1 untied adamw
dp-ahead-bf16   1x2x1 mla scatter    seq    gpipe         layer       zero3      compute 1 untied muon  dtype=bfloat16
dp-layers       1x2x1 gqa column_row seq    gpipe         attention   zero1      float32 0 tied   adamw tables=zero3
dp-step         1x2x1 mla column_row hidden gpipe         elementwise zero1      compute 0 untied adamw dtype=bfloat16
dp-muon         1x2x1 gqa scatter    hidden gpipe         stage       zero1      float32 0 tied   muon

tp-hidden       1x1x2 gqa column_row hidden gpipe         layer       zero3      float32 0 tied   adamw qk_norm=True
tp-seq          1x1x2 mla column_row seq    gpipe         none        zero3      float32 0 tied   adamw
tp-scatter      1x1x2 gqa scatter    hidden gpipe         attention   zero1      float32 0 untied muon  kv_heads=1
tp-scatter-seq  1x1x2 mla scatter    seq    gpipe         elementwise zero1      compute 0 untied adamw d_latent_q=16 \
    tables=zero3
tp-all-to-all   1x1x2 mla column_row hidden gpipe         stage       zero3      float32 0 untied adamw \
    embedding=all_to_all

all-gpipe       2x2x2 mla column_row hidden gpipe         layer       zero3      float32 0 tied   adamw
all-gpipe-step  2x2x2 gqa scatter    seq    gpipe         stage       zero1      compute 0 untied muon  dtype=bfloat16
all-gpipe-tables 2x2x2 gqa column_row seq   gpipe         layer       zero1      float32 0 tied   adamw \
    tables=zero3
all-1f1b        2x2x2 gqa column_row hidden one_f_one_b   layer       zero3      float32 0 untied adamw
all-1f1b-step   2x2x2 mla scatter    hidden one_f_one_b   attention   zero1      float32 0 tied   muon  dropout=0.1
all-1f1b-ahead  2x2x2 mla column_row seq    one_f_one_b   none        zero3      compute 1 untied adamw dtype=bfloat16
all-inter       2x2x2 mla column_row seq    interleaved   layer       zero1      float32 0 untied adamw virtual=2 \
    tables=zero3
all-inter-ahead 2x2x2 gqa scatter    hidden interleaved   attention   zero3      float32 1 tied   muon  virtual=2
all-zb          2x2x2 gqa scatter    seq    zero_bubble   attention   zero3      float32 0 untied adamw qkv_bias=True
all-zb-step     2x2x2 mla column_row hidden zero_bubble   none        zero1      compute 0 tied   adamw \
    embedding=all_to_all
all-zb-v        2x2x2 mla scatter    hidden zero_bubble_v layer       zero3      float32 0 untied muon
all-zb-v-ahead  2x2x2 gqa column_row seq    zero_bubble_v none        zero3      float32 1 tied   adamw \
    z_coefficient=0.001
all-dualpipe-v  2x2x2 gqa column_row hidden dualpipe_v    attention   zero3      float32 0 tied   adamw

ddp             1x2x1 gqa column_row hidden gpipe         layer       ddp        float32 0 tied   adamw
zero2           1x2x1 mla column_row hidden gpipe         layer       zero2      float32 0 untied adamw
lean            1x2x1 gqa column_row seq    gpipe         layer       lean       compute 0 tied   adamw
all-ddp         2x2x2 mla scatter    seq    interleaved   layer       ddp        float32 0 untied adamw virtual=2
all-zero2       2x2x2 gqa column_row hidden zero_bubble_v none        zero2      compute 0 tied   adamw dtype=bfloat16
all-lean        2x2x2 mla column_row seq    one_f_one_b   attention   lean       float32 1 untied muon
replicas        1x2x2 gqa column_row hidden gpipe         layer       zero3      float32 0 tied   adamw replica=2

cp-gather       1x1x1 gqa column_row hidden gpipe         layer       zero3      float32 0 tied   adamw cp=2
cp-latent       1x2x2 mla scatter    seq    gpipe         none        zero1      float32 0 untied adamw cp=2
cp-ring         1x1x2 gqa column_row seq    gpipe         attention   zero3      float32 0 tied   adamw cp=4 \
    context=ring
cp-ring-stages  2x1x1 mla column_row hidden one_f_one_b   layer       zero3      float32 0 untied adamw cp=2 \
    context=ring
cp-ulysses      2x1x2 gqa scatter    hidden zero_bubble   layer       ddp        compute 0 tied   adamw cp=2 \
    context=ulysses dtype=bfloat16

ep-dense        1x2x1 gqa column_row hidden gpipe         layer       zero3      float32 0 tied   adamw ep=2
ep-dense-stages 2x1x1 mla scatter    seq    one_f_one_b   attention   zero1      compute 0 untied muon  ep=2 cp=2 \
    context=ulysses dtype=bfloat16
"""


def _read(line):
    name, *words = line.split()
    values = dict(zip(COLUMNS, words))
    return name, values | dict(word.split("=") for word in words[len(COLUMNS) :])


CASES = dict(_read(line) for line in TABLE.replace("\\\n", " ").splitlines() if line)


def settings_of(name):
    """The settings of a row, which the base config's defaults fill up."""
    values = dict(CASES[name])
    values |= zip(("pp", "dp", "tp"), map(int, values.pop("mesh").split("x")))
    values |= {"residual": RESIDUALS[values["residual"]], "tied": values.pop("head") == "tied"}
    values |= {"microbatches": 4, "chunk_tokens": 48, "warmup_steps": 2, "seq": SEQ, "global_batch": ROWS}
    sections = {key: section for section, keys in SECTIONS.items() for key in keys}
    if tables := values.pop("tables", ""):
        values["exceptions"] = f"embedding={tables} head={tables}"
    changes = {"model": dict(MODEL)}
    for key, value in values.items():
        changes.setdefault(sections.get(key, "model"), {})[key] = _typed(value)
    return px.read_settings(get_config(), **changes)


def _typed(word):
    """What is written in a table as Python has it."""
    if not isinstance(word, str):
        return word
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return {"True": True, "False": False}.get(word, word)
