"""What `to-hf` writes beside the parameters: where documents begin and end, how long the context is, the tokenizer."""

import json

import numpy as np
import pytest
import tokenizers
from support.data_examples import prepare_texts
from support.exportable_runs import own_run, own_settings
from support.hf_folders import config_of, random_tensors, shapes_of, write_folder
from support.run_examples import first_state, tiny_config

import parallax as px
from parallax.checkpoint.steps import complete_steps, read_manifest, write_manifest
from parallax.cli.command import load_config
from parallax.cli.convert import main
from parallax.cli.evaluate import evaluate
from parallax.config.sections import ALL_AXES, SampleConfig
from parallax.config.settings import load_settings, read_settings
from parallax.data import prepare as prepare_module
from parallax.data.tokenizer import Bytes, load_tokenizer, train_bpe
from parallax.errors import CheckpointError, DataError
from parallax.inference.ends import ends_of
from parallax.inference.generate import encode, generate
from parallax.model.rope import Rope

BOS = "<s>"
BPE = train_bpe(["It is a truth that a small text is enough."] * 4, vocab=270)
TEMPLATE = "{% for message in messages %}{{ message }}{% endfor %}"


def content(folder, name):
    return json.loads((folder / name).read_text())


def exported(run, out, *flags):
    assert main(["to-hf", str(run), str(out), *flags]) == 0
    return content(out, "config.json")


# ---- runs of our own


def test_a_run_on_bytes_goes_out_with_a_tokenizer_that_others_read(corpus, tmp_path):
    own_run(tmp_path / "run", own_settings(corpus))
    config = exported(tmp_path / "run", tmp_path / "out")
    assert (config["eos_token_id"], config["bos_token_id"]) == (256, None)
    assert content(tmp_path / "out", "generation_config.json") == {"eos_token_id": 256, "pad_token_id": 256}
    about = content(tmp_path / "out", "tokenizer_config.json")
    assert about["tokenizer_class"] == "PreTrainedTokenizerFast" and about["model_max_length"] == 32
    assert about["eos_token"] == about["pad_token"] == "<|endoftext|>" and "bos_token" not in about
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert theirs.encode("né\n").ids == [110, 195, 169, 10]
    assert theirs.token_to_id(about["eos_token"]) == config["eos_token_id"]


