"""Checks that a model, a mesh and a schedule fit together."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from parallax.config.remat import REMAT_PARTS, check_residuals_on
from parallax.config.sections import (
    AUTO,
    BLOCKS,
    COMPUTE,
    EXPERTS,
    MLP,
    MOST_INT8_PRODUCTS,
    MXFP8,
    SHAPES_OF_MLP,
    STREAMS,
    LayoutConfig,
    ModelConfig,
    PipelineConfig,
)
from parallax.config.settings import Settings
from parallax.errors import LONGEST_PATH, ConfigError, divisors, listed, quoted
from parallax.hardware.chips import LANES, name_of_kind
from parallax.model.families import CONTEXTS, GATHERED, RING, WHOLE
from parallax.model.kernels.cudnn import WINDOWS_SINCE, cudnn_version, widest_head
from parallax.model.kernels.platforms import ATTENTION_KERNELS
from parallax.model.kernels.triton import TRITON_WIDEST
from parallax.model.products import WIDEST_BLOCKS
from parallax.schedules import Schedule
from parallax.sharding.activations import CONTEXT_AXIS, EXPERT_AXIS
from parallax.sharding.bucket import BY_PARAMETER
from parallax.sharding.compiler import MOST_FOR_EXCHANGES, compiles_ragged
from parallax.sharding.layers_on_ranks import stacks_of
from parallax.sharding.layout import COUNTING_DIMS, Layout, named_leaves
from parallax.sharding.mesh import chips_of_slice, hosts_along
from parallax.sharding.parameter import Role
from parallax.sharding.plan import ShardingPlan

# Kernels beside xla that support each form of keys. The one for Triton needs the queries of whole rows.
KERNELS_OF = {WHOLE: ("splash", "cudnn", "triton"), GATHERED: ("splash", "cudnn"), RING: ()}


def check_on_mesh(model: ModelConfig, settings: Settings, mesh: Any, schedule: Schedule) -> None:
    """Raise ConfigError if settings do not fit each other or the mesh. `model` is theirs, with the kernel that runs."""
    layout, pipeline, sizes = settings.layout, settings.pipeline, mesh.shape
    check_divides(model, sizes)
    check_context(model, layout.context, sizes)
    check_kernel(model, mesh)
    check_matmul(model, layout, sizes)
    _check_exchange_on(layout, mesh)
    check_qk_clip(model, settings, sizes)
    check_token_streams(model, layout)
    check_schedule_is_used(pipeline, sizes)
    check_stages(model, schedule)
    check_remat(model, pipeline.remat)
    check_remat(model, pipeline.residuals_on, "pipeline.residuals_on")
    check_residuals_on(pipeline.residuals_on, pipeline.remat)
    check_masters(model, settings.optimizer.masters_on)


def check_plan(model: ModelConfig, settings: Settings, plan: ShardingPlan, part_of_table: str) -> None:
    """Raise ConfigError if settings ask for moves that this plan does not have, or if arrays do not divide over axes.
    `part_of_table` is the part of the model that stores the head's table."""
    row, rows = plan.rows[part_of_table]["table"], jax.tree.leaves(plan.rows[BLOCKS])
    exceptions = settings.data_parallel.exceptions
    policy = f"with data_parallel.policy={settings.data_parallel.policy!r}"
    policy += f" and data_parallel.exceptions={exceptions!r}" if exceptions else ""
    if settings.fsdp.bucket != BY_PARAMETER and all(row.resident == row.compute == row.summed for row in rows):
        raise ConfigError(
            f"fsdp.bucket={settings.fsdp.bucket!r} sends matrices of a layer together, but {policy} none is sent when "
            f"a layer runs; use fsdp.bucket={BY_PARAMETER!r}, or the policy 'zero3' for layers."
        )
    plan.check_grads()
    check_layouts(model, plan.at_rest, plan.shapes, plan.axis_sizes)
    if settings.loss.table_first and not (row.spec.is_trained and row.summed != row.compute):
        why = f"{policy} it is sent once a step" if row.spec.is_trained else f"{part_of_table}/table is not trained"
        raise ConfigError(
            "loss.table_first=True sends the gradient of the head's table before layers run backward, but "
            f"{why}; use loss.table_first=False, or the policy 'zero3' for a trained {part_of_table}."
        )
    check_blocks_of_operands(model, plan.rows, plan.axis_sizes)


