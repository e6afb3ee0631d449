"""Chats of `transformers` are rendered, tokenized, masked and learned here as there."""

import functools
import io
import json
import sys

import numpy as np
import pytest
from support.chat_examples import turn, write_chats
from support.chat_formats import CHAT, FORMS, write_tokenizer

import parallax as px
from parallax.cli import generate
from parallax.cli.command import load_config
from parallax.cli.convert import main
from parallax.config.settings import read_settings
from parallax.data.chat import ChatTemplate
from parallax.data.conversations import ID, LEARNED, RecordFormat, encode_marked
from parallax.data.tokenizer import load_tokenizer
from parallax.step.batches import open_split
from parallax.storage.run_files import RunFiles, read_metrics
from parallax.training.run import train

EXTRA = 'needs the extra hf-tests: pip install -e ".[hf-tests]" -c constraints.txt'
torch = pytest.importorskip("torch", reason=EXTRA)
pytest.importorskip("transformers", reason=EXTRA)

from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

MORE = [
    {"role": "user", "content": "A\n"},
    {"role": "assistant", "content": "  spaces  and\n\n\nlines, 日本 "},
    {"role": "user", "content": "What?"},
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": "It is"},
    {"role": "assistant", "content": "4"},
]


@pytest.mark.parametrize("name", FORMS)
def test_text_ids_and_mask_are_theirs(tmp_path, name):
    """Of a template with tags, and of the same without: their mask is of the first."""
    form = FORMS[name]
    marked = write_tokenizer(tmp_path / "marked", form, form.template)
    plain = write_tokenizer(tmp_path / "plain", form, form.published)
    theirs = AutoTokenizer.from_pretrained(marked)
    for chat in (form.chat, CHAT[1:], MORE):
        text = theirs.apply_chat_template(chat, tokenize=False)
        there = theirs.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        assert 0 < sum(there["assistant_masks"]) < len(there["input_ids"])
        for folder in (marked, plain):
            template = ChatTemplate.of_tokenizer(folder)
            document = RecordFormat("chat", ("messages",), template).document({"messages": chat}, "here")
            assert document == template.render(chat) == text
            (ids,) = encode_marked(load_tokenizer(folder), [document], special_tokens="tokens")
            assert (ids & ID).tolist() == there["input_ids"]
            assert ((ids & LEARNED) > 0).tolist() == [bool(mask) for mask in there["assistant_masks"]]
        prompt = theirs.apply_chat_template(chat[:-1], tokenize=False, add_generation_prompt=True)
        assert template.render(chat[:-1], add_generation_prompt=True) == prompt
    assert FORMS[name].text == theirs.apply_chat_template(form.chat, tokenize=False)


# ---- fine-tuning

STEPS, RATE = 10, 3e-3
ADAMW = dict(learning_rate=RATE, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.0, clip_norm=1.0)
# Sums over the answers of a step in other orders, through ten steps.
LOSS_ERROR = 1e-5
ASKED = [{"role": "user", "content": "What is 2 + 2?"}]
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