def test_what_went_out_with_bytes_comes_back_with_them(corpus, tmp_path):
    own_run(tmp_path / "run", own_settings(corpus))
    exported(tmp_path / "run", tmp_path / "out")
    assert main(["from-hf", str(tmp_path / "out"), "--workdir", str(tmp_path / "back")]) == 0
    assert load_tokenizer(tmp_path / "back").fingerprint == Bytes().fingerprint
    again = exported(tmp_path / "back", tmp_path / "again")
    assert again == content(tmp_path / "out", "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_a_run_on_a_bpe_of_its_own_names_the_end_of_that(corpus, tmp_path):
    own_run(tmp_path / "run", own_settings(corpus), BPE)
    config = exported(tmp_path / "run", tmp_path / "out")
    assert (config["eos_token_id"], config["bos_token_id"]) == (BPE.end, None) and BPE.end != 256
    assert (tmp_path / "out" / "tokenizer.json").read_text() == BPE._text
    assert content(tmp_path / "out", "generation_config.json")["eos_token_id"] == BPE.end


def test_a_run_on_a_model_of_sentencepiece_goes_out_with_it(corpus, tmp_path, capsys):
    library = pytest.importorskip("sentencepiece", reason="needs sentencepiece, of the extra 'tokenizers'")
    options = {"model_prefix": str(tmp_path / "tokenizer"), "vocab_size": 40, "hard_vocab_limit": False}
    library.SentencePieceTrainer.train(sentence_iterator=iter(["It is a truth."] * 9), minloglevel=2, **options)
    tokenizer = load_tokenizer(tmp_path / "tokenizer.model")
    own_run(tmp_path / "run", own_settings(corpus), tokenizer)
    assert exported(tmp_path / "run", tmp_path / "out")["eos_token_id"] == tokenizer.end
    said = capsys.readouterr()
    assert "tokenizer is tokenizer.model, which sentencepiece reads: there is no tokenizer.json" in said.out + said.err
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == tokenizer.model
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert content(tmp_path / "out", "tokenizer_config.json")["eos_token"] == "</s>"
    assert main(["from-hf", str(tmp_path / "out"), "--workdir", str(tmp_path / "back")]) == 0
    run = px.load(tmp_path / "back")
    assert run.tokenizer.fingerprint == tokenizer.fingerprint == load_tokenizer(tmp_path / "out").fingerprint
    assert run.tokenizer.encode("It is<s>", special_tokens="tokens").tolist() == [*tokenizer.encode("It is"), 1]
    assert load_settings(tmp_path / "back").data.tokenizer == str(tmp_path / "back" / "tokenizer.json")
    (tmp_path / "out" / "tokenizer.model").rename(tmp_path / "elsewhere.model")  # the run has it
    assert load_tokenizer(tmp_path / "back").encode("a truth").tolist() == tokenizer.encode("a truth").tolist()
    exported(tmp_path / "back", tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer.model").read_bytes() == tokenizer.model
    refused = ["from-hf", str(tmp_path / "out"), "--workdir", str(tmp_path / "no")]
    assert main(refused) == DataError.exit_status
    assert "has no tokenizer, neither tokenizer.json nor tokenizer.model; copy it there" in capsys.readouterr().err
    (tmp_path / "elsewhere.model").rename(tmp_path / "out" / "tokenizer.model")
    (tmp_path / "out" / "added_tokens.json").write_text('{"<|im_start|>": 40}')
    assert main(refused) == DataError.exit_status
    said = f"tokenizer.model has {tokenizer.vocab} pieces, and a file beside it adds token 40; write a tokenizer.json"
    assert said in capsys.readouterr().err


def test_a_run_that_reads_with_a_published_tokenizer_hands_its_config_on(corpus, tmp_path):
    tokenizer = published(tmp_path / "there", add_bos_token=True, bos_token=BOS, model_max_length=7)
    own_run(tmp_path / "run", own_settings(corpus), tokenizer)
    config = exported(tmp_path / "run", tmp_path / "out")
    assert (config["eos_token_id"], config["bos_token_id"]) == (tokenizer.end, tokenizer.begin[0])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_text() == (tmp_path / "there" / name).read_text()


def test_a_tokenizer_that_puts_a_token_first_has_it_named(corpus, tmp_path):
    tokenizer = published(tmp_path / "there", template=True)
    own_run(tmp_path / "run", own_settings(corpus), tokenizer)
    assert exported(tmp_path / "run", tmp_path / "out")["bos_token_id"] == tokenizer.begin[0]
    assert content(tmp_path / "out", "tokenizer_config.json")["bos_token"] == BOS
    assert content(tmp_path / "out", "generation_config.json")["bos_token_id"] == tokenizer.begin[0]


STRETCHED = dict(rope_original_seq=16, rope_factor=4.0)
CONTEXTS = {
    "none": (dict(rope_scaling="none"), 32),
    "linear": (dict(rope_scaling="linear", **STRETCHED), 32),
    "llama3": (dict(rope_scaling="llama3", rope_fast_turns=4.0, **STRETCHED), 32),
    # Of which some versions of `transformers` compute its factor.
    "yarn": (dict(rope_scaling="yarn", **STRETCHED), 64),
}


@pytest.mark.parametrize("kind", CONTEXTS)
def test_the_context_is_that_of_the_runs_windows(corpus, tmp_path, kind):
    changes, context = CONTEXTS[kind]
    own_run(tmp_path / "run", own_settings(corpus, attention="gqa", **changes))
    config = exported(tmp_path / "run", tmp_path / "out")
    assert load_settings(tmp_path / "run").data.seq == 32 and config["max_position_embeddings"] == context
    if kind in ("llama3", "yarn"):
        assert config["rope_scaling"]["original_max_position_embeddings"] == 16
    assert content(tmp_path / "out", "tokenizer_config.json")["model_max_length"] == context


def test_a_tokenizer_that_auto_tokenizer_would_make_qwens_of_is_said(corpus, tmp_path, capsys):
    own_run(tmp_path / "run", own_settings(corpus, attention="gqa", qkv_bias=True))
    exported(tmp_path / "run", tmp_path / "out")
    assert "Qwen2ForCausalLM, float32; read its tokenizer with PreTrainedTokenizerFast" in capsys.readouterr().out


# ---- runs that were trained from an import


def published(folder, *, template=False, **config):
    """A tokenizer as models are published with it, which has an entry for the begin of a document."""
    inner = tokenizers.Tokenizer.from_str(BPE._text)
    inner.add_special_tokens([BOS, "<|user|>"])
    if template:
        special = [(BOS, inner.token_to_id(BOS))]
        inner.post_processor = tokenizers.processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=special)
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "tokenizer.json").write_text(inner.to_str())
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=3))
    return load_tokenizer(folder)