def check_divides(model: ModelConfig, axis_sizes: Mapping[str, int]) -> None:
    """Raise ConfigError if a model's sizes do not divide over the mesh."""
    if model.vocab < 2:
        raise ConfigError(f"model.vocab={model.vocab} must be 2 or more; 0 is for train.py, which asks the tokenizer.")
    for kind, block in model.blocks.items():
        base = model.base_of(kind)
        # The width of a user's block is its own, unless all layers are.
        width = SHAPES_OF_MLP.get(base, "" if model.dense_widths else "d_ff")
        for dim in ("heads", width) if width else ("heads",):
            _check_dim(model, dim, ("tp",), axis_sizes, size=getattr(block, dim))
    for dim in ("d_model", "vocab"):
        _check_dim(model, dim, ("tp",), axis_sizes)
    if model.has_mixtures:
        _check_dim(model, "experts", ("ep",), axis_sizes)
    tp = axis_sizes["tp"]
    for heads in dict.fromkeys(block.kv_heads for block in model.blocks.values()):
        if model.attention != "mla" and heads % tp and tp % heads:
            raise ConfigError(
                f"{_key_of(model, 'kv_heads', heads)}={heads} and mesh.tp={tp}: one must divide the other; "
                f"use kv_heads in {listed(divisors(tp))} or a multiple of tp."
            )


def _key_of(model: ModelConfig, name: str, value: int) -> str:
    """The key with this value: the model's, or that of a kind of layers."""
    of_kinds = (f"model.kinds.{kind}.{name}" for kind, block in model.blocks.items() if block.sizes[name] == value)
    return f"model.{name}" if model.sizes[name] == value else next(of_kinds, f"model.{name}")


def check_context(model: ModelConfig, context: str, axis_sizes: Mapping[str, int]) -> None:
    """Raise ConfigError if this form of context parallelism cannot shard the model's heads, or if the attention kernel
    does not support it. With one context rank everything is allowed."""
    if axis_sizes.get(CONTEXT_AXIS, 1) == 1:
        return
    form = CONTEXTS[context]
    if model.kernel not in (AUTO, "xla", *KERNELS_OF[form.meets]):
        others = ", ".join(repr(name) for name, other in CONTEXTS.items() if model.kernel in KERNELS_OF[other.meets])
        what = "sends keys from rank to rank" if form.meets == RING else "splits the queries of a row over ranks"
        raise ConfigError(
            f"layout.context={context!r} {what}, which model.kernel={model.kernel!r} does not "
            f"support; use kernel='xla', or layout.context in {{{others}}}."
        )
    axes = Layout.parse(form.heads).cut_of("heads")
    for block in model.blocks.values():
        why = f", which shard them under layout.context={context!r}"
        _check_dim(model, "heads", axes, axis_sizes, why, size=block.heads)


def check_matmul(model: ModelConfig, layout: LayoutConfig, axis_sizes: Mapping[str, int]) -> None:
    """Raise ConfigError if ranks would round partial sums of a gradient to 8 bits that one device would not round:
    scales are the same on every mesh."""
    if model.matmul_of("attention") == "compute":
        return
    tp, cp, asked = axis_sizes["tp"], axis_sizes.get(CONTEXT_AXIS, 1), f"model.matmul={model.matmul!r} of attention"
    for heads in dict.fromkeys(block.kv_heads for block in model.blocks.values()):
        if model.attention != "mla" and heads % tp and layout.tensor_parallel == "column_row":
            raise ConfigError(
                f"{asked}: mesh.tp={tp} ranks share {_key_of(model, 'kv_heads', heads)}={heads}, and each would round "
                f"its own summand of their gradients; use tp in {listed(divisors(heads))}, "
                "layout.tensor_parallel='scatter' or model.matmul_parts='mlp'."
            )
    if model.attention == "mla" and cp > 1 and CONTEXTS[layout.context].meets == GATHERED:
        raise ConfigError(
            f"{asked}: with layout.context={layout.context!r} each of mesh.cp={cp} ranks would round its own summand "
            "of the gradients of all keys; use layout.context='ring' or 'ulysses', or model.matmul_parts='mlp'."
        )