def chats_of_numbers(count=48):
    """Sums, asked and answered once or twice."""
    pairs = [turn(f"What is {n} + {n % 5}?", f"It is {n + n % 5}.") for n in range(count)]
    return [pairs[n] + (pairs[(n * 7) % count] if n % 3 == 0 else []) for n in range(count)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tiny model and its tokenizer as they are published, the run made of it, and a file of chats."""
    folder = tmp_path_factory.mktemp("chat")
    theirs = folder / "theirs"
    write_tokenizer(theirs, FORMS["qwen2.5"], FORMS["qwen2.5"].published)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(theirs)
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **SIZES)
    config.eos_token_id = config.bos_token_id = tokenizer.eos_token_id
    config.pad_token_id = None  # PyTorch gives its row of the table no gradient
    LlamaForCausalLM(config).save_pretrained(theirs)
    assert main(["from-hf", str(theirs), "--workdir", str(folder / "run"), "--config.model.dtype=float32"]) == 0
    write_chats(folder / "chats.jsonl", chats_of_numbers())
    return folder


def tuning(folder, **changes):
    """The config of a fine-tuning of the imported model on the file."""
    config = load_config(str(folder / "run" / "config.json"))[0]
    config.data.update(
        dict(source="jsonl", path=str(folder / "chats.jsonl"), format="chat", cache=str(folder / "cache"))
    )
    config.data.update(dict(tokenizer="auto", seq=256, global_batch=8, eval_fraction=0.0))
    config.train.update(dict(init_from=str(folder / "run"), steps=STEPS, eval_batches=0))
    config.optimizer.update(ADAMW | dict(schedule="constant", warmup_steps=0))
    config.sample.prompt = ""
    for key, value in changes.items():
        section, name = key.split("__")
        config[section][name] = value
    return config


def losses_of(run):
    return [row["train/loss"] for row in read_metrics(run / "metrics.jsonl")]


@functools.cache
def answer_of(run):
    prompt = ChatTemplate.of_tokenizer(run).render(ASKED, add_generation_prompt=True)
    return px.load(run).generate(prompt, tokens=12, temperature=0.0, special_tokens="tokens")[len(prompt) :]


def their_answer(model, tokenizer):
    inputs = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=12)[0, inputs.input_ids.shape[1] :]
    return tokenizer.decode(ids, skip_special_tokens=False).removesuffix(tokenizer.eos_token)


def conversations_of_steps(folder):
    """The conversations in the batch of each step, as lists of messages."""
    lines = (folder / "chats.jsonl").read_text().splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    reader = open_split(read_settings(tuning(folder)), RunFiles(folder / "tuned"), "train")
    windows = [np.split(reader.windows_of(step), 8) for step in range(STEPS)]  # an epoch's last may be the next's first
    return [[chats[number] for window in each for number in reader.documents_of(window)] for each in windows]


def their_tuning(folder):
    """Losses of PyTorch's own training on the same conversations, one after another and not packed, and the model."""
    model = LlamaForCausalLM.from_pretrained(folder / "theirs").train()
    tokenizer = AutoTokenizer.from_pretrained(folder / "theirs")
    template = FORMS["qwen2.5"].template
    adamw = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses = []
    for chats in conversations_of_steps(folder):
        nats, tokens = 0.0, 0
        for chat in chats:
            options = dict(chat_template=template, return_dict=True, return_assistant_tokens_mask=True)
            there = tokenizer.apply_chat_template(chat, **options)
            ids, mask = torch.tensor([there["input_ids"]]), torch.tensor(there["assistant_masks"][1:]) > 0
            nats += cross_entropy(model(ids).logits[0, :-1][mask], ids[0, 1:][mask], reduction="sum")
            tokens += int(mask.sum())
        loss = nats / tokens
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), ADAMW["clip_norm"])
        adamw.step()
        losses.append(loss.item())
    return losses, model.eval(), tokenizer


@pytest.fixture(scope="module")
def tuned(model):
    train(tuning(model), model / "tuned")
    return model / "tuned"


@pytest.mark.slow
def test_ten_steps_of_fine_tuning_have_their_losses_and_answers(model, tuned):
    theirs, there, tokenizer = their_tuning(model)
    ours = losses_of(tuned)
    assert len(ours) == STEPS and ours[-1] < ours[0] - 0.5
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=LOSS_ERROR)
    untrained = LlamaForCausalLM.from_pretrained(model / "theirs").eval()
    assert answer_of(model / "run") == their_answer(untrained, tokenizer)
    assert answer_of(tuned) == their_answer(there, tokenizer) != answer_of(model / "run")


@pytest.mark.slow
def test_a_conversation_with_the_tuned_run_stops_where_its_template_ends_a_turn(tuned, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{ASKED[0]['content']}\n"))
    one_device = ["--pp=1", "--dp=1", "--tp=1", "--simulate=0"]
    assert generate.main([f"--workdir={tuned}", "--chat", "--tokens=99", "--temperature=0", *one_device]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{answer_of(tuned)}\n" and len(printed.out) < 12
    assert f"{STEPS}/chat_template.jinja; 256 tokens of context" in printed.err


@pytest.mark.slow
def test_the_export_answers_alike(model, tuned):
    assert main(["to-hf", str(tuned), str(model / "out")]) == 0
    there, tokenizer = (kind.from_pretrained(model / "out") for kind in (AutoModelForCausalLM, AutoTokenizer))
    prompt = ChatTemplate.of_tokenizer(tuned).render(ASKED, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, tokenize=False) == prompt
    assert their_answer(there.eval(), tokenizer) == answer_of(tuned)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [dict(pp=2, dp=2, tp=2), dict(dp=4, tp=2), dict(cp=2, tp=2)], ids=str)
def test_fine_tuning_has_the_same_losses_on_meshes(model, tuned, mesh):
    changes = {f"mesh__{axis}": ranks for axis, ranks in mesh.items()}
    train(tuning(model, pipeline__microbatches=2 if "pp" in mesh else 1, **changes), model / str(mesh))
    np.testing.assert_allclose(losses_of(model / str(mesh)), losses_of(tuned), rtol=1e-5)


@pytest.mark.slow
def test_adapters_learn_from_chats(model):
    train(tuning(model, model__lora_rank=8, model__lora_alpha=16.0), model / "adapters")
    losses = losses_of(model / "adapters")
    assert losses[-1] < losses[0] - 0.1