BESIDE = {
    "generation_config.json": {"eos_token_id": 271, "temperature": 0.6},
    "tokenizer_config.json": {"add_bos_token": True, "bos_token": BOS, "eos_token": "<|user|>"},
    "special_tokens_map.json": {"bos_token": BOS},
}


def imported(folder, generation=BESIDE["generation_config.json"], **changes):
    """A folder of somebody's with all that stands beside a model, and the run that was made of it."""
    config = config_of("MistralForCausalLM", **{"vocab_size": 272, "eos_token_id": 271} | changes)
    write_folder(folder / "theirs", config, random_tensors(shapes_of(config), "BF16"))
    published(folder / "theirs", template=True)
    for name, text in (BESIDE | {"generation_config.json": generation}).items():
        (folder / "theirs" / name).write_text(json.dumps(text, indent=3))
    if generation is None:
        (folder / "theirs" / "generation_config.json").unlink()
    (folder / "theirs" / "chat_template.jinja").write_text(TEMPLATE)
    assert main(["from-hf", str(folder / "theirs"), "--workdir", str(folder / "run")]) == 0
    return config


def tuned(corpus, folder, *, steps=4, **changes):
    """A run that starts from the import and saves after `steps`; what it learns is not asked."""
    config = load_config(str(folder / "run" / "config.json"))[0]
    config.data = tiny_config(corpus).data
    config.update({"data": {"tokenizer": "auto", "cache": str(folder / "cache"), "seq": 32}})
    config.update({"train": {"init_from": str(folder / "run"), "steps": steps}, "optimizer": {"warmup_steps": 1}})
    for key, value in changes.items():
        section, name = key.split("__")
        config[section][name] = value
    first_state(config, folder / "tuned")
    assert steps in complete_steps(folder / "tuned" / "checkpoints")
    return folder / "tuned"


@pytest.mark.slow
def test_a_run_trained_from_an_import_goes_out_like_it_by_itself(corpus, tmp_path, capsys):
    config = imported(tmp_path)
    run = tuned(corpus, tmp_path)
    assert exported(run, tmp_path / "out") == config
    assert "MistralForCausalLM, bfloat16" in capsys.readouterr().out
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    # Its documents ended with eos_token, at which the model that was imported stopped, too.
    found = content(tmp_path / "out", "generation_config.json")
    assert found == {"eos_token_id": 271, "temperature": 0.6}


@pytest.mark.slow
def test_what_was_imported_is_known_after_a_resume_and_by_runs_of_runs(corpus, tmp_path):
    config = imported(tmp_path)
    tuned(corpus, tmp_path)
    assert exported(tuned(corpus, tmp_path, steps=6), tmp_path / "resumed") == config
    (tmp_path / "run").rename(tmp_path / "gone")
    (tmp_path / "tuned").rename(tmp_path / "run")
    assert exported(tuned(corpus, tmp_path), tmp_path / "out") == config


@pytest.mark.slow
def test_a_run_begins_its_documents_as_the_imported_tokenizer_says(corpus, tmp_path):
    imported(tmp_path)
    run = tuned(corpus, tmp_path)
    (begin,) = load_tokenizer(tmp_path / "theirs").begin
    for folder in (run, run / "checkpoints" / "4", tmp_path / "run"):
        assert load_tokenizer(folder).begin == (begin,)
    opened = px.load(run)
    batches = [opened.batch(index) for index in range(6)]
    tokens, segments, positions = (
        np.stack([batch[name] for batch in batches]) for name in ("tokens", "segments", "positions")
    )
    starts = (positions == 0) & (segments > 1)
    assert starts.any() and (tokens[starts] == begin).all()
    assert opened.batch_of("It")["tokens"][0, 0] == begin