def _check_exchange_on(layout: LayoutConfig, mesh: Any) -> None:
    device, ranks = device_of(mesh), mesh.shape.get(EXPERT_AXIS, 1)
    platform = device.platform if device is not None else ""
    hosts = hosts_along(mesh, EXPERT_AXIS) if ranks > 1 and platform == "gpu" else None
    check_exchange(layout, ranks, platform, hosts)
    if platform == "tpu" and isinstance(mesh, Mesh):  # an abstract mesh does not say how its chips lie in slices
        check_ragged(layout, ranks, name_of_kind(device.device_kind), chips_of_slice(mesh))


def check_ragged(layout: LayoutConfig, ranks: int, chip_name: str, chips: int) -> None:
    """Raise ConfigError if layout.exchange asks for messages that XLA does not compile for slices of so many chips."""
    if layout.exchange == "ragged" and ranks > 1 and not compiles_ragged(chip_name, chips):
        raise ConfigError(
            f"layout.exchange='ragged' with mesh.ep={ranks} needs a ragged all-to-all, which XLA refuses for slices of "
            f"{chip_name} with more than {MOST_FOR_EXCHANGES[chip_name]} chips, and this one has {chips}; use "
            "exchange='gather', or 'auto', which is that here."
        )


def check_exchange(layout: LayoutConfig, ranks: int, platform: str, hosts: int | None) -> None:
    """Raise ConfigError if tokens cannot be sent once to each host, or if these ranks of ep are on other `hosts` than
    layout.exchange_hosts says: 0 if hosts have no equal parts, None if that is not known. With one rank everything is
    allowed."""
    asked = layout.exchange_hosts
    if asked == 1 or ranks == 1:
        return
    said = f"layout.exchange_hosts={asked}"
    if platform == "tpu":
        raise ConfigError(
            f"{said}: a chip of a slice sends to all others over its links, whatever their hosts; use exchange_hosts=1 "
            "on TPUs."
        )
    if layout.exchange != "ragged":
        raise ConfigError(
            f"{said} sends a token once to each host of its experts, and layout.exchange={layout.exchange!r} does not "
            "ask for that; use exchange='ragged', or exchange_hosts=1."
        )
    if ranks % asked:
        raise ConfigError(
            f"{said} does not divide mesh.ep={ranks}; use the number of hosts on which these ranks are, one of "
            f"{listed(divisors(ranks))}."
        )
    if hosts not in (None, asked):
        where = f"on {hosts} host{'s' * (hosts > 1)}" if hosts else "not in equal parts on hosts, one after the other"
        raise ConfigError(f"{said}, but the mesh.ep={ranks} ranks are {where}; use exchange_hosts={hosts or 1}.")


def check_qk_clip(model: ModelConfig, settings: Settings, axis_sizes: Mapping[str, int]) -> None:
    """Raise ConfigError if heads cannot be clipped by their largest logits."""
    if not model.qk_clip:
        return
    asked, context, ranks = f"model.qk_clip={model.qk_clip}", settings.layout.context, axis_sizes.get(CONTEXT_AXIS, 1)
    if model.attention not in ("mla", "gqa"):
        raise ConfigError(
            f"{asked} needs model.attention='mla' or 'gqa', not {quoted(model.attention)}; use qk_clip=0."
        )
    if model.dense != "dense":
        raise ConfigError(
            f"{asked} scales the kernels of the package's projections, and model.dense={quoted(model.dense)} makes "
            "others; use qk_clip=0, or dense='dense'."
        )
    if any(block.qk_norm for block in model.blocks.values()):
        raise ConfigError(
            f"{asked} scales projections down, which model.qk_norm=True normalizes again; use qk_clip=0, or "
            "qk_norm=False."
        )
    if model.score_cap:
        raise ConfigError(
            f"{asked}: model.score_cap={model.score_cap} bounds scores as it is; use qk_clip=0, or score_cap=0."
        )
    if ranks > 1 and CONTEXTS[context].meets == RING:
        others = ", ".join(repr(name) for name, form in CONTEXTS.items() if form.meets != RING)
        raise ConfigError(
            f"{asked} needs the keys of whole rows, and layout.context={context!r} sends those of mesh.cp={ranks} "
            f"ranks from rank to rank; use qk_clip=0, or layout.context in {{{others}}}."
        )
    if settings.optimizer.masters_on != "device":
        raise ConfigError(
            f"{asked} scales parameters after the update, and optimizer.masters_on="
            f"{settings.optimizer.masters_on!r} keeps them elsewhere; use qk_clip=0, or masters_on='device'."
        )


