"""Tasks of lm-evaluation-harness, of each kind one, and their documents."""

import json
import pathlib

TASKS = {
    "choices": "output_type: multiple_choice\ndoc_to_choice: '{{choices}}'\n"
    "metric_list:\n- metric: acc\n- metric: acc_norm\n- metric: brier_score\n",
    "rolling": "output_type: loglikelihood_rolling\nmetric_list:\n- metric: byte_perplexity\n",
    "writes": "output_type: generate_until\ngeneration_kwargs: {until: ['. '], max_gen_toks: 12, do_sample: false}\n"
    "metric_list:\n- metric: exact_match\n- metric: chrf\n",
}  # fmt: skip
DOCUMENTS = {
    "choices": [
        {"text": "It is a", "choices": [" truth", " lie", " small text"], "target": 0},
        {"text": "a small text is enough to see a", "choices": [" house", " loss fall", " dog"], "target": 1},
        {"text": "and it falls faster when ", "choices": ["it repeats", "nobody looks at it", "?"], "target": 0},
    ],
    "rolling": [{"text": "", "target": "It is a truth. " * 9}, {"text": "", "target": "Ünicode, and it falls faster."}],
    "writes": [
        {"text": "It is a truth that a", "target": " small text is enough"},
        {"text": "and it falls", "target": " faster when it repeats"},
        {"text": "Document 3. It is", "target": " a truth"},
    ],
}


def write_tasks(folder: pathlib.Path) -> pathlib.Path:
    """Descriptions of the tasks, and their documents, in a folder."""
    folder.mkdir()
    for name, form in TASKS.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS[name]))
        about = f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files: {{test: {file}}}\ntest_split: test\n"
        about += "doc_to_text: '{{text}}'\ndoc_to_target: '{{target}}'\n"
        (folder / f"{name}.yaml").write_text(about + form)
    return folder