@pytest.mark.slow
def test_behind_a_bos_every_token_of_a_text_is_evaluated(tmp_path):
    imported(tmp_path)
    texts = ["It is a truth.", "It is small."]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    mesh = {"mesh": {**dict.fromkeys(ALL_AXES, 1), "simulate": 0}}
    settings = read_settings(load_settings(tmp_path / "run").to_dict() | mesh)
    found = evaluate(tmp_path / "run", settings, data=str(tmp_path / "texts.jsonl"))
    assert found.tokens == sum(len(BPE.encode(text)) + 1 for text in texts)


def test_an_export_in_our_own_names_keeps_what_begins_a_document(tmp_path):
    imported(tmp_path)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert main(["import", str(tmp_path / "out"), str(tmp_path / "back")]) == 0
    assert load_tokenizer(tmp_path / "back").fingerprint == load_tokenizer(tmp_path / "theirs").fingerprint


LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
REACHES = {
    "a longer one than the windows": (dict(max_position_embeddings=64), 64),
    "a shorter one": (dict(max_position_embeddings=16), 32),
    "a shorter one, stretched": (dict(max_position_embeddings=16, rope_scaling=LINEAR), 32),
    "yarn's": (dict(max_position_embeddings=16, rope_scaling=YARN), 16),
    "a longer one that llama3 takes for the original": (dict(max_position_embeddings=64, rope_scaling=LLAMA3), 64),
    "a shorter one that llama3 takes for the original": (dict(max_position_embeddings=16, rope_scaling=LLAMA3), 32),
}


INSTANCES = ("a shorter one, stretched", "a longer one that llama3 takes for the original")


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=pytest.mark.slow) if what in INSTANCES else what for what in REACHES]
)
def test_an_imported_context_grows_to_the_windows_and_rotates_as_before(tmp_path, what):
    changes, context = REACHES[what]
    config = imported(tmp_path, **changes)
    settings = load_settings(tmp_path / "run").to_dict()
    settings["data"]["seq"] = 32
    own_run(tmp_path / "tuned", read_settings(settings), load_tokenizer(tmp_path / "run"))
    found = exported(tmp_path / "tuned", tmp_path / "out", "--like", str(tmp_path / "run"))
    assert found["max_position_embeddings"] == context
    assert found == config if context == config["max_position_embeddings"] else found != config
    assert main(["from-hf", str(tmp_path / "out"), "--workdir", str(tmp_path / "back")]) == 0
    there, here = (Rope(load_settings(tmp_path / name).model).frequencies() for name in ("run", "back"))
    np.testing.assert_array_equal(there, here)


@pytest.mark.slow
def test_a_model_that_is_no_longer_the_imported_one_goes_out_as_its_own(corpus, tmp_path, capsys):
    imported(tmp_path)
    run = tuned(corpus, tmp_path, model__norm_eps=1e-5)
    config = exported(run, tmp_path / "out")
    said = "LlamaForCausalLM, float32, since it is not the imported model: model.norm_eps=1e-06 there, 1e-05 here"
    assert said in capsys.readouterr().out and config["rms_norm_eps"] == 1e-5
    assert config["bos_token_id"] == load_tokenizer(tmp_path / "theirs").begin[0]


def test_an_import_without_its_companions_gets_those_it_lacks(tmp_path):
    config = config_of("LlamaForCausalLM", vocab_size=272, eos_token_id=5, bos_token_id=None)
    folder = write_folder(tmp_path / "theirs", config, random_tensors(shapes_of(config)))
    (folder / "generation_config.json").unlink()
    BPE.save(folder)
    assert main(["from-hf", str(folder), "--workdir", str(tmp_path / "run")]) == 0
    assert exported(tmp_path / "run", tmp_path / "out") == config
    assert content(tmp_path / "out", "generation_config.json") == {"eos_token_id": 5, "pad_token_id": BPE.end}
    assert content(tmp_path / "out", "tokenizer_config.json")["eos_token"] == "<|endoftext|>"


