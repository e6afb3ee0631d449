"""Configs of earlier versions: renamed keys, and keys that they lack."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any

from parallax.config.sections import SECTIONS
from parallax.errors import ConfigError, check_choice

# Replacements of removed keys: a function of the old value and all sections, which returns values by key, as
# "section.key", and raises ConfigError for a value that the old key did not accept.
RENAMED: dict[str, Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]] = {
    "pipeline.gather": lambda value, sections: _policy_of_gather(value),
    "mesh.across_slices": lambda value, sections: _across_slices(value),
    "pipeline.branches": lambda value, sections: _branches(value),
}
# Keys that the first runs did not have; these runs behaved as the defaults say.
ADDED = {
    "mesh": "replica cp ep",
    "model": "vocab_multiple layers_of experts experts_per_token d_expert shared_experts router_score "
    "router_normalized router_scale router_groups router_groups_chosen sliding_window matmul matmul_parts "
    "matmul_residuals matmul_scales matmul_ranges matmul_weight_gradients mlp norm dense kinds init_out rope "
    "attention_scale score_cap sinks embedding_scale residual_scale logit_scale logit_cap rope_fraction qk_norm_over "
    "qk_norm_after_rope qk_norm_scale shared_gate router_shift expert_activation expert_limit expert_bias "
    "rope_truncate qk_clip "
    "norm_scale norm_bias norm_place branches activation mlp_bias out_bias "
    "activation_limit rope_short_factors rope_long_factors lora_rank lora_alpha lora_on lora_dropout lora_base depth",
    "layout": "context order exchange exchange_hosts expert_chunk_tokens",
    "pipeline": "residuals_on grads_dtype grads_on",
    "data_parallel": "policy exceptions",
    "fsdp": "gather_dtype bucket",
    "loss": "name balance_coefficient router_z_coefficient table_first",
    "optimizer": "balance_rate m_dtype v_dtype weights_dtype states_on masters_on frozen",
    "data": "special_tokens where mixture phases cache_bytes format chat_template loss_on too_long",
    "train": "compile_cache continue_from other_data slow_process_share slow_process_steps tasks tasks_folder "
    "tasks_every_steps tasks_limit",
    "checkpoint": "keep_every_steps local local_every_steps deadline_secs",
    "sample": "special_tokens",
}
GATHER = {"microbatch": ("zero3", ""), "layers": ("zero1", "embedding=zero3 head=zero3"), "step": ("zero1", "")}


def _policy_of_gather(gather: Any) -> dict[str, str]:
    check_choice("pipeline.gather", gather, GATHER)
    policy, exceptions = GATHER[gather]
    return {"data_parallel.policy": policy, "data_parallel.exceptions": exceptions}


def _across_slices(axis: Any) -> dict[str, str]:
    """The axis between slices is mesh.replica if there are replicas, otherwise mesh.pp."""
    check_choice("mesh.across_slices", axis, ("dp", "pp"))
    return {}


def _branches(value: Any) -> dict[str, str]:
    """Idle ranks always skip the work."""
    if value == "mask":
        raise ConfigError("pipeline.branches='mask' was removed: idle ranks always skip the work; leave the key out.")
    check_choice("pipeline.branches", value, ("skip",))
    return {}


def renamed(config: Mapping[str, Any], chosen: Collection[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """A config with the current names of keys, and a list of renamed keys; keys in `chosen` stay as they are."""
    today = {name: dict(keys) if isinstance(keys, Mapping) else keys for name, keys in config.items()}
    said = []
    for old, convert in RENAMED.items():
        section, _, key = old.partition(".")
        if not isinstance(today.get(section), dict) or key not in today[section]:
            continue
        value = today[section].pop(key)
        new = {name: made for name, made in convert(value, config).items() if name not in chosen}
        if not today[section] and section not in SECTIONS:
            del today[section]
        for name, made in new.items():
            section, _, key = name.partition(".")
            today.setdefault(section, {})[key] = made
        said.append(f"{old}={value!r} is now {', '.join(f'{name}={made!r}' for name, made in new.items()) or 'no key'}")
    return today, said


def of_today(saved: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The saved config of a run with the current keys, and a list of the changes.

    >>> today, said = of_today({"optimizer": {"name": "adamw"}, "sample": {"tokens": 64}})
    >>> today["sample"], said[-1]
    ({'special_tokens': 'text', 'tokens': 64}, "sample.special_tokens='text' is added")
    """
    today, said = renamed(saved)
    for name, keys_added in ADDED.items():
        added = {key: getattr(SECTIONS[name], key) for key in keys_added.split()}
        keys = today.get(name, {} if len(added) == len(fields(SECTIONS[name])) else None)
        if isinstance(keys, Mapping):
            lacking = {key: value for key, value in added.items() if key not in keys}
            today |= {name: {**lacking, **keys}} if lacking else {}
            said += [f"{name}.{key}={value!r} is added" for key, value in lacking.items()]
    return today, said