def check_token_streams(model: ModelConfig, layout: LayoutConfig) -> None:
    """Raise ConfigError if products are not those of token streams: plain ones, since scales of 8 bits are of all
    tokens, and an adapter's dropout knows its tokens by their places."""
    if layout.tensor_parallel != STREAMS:
        return
    if model.attention == "mla" and not (model.has_dense or model.shared_experts):
        raise ConfigError(
            f"layout.tensor_parallel={STREAMS!r} does nothing with model.attention='mla' and model.layers_of="
            f"{quoted(model.layers_of)}: latent attention and experts send as in 'column_row'; use "
            "tensor_parallel='column_row'."
        )
    others = {"lora_rank": 0, "dense": "dense"}
    if {*model.products_in_8_bits} - {EXPERTS}:
        others["matmul"] = COMPUTE
    for key, plain in others.items():
        if getattr(model, key) != plain:
            raise ConfigError(
                f"layout.tensor_parallel={STREAMS!r} multiplies the tokens of each tp rank for themselves, which "
                f"model.{key}={getattr(model, key)!r} does not; use {key}={plain!r}, or tensor_parallel='column_row'."
            )


def check_blocks_of_operands(model: ModelConfig, rows: Any, axis_sizes: Mapping[str, int]) -> None:
    """Raise ConfigError if ranks would have other blocks of an operand than one device; `rows` are those of a plan."""
    widest = WIDEST_BLOCKS.get(model.matmul_scales, 0)
    parts = {*model.products_in_8_bits, *(["shared"] if MLP in model.products_in_8_bits else [])}
    stacks = _blocks_by_stack(model)
    for name, row in named_leaves(rows).items() if widest else ():
        if row.spec.role != Role.WEIGHT or row.spec.part not in parts:
            continue
        for dim, axes in zip(row.compute.names, row.compute.axes):
            pieces = math.prod(axis_sizes.get(axis, 1) for axis in axes)
            size = stacks[row.spec.stack].sizes.get(dim, 0)
            if dim not in COUNTING_DIMS and math.gcd(size, widest) != math.gcd(size // pieces, widest):
                key, block = _key_of(model, dim, size), math.gcd(size, widest)
                raise ConfigError(
                    f"model.matmul_scales={model.matmul_scales!r}: {' x '.join(f'mesh.{axis}' for axis in axes)}="
                    f"{pieces} ranks cut {key}={size} of {name} within a block of {block}; use "
                    f"{dim} in multiples of {widest * pieces}, fewer ranks, or matmul_scales='row'."
                )


def check_products_of_tokens(model: ModelConfig, seq: int, cp: int, tokens: int) -> None:
    """Raise ConfigError if gradients of weights in 8 bits cannot sum these `tokens` of a microbatch on a device, or if
    context ranks cut their blocks."""
    if model.matmul_weight_gradients == COMPUTE:
        return
    if model.matmul == "int8" and tokens > MOST_INT8_PRODUCTS:
        raise ConfigError(
            f"model.matmul_weight_gradients='8bit' sums int8 products of {tokens} tokens of a microbatch in int32, "
            f"which holds {MOST_INT8_PRODUCTS} of them; use more pipeline.microbatches, matmul='float8' or "
            "matmul_weight_gradients='compute'."
        )
    chunk, widest = seq // (2 * cp) if cp > 1 else seq, WIDEST_BLOCKS[MXFP8]
    if model.matmul_scales == MXFP8 and math.gcd(chunk, widest) != math.gcd(seq, widest):
        raise ConfigError(
            f"model.matmul_weight_gradients='8bit' with matmul_scales='mxfp8': mesh.cp={cp} ranks cut rows of "
            f"data.seq={seq} into chunks of {chunk}, within a block of {math.gcd(seq, widest)} tokens; use seq in "
            f"multiples of {2 * cp * widest}, or matmul_scales='row'."
        )


def check_layouts(model: ModelConfig, layouts: Any, shapes: Any, axis_sizes: Mapping[str, int]) -> None:
    """Raise ConfigError if a dim of a parameter does not divide over the axes that shard it."""
    sizes, stacks = named_leaves(shapes), _blocks_by_stack(model)
    for name, layout in named_leaves(layouts).items():
        block = next((block for stack, block in stacks.items() if name.startswith(f"{stack}/")), model)
        for dim, axes, size in zip(layout.names, layout.axes, sizes[name].shape, strict=True):
            if dim == "layers":  # sharded only if each rank has the same number of each kind
                continue
            why = f", which shard{'' if len(axes) > 1 else 's'} {name}"
            size = size if dim == "d_ff" else block.sizes.get(dim, size)  # that of a user's block is its own
            _check_dim(model, dim, axes, axis_sizes, why, size=size)


def _blocks_by_stack(model: ModelConfig) -> dict[str, ModelConfig]:
    """The settings of the layers of each stack, by its name in the tree of parameters."""
    return {stack: model.blocks[kind] for kind, stack in stacks_of(model.layer_kinds).items()}


def _check_dim(
    model: ModelConfig,
    dim: str,
    axes: Sequence[str],
    axis_sizes: Mapping[str, int],
    why: str = "",
    *,
    size: int | None = None,
) -> None:
    """Raise ConfigError if a dim does not divide over these axes. `size` is that of an array or of a kind of layers, by
    default the model's."""
    size = model.sizes[dim] if size is None else size
    pieces = math.prod(axis_sizes.get(axis, 1) for axis in axes)
    if size % pieces == 0:
        return
    over = " x ".join(f"mesh.{axis}={axis_sizes[axis]}" for axis in axes if axis in axis_sizes)
    if dim not in model.sizes:
        raise ConfigError(f"{dim}={size} does not divide over {over}{why}; use a multiple of {pieces}.")
    # The vocab comes from a tokenizer or a published model, so users cannot choose it: the table is padded instead.
    multiple = math.lcm(model.vocab_multiple, pieces)
    larger = f"vocab_multiple={multiple}" if dim == "vocab" else f"{dim}={-(-size // pieces) * pieces}"
    padded = f", padded from {model.vocab}," * (dim == "vocab" and size > model.vocab)
    raise ConfigError(
        f"{_key_of(model, dim, size)}={size}{padded} does not divide over {over}{why}; "
        f"use {' x '.join(axes)} in {listed(divisors(size))} or {larger}."
    )


def check_remat(model: ModelConfig, remat: str, key: str = "pipeline.remat") -> None:
    """Raise ConfigError if a set names a part that no layer of the model has."""
    for part in remat.split():
        if part in REMAT_PARTS and part not in model.remat_parts:
            raise ConfigError(
                f"{key}={quoted(remat)} has {part!r} ({REMAT_PARTS[part]}), which no layer of this model has; "
                f"use a set of {', '.join(model.remat_parts)}."
            )


def check_masters(model: ModelConfig, masters_on: str) -> None:
    """Raise ConfigError if parameters in host memory would save no device memory."""
    if masters_on != "device" and model.dtype == "float32":
        raise ConfigError(
            f"optimizer.masters_on={masters_on!r} saves nothing with model.dtype='float32': a step computes with a "
            "copy in that dtype; use model.dtype='bfloat16', or masters_on='device'."
        )


def check_schedule_is_used(pipeline: PipelineConfig, axis_sizes: Mapping[str, int]) -> None:
    """Raise ConfigError if a schedule or virtual stages are chosen where there is no pipeline."""
    plain = PipelineConfig()
    if axis_sizes["pp"] == 1 and (pipeline.schedule, pipeline.virtual) != (plain.schedule, plain.virtual):
        virtual = f" with virtual={pipeline.virtual}" if pipeline.virtual != plain.virtual else ""
        raise ConfigError(
            f"pipeline.schedule={quoted(pipeline.schedule, LONGEST_PATH)}{virtual} does nothing with mesh.pp=1, where "
            f"microbatches are gradient accumulation; use schedule={plain.schedule!r} and virtual={plain.virtual}, or "
            "mesh.pp=2 or more."
        )


def check_stages(model: ModelConfig, schedule: Schedule) -> None:
    """Raise ConfigError if there are more stages than layers."""
    if model.layers < schedule.stages:
        virtual = f" x {schedule.virtual} stages on each" if schedule.virtual > 1 else ""
        ranks = model.layers // schedule.virtual
        # With mesh.pp=1 virtual stages are an error.
        fewer = f", or pp={ranks} or less" if ranks > (schedule.virtual > 1) else ""
        raise ConfigError(
            f"model.layers={model.layers} is less than mesh.pp={schedule.ranks}{virtual}; "
            f"use layers={schedule.stages} or more{fewer}."
        )


def check_kernel(model: ModelConfig, mesh: Any) -> None:
    """Raise ConfigError if the devices lack the attention kernel, or it does not support the dtype or head width.
    Abstract meshes pass; see `check_kernel_on`."""
    device = device_of(mesh)
    if device is not None:
        check_kernel_on(model, device.platform, device.device_kind)
    else:
        check_kernel_on(model, ATTENTION_KERNELS[model.kernel].native[0], "")


def device_of(mesh: Any) -> Any:
    """A device of a mesh, None if it is abstract and for accelerators."""
    device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else mesh.abstract_device
    return device if device is not None and device.platform else None


def check_kernel_on(model: ModelConfig, platform: str, kind: str) -> None:
    """Raise ConfigError if devices of this kind lack the attention kernel, or it does not support the dtype or head
    width. For an unknown kind, "", the widest limit applies."""
    if model.kernel == "cudnn" and model.dtype != "bfloat16":
        raise ConfigError(
            f"model.kernel='cudnn' needs model.dtype='bfloat16', not {model.dtype!r}; or use kernel='xla'."
        )
    runs = ATTENTION_KERNELS[model.kernel]
    if platform not in runs.platforms:
        needs = " or ".join(f"{name.upper()}s" for name in runs.native)
        tried = "".join(f", or {name.upper()}s to try it on" for name in runs.interpreted)
        fit = ", ".join(repr(name) for name, other in ATTENTION_KERNELS.items() if platform in other.native)
        raise ConfigError(
            f"model.kernel={model.kernel!r} needs {needs}{tried}, and these are {platform.upper()}s ({kind}); "
            f"use kernel in {{{fit}}}."
        )
    if model.kernel == "cudnn" and (model.score_cap or model.sinks):
        key = "score_cap" if model.score_cap else "sinks"
        raise ConfigError(
            f"model.{key}={getattr(model, key)!r} is not in model.kernel='cudnn'; use kernel='triton' or 'xla', or "
            "'splash' on TPUs."
        )
    for block in model.blocks.values():
        _check_width_of_heads(model, block, kind)


def _check_width_of_heads(model: ModelConfig, block: ModelConfig, kind: str) -> None:
    width, widest = block.d_head + block.d_rope * (model.attention == "mla"), widest_head(kind)
    if model.kernel == "triton" and width > TRITON_WIDEST:
        raise ConfigError(
            f"model.kernel='triton' takes heads of at most {TRITON_WIDEST} entries, and these are {width} wide; "
            "use kernel='xla'."
        )
    if model.kernel == "cudnn" and (width % 8 or width > widest):
        raise ConfigError(
            f"model.kernel='cudnn' on {kind or 'GPUs'} takes heads whose width is a multiple of 8, at most {widest}; "
            f"these are {width} wide ({_key_of(model, 'd_head', block.d_head)}={block.d_head}"
            f"{f' + d_rope={block.d_rope}' * (model.attention == 'mla')}); use kernel='xla'."
        )


def check_kernel_seq(model: ModelConfig, seq: int, context: str, ranks: int) -> None:
    """Raise ConfigError if the attention kernel does not support rows of `seq` tokens with this many context ranks."""
    chunks = 2 * ranks if ranks > 1 and CONTEXTS[context].meets == GATHERED else 1  # no block crosses their borders
    least = LANES * chunks
    if model.kernel == "splash" and seq % least:
        more = -(-seq // least) * least
        why = f" = 2 x mesh.cp={ranks} chunks of {LANES}" * (chunks > 1)
        raise ConfigError(
            f"data.seq={seq} is not a multiple of {least}{why}, the least block of model.kernel='splash'; "
            f"use seq={more}, or kernel='xla'."
        )
    # Context ranks that share the queries of a row have the window in the biases of their pieces.
    has_window = chunks == 1 and any(0 < window < seq for window in model.windows)
    version = cudnn_version() if model.kernel == "cudnn" and has_window else ()
    if version and version < WINDOWS_SINCE:
        raise ConfigError(
            f"model.kernel='cudnn' has windows since cuDNN {'.'.join(map(str, WINDOWS_SINCE))}, and "
            f"{'.'.join(map(str, version))} is installed; install a newer one, or use kernel='xla'."
        )
    if model.kernel == "cudnn" and seq % 2:
        raise ConfigError(f"data.seq={seq} is odd, which model.kernel='cudnn' does not take; use seq={seq + 1}.")
