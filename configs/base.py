"""Every key of a run, with its default and meaning. Other configs are differences from this one.

Written by `python docs/config_keys.py` from parallax/config/sections.py, where a key is added or changed.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()

    # Devices along each axis; one of them may be -1, "all that is left".
    config.mesh = ConfigDict()
    config.mesh.pp = 1  # pipeline: the layers are cut over it
    config.mesh.dp = -1  # data: the batch is cut over it, and the parameters too (FSDP)
    config.mesh.tp = 1  # tensor: heads, d_ff and vocab are cut over it
    config.mesh.simulate = 0  # simulated CPU devices, in all processes together; 0 takes the devices that are there
    # data, over which no parameter is cut (hybrid sharding): for the network between slices of chips
    config.mesh.replica = 1
    config.mesh.cp = 1  # context: seq is cut over it, and the parameters too; data.seq must divide over 2 * cp
    config.mesh.ep = 1  # expert: experts are cut over it; all else as over dp, the batch too

    # The model as one device sees it: a decoder-only transformer.
    config.model = ConfigDict()
    config.model.vocab = 0  # entries; 0 takes the tokenizer's, rounded up to a multiple of 128
    config.model.vocab_multiple = 1  # tables get rows up to such a multiple, as 128: zeros that have no logits
    config.model.layers = 4  # blocks of attention and MLP
    config.model.d_model = 256  # width of the residual stream
    config.model.d_ff = 704  # width of the gated MLP
    # kinds of layers, "dense" or "moe", in order: "moe*32", "dense*1 moe*26", "(dense moe*3)*6"; empty: all dense
    config.model.layers_of = ""
    config.model.experts = 8  # moe: experts of a layer
    config.model.experts_per_token = 2  # moe: how many of them a token goes to
    config.model.d_expert = 704  # moe: width of an expert's gated MLP
    config.model.shared_experts = 0  # moe: further experts that every token goes to; one MLP of so many widths
    config.model.router_score = "softmax"  # "softmax" | "sigmoid": moe: of an expert, over all or each by itself
    config.model.router_normalized = True  # moe: the weights of a token's experts sum to 1
    config.model.router_scale = 1.0  # moe: times these weights
    config.model.router_groups = 1  # moe: groups of experts, of which a token chooses some first
    config.model.router_groups_chosen = 1  # moe: how many; a group counts as its best expert, or two best
    config.model.attention = "mla"  # "mla" | "gqa": kv_heads = heads is MHA, kv_heads = 1 is MQA
    config.model.heads = 8  # query heads
    config.model.kv_heads = 8  # gqa only
    config.model.d_head = 32  # per head; in mla the part of q and k without position, and v
    config.model.d_latent = 64  # mla: width of the compressed keys and values
    config.model.d_latent_q = 0  # mla: width of the compressed queries; 0 projects queries directly
    config.model.d_rope = 16  # mla: width of the decoupled, rotated part of q and k
    config.model.rope_theta = 10000.0  # base of the wavelengths of rotary positions
    config.model.rope_scaling = "none"  # "none" | "linear" | "yarn" | "llama3": for longer texts than were trained
    config.model.rope_factor = 1.0  # context extension that the scaling serves; 1 or more
    config.model.rope_original_seq = 2048  # tokens; yarn, llama3: the context that was trained before
    config.model.rope_fast_turns = 32.0  # yarn, llama3 (its own: 4): pairs that turn more often there are kept
    config.model.rope_slow_turns = 1.0  # yarn, llama3: pairs that turn less often there are stretched by rope_factor
    config.model.rope_temperature = 0.0  # times attention's logits; 0: yarn's (0.1 ln rope_factor + 1)^2, others' 1
    config.model.rope_magnitude = 1.0  # times the rotated parts of queries and of keys
    config.model.qkv_bias = False  # biases on the projections to heads: of q, k and v; in mla of q alone
    config.model.qk_norm = False  # gqa: an RMSNorm over d_head of each query and key head, before it is rotated
    config.model.sliding_window = 0  # tokens that a query sees, itself too; data.seq must not be longer. 0: all
    config.model.norm_eps = 1e-06  # added to the mean square in RMSNorm
    config.model.tied = True  # the head is the embedding's transpose
    config.model.dropout = 0.0  # probability, on embedding and residual branches
    config.model.dtype = "float32"  # "float32" | "bfloat16": of compute; optimizer.weights_dtype is that of parameters
    # "xla" | "cudnn" | "splash": softmax core of attention, none of which holds heads x seq x seq scores. xla runs
    # everywhere, block by block; splash is for TPU (data.seq a multiple of 128; interpreted on CPU, slowly), cudnn for
    # GPU (bfloat16)
    config.model.kernel = "xla"
    # "compute" | "int8" | "float8": products of projections and MLPs, and gradients of their inputs; compute is
    # model.dtype, int8 is fast on TPU v5e, v5p and v6e, float8 on v7x, H100 and H200
    config.model.matmul = "compute"
    # int8, float8: of which parts of a layer: attention, its projections; mlp, that of dense layers and of shared
    # experts
    config.model.matmul_parts = "attention mlp"
    # "compute" | "8bit": int8, float8: what is saved of an input for the weight's gradient: compute, it in model.dtype;
    # 8bit, what it was rounded to
    config.model.matmul_residuals = "compute"

    # Strings that say where arrays are cut.
    config.layout = ConfigDict()
    config.layout.residual = "batch/dp seq d_model/tp"  # or "batch/dp seq/tp d_model"
    config.layout.tensor_parallel = "column_row"  # "column_row" | "scatter": how kernels are cut over tp
    config.layout.embedding = "vocab_parallel"  # "vocab_parallel" | "all_to_all": how tables are cut over tp
    # "all_gather" | "ring" | "ulysses": how queries meet the keys of other cp ranks: keys and values are gathered; or
    # go from rank to rank (kernel='xla' alone); or heads change places with seq
    config.layout.context = "all_gather"
    # "auto" | "gather" | "ragged": moe: how tokens come to experts of other ep ranks: gather, all of them go to all;
    # ragged, each where an expert of its own is; auto, what sends less, on CPUs gather
    config.layout.exchange = "auto"
    # moe: at most so many of a device's tokens are on their way to experts at once, and the backward pass sends them
    # again; 0: all
    config.layout.expert_chunk_tokens = 0

    # When stages run and what they keep.
    config.pipeline = ConfigDict()
    # "gpipe" | "one_f_one_b" | "interleaved" | "zero_bubble" | "zero_bubble_v" | a CSV file: when which stage runs
    config.pipeline.schedule = "gpipe"
    config.pipeline.virtual = 1  # interleaved only: stages on each pipeline rank
    config.pipeline.microbatches = 1  # per step; with mesh.pp=1 they are gradient accumulation
    # "none" | "elementwise" | "attention" | "layer" | "stage" | a set of parts, as "norm swiglu ffn": what the backward
    # pass computes again
    config.pipeline.remat = "layer"
    # "device" | "host" | a set of parts, as "input ffn": where what a pass saves waits for a later one; a set is of the
    # parts that wait in host memory
    config.pipeline.residuals_on = "device"

    # Where the data axes cut parameters, and so when weights and gradients travel over them.
    config.data_parallel = ConfigDict()
    # "ddp" | "zero1" | "zero2" | "lean" | "zero3" | one of your own: of all parameters
    config.data_parallel.policy = "zero3"
    config.data_parallel.exceptions = ""  # other policies by name, as "embedding=zero1 blocks/mlp=zero2"

    # When weights are gathered, and how gradients travel.
    config.fsdp = ConfigDict()
    config.fsdp.prefetch = 0  # layers gathered ahead, and gradients scattered behind, while one computes
    config.fsdp.reduce = "float32"  # "float32" | "compute": dtype of gradients that travel; compute is model.dtype
    config.fsdp.gather_dtype = "compute"  # "compute" | "int8" | "float8": dtype of weights that travel

    # What is minimised: cross-entropy, a z-loss, and what keeps the load of experts even.
    config.loss = ConfigDict()
    config.loss.z_coefficient = 0.0  # weight of logsumexp(logits)^2
    config.loss.balance_coefficient = 0.0  # moe: weight of the balance loss; 1e-2 or 1e-3 is usual
    config.loss.router_z_coefficient = 0.0  # moe: weight of logsumexp(router's logits)^2, a mean over tokens
    config.loss.chunk_tokens = 1024  # logits of at most so many tokens exist at once on a device

    # How gradients become updates, and the learning rate over the steps.
    config.optimizer = ConfigDict()
    config.optimizer.name = "adamw"  # "adamw" | "muon": with muon, AdamW does embedding, head, norms and biases
    config.optimizer.learning_rate = 0.0003  # peak
    config.optimizer.schedule = "cosine"  # "cosine" | "linear" | "wsd" | "constant": after warm-up
    config.optimizer.warmup_steps = 100  # in which the rate rises to its peak, linearly
    config.optimizer.decay_fraction = 0.2  # wsd: last share of train.steps in which the rate falls
    config.optimizer.final_ratio = 0.1  # last learning rate / peak
    config.optimizer.b1 = 0.9  # AdamW's decay of the gradient's mean, also for what muon leaves to it
    config.optimizer.b2 = 0.95  # AdamW's decay of the square's mean
    config.optimizer.eps = 1e-08  # AdamW's, added to the root of that mean
    config.optimizer.weight_decay = 0.1  # decoupled; norms and biases are left out
    config.optimizer.clip_norm = 1.0  # of the whole gradient; 0 is off
    config.optimizer.muon_momentum = 0.95  # muon: decay of the gradient's mean; Nesterov's, as Muon has it
    # moe: what a step adds to the router's bias of an expert with too few tokens; 1e-3 is usual
    config.optimizer.balance_rate = 0.0
    # "float32" | "bfloat16" | "float8": of first moments between steps; float8: e4m3, each block over a float32 scale
    config.optimizer.m_dtype = "float32"
    # "float32" | "bfloat16" | "float8": of second moments, AdamW's; float8 has their roots
    config.optimizer.v_dtype = "float32"
    # "float32" | "bfloat16": of parameters between steps; with bfloat16 there is no float32 copy of them
    config.optimizer.weights_dtype = "float32"
    # "device" | "host": where moments are between steps, but those of norms and biases; host: the update moves a
    # layer's at a time
    config.optimizer.states_on = "device"
    # "device" | "host": the same of parameters; host: a step computes with a copy of them in model.dtype
    config.optimizer.masters_on = "device"

    # A step whose loss or gradient is not finite changes nothing.
    config.guard = ConfigDict()
    config.guard.max_skipped_steps = 3  # in a row, for numbers that are not finite; one more stops the run
    config.guard.spike_z = 0.0  # also skip what lies so many deviations above its running mean; 0: off, 6 is usual
    config.guard.spike_signal = "loss"  # "loss" | "grad_norm": what is judged
    config.guard.spike_window_steps = 128  # the statistics' memory; no spike is seen before they have so many steps

    # Which text, as which tokens, in which windows.
    config.data = ConfigDict()
    # "stdlib" | "moby" | "synthetic" | "text" | "jsonl" | "parquet" | "prepared": where documents come from
    config.data.source = "stdlib"
    config.data.path = ""  # file, folder or glob of text, jsonl, parquet; folder of prepared
    config.data.field = "text"  # jsonl, parquet: the field or column that holds a document
    # "auto" | "bytes" | "bpe" | a tokenizer.json: auto is that of the run in train.init_from, or of prepared data, or
    # bytes; bpe is trained on the corpus
    config.data.tokenizer = "auto"
    config.data.bpe_vocab = 4096  # entries of a bpe that is trained
    config.data.cache = ""  # folder for prepared shards; empty: inside the run folder
    config.data.seq = 256  # tokens in a window
    config.data.global_batch = 32  # windows in a step, over all devices
    config.data.eval_fraction = 0.02  # share of documents held out
    config.data.seed = 0  # of the order of windows
    config.data.synthetic_tokens = 1000000  # synthetic: bytes of text, tokens of the bytes tokenizer

    # How long to train, and how often to log and evaluate.
    config.train = ConfigDict()
    config.train.steps = 1000  # of the whole run, those before a resume too
    config.train.seed = 0  # of initial values and dropout
    config.train.init_from = ""  # a run folder whose weights, and nothing else of it, a fresh run starts from
    config.train.log_every_steps = 10  # console lines; metrics.jsonl has every step
    config.train.eval_every_steps = 200  # 0: only at the end
    config.train.eval_batches = 4  # global batches in an evaluation; 0 turns evaluation off
    config.train.stall_factor = 10.0  # a step that takes so many medians has all stacks printed; 0 is off
    config.train.check_every = 0  # steps; one is taken twice and compared, to find faulty hardware; 0: never
    config.train.tensorboard = False  # also write TensorBoard events (extra: tensorboard)
    config.train.wandb = ""  # project of Weights & Biases that also gets the numbers (extra: wandb); empty: none
    # "auto" | "off" | a folder, which all processes see: where compiled programs are kept; auto: on accelerators, in
    # the user's cache folder (~/.cache/parallax/jax)
    config.train.compile_cache = "auto"
    config.train.profile_steps = ""  # FIRST:LAST, as 20:25: these steps are traced, both ends too; empty: none

    # When to save and what to keep: the last few, and the best few by eval/loss.
    config.checkpoint = ConfigDict()
    config.checkpoint.every_steps = 500  # 0: only at the end
    config.checkpoint.keep_last = 2  # newest checkpoints that stay
    config.checkpoint.keep_best = 1  # by eval/loss

    # How long the processes of a job wait for each other; in seconds.
    config.distributed = ConfigDict()
    config.distributed.start_secs = 300  # for all to be there
    config.distributed.heartbeat_secs = 60  # a process that gives no sign of life for so long is lost
    config.distributed.wait_secs = 900  # in a step, an evaluation, a save
    config.distributed.compile_secs = 7200  # in what is compiled first: the first step, the first evaluation
    config.distributed.prepare_secs = 86400  # for process 0 to prepare the data
    config.distributed.clock_secs = 60  # clocks may differ by so much

    # The text that a finished run writes.
    config.sample = ConfigDict()
    config.sample.prompt = ""  # empty: no sample
    config.sample.tokens = 200  # behind the prompt
    config.sample.temperature = 0.8  # 0 is greedy
    config.sample.top_k = 0  # 0 is off
    config.sample.top_p = 0.95  # 1 is off
    config.sample.seed = 0  # of the draw

    return config