def test_an_end_that_only_the_model_names_goes_with_the_tokenizer(tmp_path):
    """Its config.json is not beside the run's tokenizer.json."""
    config = config_of("LlamaForCausalLM", vocab_size=272, eos_token_id=270)
    folder = write_folder(tmp_path / "theirs", config, random_tensors(shapes_of(config)))
    inner = tokenizers.Tokenizer.from_str(BPE._text)
    inner.add_special_tokens(["<|im_end|>"])
    (folder / "tokenizer.json").write_text(inner.to_str())
    assert main(["from-hf", str(folder), "--workdir", str(tmp_path / "run")]) == 0
    for place in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "0"):
        assert load_tokenizer(place).end == 270
    assert exported(tmp_path / "run", tmp_path / "out") == config
    about = content(tmp_path / "out", "tokenizer_config.json")
    assert (about["eos_token"], about["tokenizer_class"]) == ("<|im_end|>", "PreTrainedTokenizerFast")


def test_a_generation_config_that_is_none_is_named(tmp_path, capsys):
    config = config_of("LlamaForCausalLM")
    folder = write_folder(tmp_path / "theirs", config, random_tensors(shapes_of(config)))
    (folder / "generation_config.json").write_text("{")
    assert main(["from-hf", str(folder), "--workdir", str(tmp_path / "run")]) == 3
    assert f"{folder}/generation_config.json cannot be read: " in capsys.readouterr().err
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, "</s>"]}')
    assert main(["from-hf", str(folder), "--workdir", str(tmp_path / "run")]) == 2
    message = "generation_config.json: eos_token_id=[2, '</s>'] is not supported; supported: a token's id, a list"
    assert message in capsys.readouterr().err and not list(tmp_path.glob("run*"))


SAYS_ENDS = {
    "both: as in transformers, the one about generation decides": ([3, 4], {"eos_token_id": [271, 5]}, [271, 5]),
    "config.json alone": ([3, 4], None, [3, 4]),
    "config.json, since the other has none": (3, {"temperature": 0.5}, [3]),
    "none": (None, {"eos_token_id": None}, []),
}


@pytest.mark.parametrize("what", SAYS_ENDS)
def test_an_import_ends_its_texts_where_its_configs_say(tmp_path, capsys, what):
    eos, generation, ends = SAYS_ENDS[what]
    imported(tmp_path, generation=generation, eos_token_id=eos)
    said = f"a generated text ends at one of the tokens {', '.join(map(str, ends))}"
    assert (said in capsys.readouterr().out) == bool(ends)
    run = px.load(tmp_path / "run")
    assert {*run.ends} == {run.tokenizer.end, *ends}


ENDS = [271, 3]  # the first ends documents, too


def test_what_ends_a_text_is_kept_by_export_and_import_and_as_another_architecture(tmp_path, capsys):
    """An id that the model lacks ends nothing."""
    imported(tmp_path, generation={"eos_token_id": [3, 9999, 271]})
    assert "eos_token_id=9999 ends nothing: vocab_size=272 has no such token" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "ours")]) == 0
    assert main(["import", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    assert px.load(tmp_path / "back").ends == (*ENDS,)
    assert exported(tmp_path / "back", tmp_path / "out")["eos_token_id"] == ENDS
    assert content(tmp_path / "out", "generation_config.json")["eos_token_id"] == ENDS


def test_generation_stops_at_an_end_of_the_import(tmp_path):
    imported(tmp_path)
    run, how = px.load(tmp_path / "run"), dict(tokens=8, temperature=0.0)
    prompt = encode(run.tokenizer, "It is")
    (free,) = generate(run.model, run.params, [prompt], SampleConfig(**how), vocab=run.tokenizer.vocab)
    (tmp_path / "theirs" / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, int(free[4])]}))
    assert main(["from-hf", str(tmp_path / "theirs"), "--workdir", str(tmp_path / "stops")]) == 0
    kept = [*prompt, *free[: free.tolist().index(free[4])]]
    assert (
        px.load(tmp_path / "stops").generate("It is", **how)
        == run.tokenizer.decode(kept)
        != run.generate("It is", **how)
    )


def test_a_run_from_an_import_ends_its_texts_there(corpus, tmp_path):
    imported(tmp_path, generation={"eos_token_id": [3, 271]})
    assert px.load(tuned(corpus, tmp_path)).ends == (*ENDS,)


# ---- imports of earlier versions, which chose the end of a document by its usual name


def made_earlier(run):
    """As an earlier version left an import: its files say another end than the one by which it went, and the ends of a
    text are only in the record."""
    step = run / "checkpoints" / "0"
    about = read_manifest(step.parent, 0)
    about["settings"]["corpus"]["tokenizer"] = load_tokenizer(step).earlier.fingerprint
    for file in (run / "generation_config.json", step / "generation_config.json", step / "manifest.json"):
        file.unlink(missing_ok=True)
    write_manifest(step, about)
    return load_tokenizer(step).earlier


def test_an_import_of_an_earlier_version_keeps_its_end_and_ends_its_texts_as_its_record_says(tmp_path):
    imported(tmp_path, generation={"eos_token_id": [3, 5]})
    usual = made_earlier(tmp_path / "run")
    run = px.load(tmp_path / "run")
    assert usual.token(usual.end) == "<|endoftext|>" and load_tokenizer(tmp_path / "run").end == 271
    assert run.tokenizer.end == usual.end and run.ends == (usual.end, 3, 5)
    (tmp_path / "text.txt").write_text("It is a truth. " * 40)
    found = evaluate(tmp_path / "run", load_settings(tmp_path / "run"), data=str(tmp_path / "text.txt"))
    assert found.tokens
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "ours")]) == 0
    assert main(["import", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    assert px.load(tmp_path / "back").ends == (usual.end, 3, 5)


@pytest.mark.parametrize(
    "record", ["{", "[]", '{"config": {}, "files": {"generation_config.json": 5}}', '{"files": {}}']
)
def test_a_record_that_no_import_wrote_is_named_where_it_says_the_ends(record):
    with pytest.raises(CheckpointError, match="huggingface.json of the checkpoint cannot be read: "):
        ends_of(Bytes(), 257, {"huggingface.json": record.encode()})


@pytest.mark.fast(2)
@pytest.mark.parametrize("tokenizer", ["its file", "prepared", "auto"])
def test_a_run_starts_from_an_import_of_an_earlier_version(corpus, tmp_path, tokenizer):
    imported(tmp_path)
    usual = made_earlier(tmp_path / "run")
    file = str(tmp_path / "run" / "tokenizer.json")
    how = {"data__tokenizer": "auto" if tokenizer == "auto" else file, "data__cache": ""}
    if tokenizer == "prepared":  # by this version
        prepare_texts(["It is a truth. " * 60] * 4, tmp_path / "made", tokenizer=file)
        how |= {"data__source": "prepared", "data__path": str(tmp_path / "made")}
    run = tuned(corpus, tmp_path, **how)
    log, differs = (run / "log.txt").read_text(), tokenizer == "prepared"
    assert ("ended its documents with another token, as an earlier version chose it" in log) == differs
    assert (px.load(run).tokenizer.end == usual.end) != differs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_module, "write_shards", lambda *_, **__: pytest.fail("text is tokenised again"))
        assert px.load(run).batch().keys() == {"tokens", "labels", "segments", "positions"}


def test_data_of_an_earlier_version_is_prepared_again_as_it_was(tmp_path):
    published(tmp_path / "theirs")
    file, made = str(tmp_path / "theirs" / "tokenizer.json"), tmp_path / "made"
    before = prepare_texts(["It is a truth"] * 20, made, tokenizer=file)
    for folder in (tmp_path / "theirs", made):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|user|>"}))
    assert load_tokenizer(file).fingerprint != before.tokenizer_fingerprint
    assert prepare_texts(["It is a truth"] * 20, made, tokenizer=file) == before
    (made / "00000.ids").write_bytes(b"")
    assert prepare_texts(["It is a truth"] * 20, made, tokenizer=file) == before
