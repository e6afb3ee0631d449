"""Every key of a run, with its default and meaning. Other configs are differences from this one.

Written by `python docs/config_keys.py` from parallax/config/sections.py, where a key is added or changed.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()

    # Number of devices along each axis; one may be -1: all remaining devices.
    config.mesh = ConfigDict()
    config.mesh.pp = 1  # pipeline: shards the layers
    config.mesh.dp = -1  # data: shards the batch, and the parameters (FSDP)
    config.mesh.tp = 1  # tensor: shards heads, d_ff and vocab
    config.mesh.simulate = 0  # number of simulated CPU devices, in all processes together; 0: use the real devices
    # data, without sharded parameters (hybrid sharding): for the network between slices of chips
    config.mesh.replica = 1
    config.mesh.cp = 1  # context: shards seq, and the parameters; data.seq must divide over 2 * cp
    config.mesh.ep = 1  # expert: shards experts; everything else, also the batch, is sharded as over dp

    # The model: a decoder-only transformer.
    config.model = ConfigDict()
    config.model.vocab = 0  # number of entries; 0: the tokenizer's, rounded up to a multiple of 128
    config.model.vocab_multiple = 1  # rows of tables are padded to a multiple of this, as 128; padding has no logits
    config.model.layers = 4  # number of blocks of attention and MLP
    # layers, in a config whose width, rate, batch and steps follow from them, as text_to_chat_x8; 0: in others
    config.model.depth = 0
    config.model.d_model = 256  # width of the residual stream
    config.model.d_ff = 704  # width of the MLP
    config.model.mlp = "gated"  # "gated" | "plain" | code: the MLP of dense layers: with a gate, or plain
    # "silu" | "gelu" | "gelu_tanh" | "relu2" | "clamped": activation of the MLP of dense layers and of shared experts;
    # relu2 is the square of ReLU, and clamped is, of gated ones, (up + 1) * gate * sigmoid(1.702 gate), with gate at
    # most activation_limit and up from -activation_limit to activation_limit
    config.model.activation = "silu"
    config.model.activation_limit = 7.0  # the largest gate and up of activation='clamped'
    config.model.mlp_bias = False  # biases on the projections of the MLP of dense layers
    # "rms" | "layer" | code: norms of the residual stream, in blocks and in the head: RMSNorm or LayerNorm
    config.model.norm = "rms"
    # "direct" | "one_plus" | "none": these norms' factor: the parameter itself, 1 + the parameter, or none, and no
    # parameter
    config.model.norm_scale = "direct"
    config.model.norm_bias = False  # biases of these norms
    # "before" | "after" | "both": where attention and the MLP have them: before, after, or both
    config.model.norm_place = "before"
    # "sequential" | "parallel" | "parallel_one_norm": what the MLP reads: the stream after attention, or what attention
    # reads, through a norm of its own or through attention's
    config.model.branches = "sequential"
    config.model.dense = "dense"  # "dense" | code: projections, but for experts' and mla's up-projections of latents
    # what differs in kinds of layers: settings, as "local=(sliding_window=1024) wide=(d_ff=4096)", and classes of
    # blocks, as "wide=my_module:WideBlock(width=4)"
    config.model.kinds = ""
    # kinds of layers, "dense", "moe" or those of model.kinds, in order: "moe*32", "dense*1 moe*26", "(local*5
    # global)*8"; empty: all dense
    config.model.layers_of = ""
    config.model.experts = 8  # moe: number of experts in a layer
    config.model.experts_per_token = 2  # moe: number of experts for each token
    config.model.d_expert = 704  # moe: width of an expert's gated MLP
    config.model.shared_experts = 0  # moe: experts for every token, computed as one MLP of this many times d_expert
    # "softmax" | "sigmoid": moe: score function of the router, over all experts or separately for each
    config.model.router_score = "softmax"
    config.model.router_normalized = True  # moe: the weights of a token's experts sum to 1
    config.model.router_scale = 1.0  # moe: factor on the weights of experts
    config.model.router_groups = 1  # moe: groups of experts; a token first chooses groups, then experts in them
    # moe: groups that a token chooses, by their best expert (softmax) or the sum of two best (sigmoid)
    config.model.router_groups_chosen = 1
    config.model.router_shift = False  # moe: a trained bias on the router's logits
    config.model.expert_bias = False  # moe: biases of each expert's gate, up and down
    config.model.shared_gate = False  # moe: each token's output of shared experts is times a sigmoid of its own
    # "swiglu" | "clamped": moe: silu(gate) * up in experts; or (up + 1) * gate * sigmoid(1.702 gate), with gate at most
    # expert_limit and up from -expert_limit to expert_limit
    config.model.expert_activation = "swiglu"
    config.model.expert_limit = 7.0  # moe: the largest gate and up of expert_activation='clamped'
    config.model.attention = "mla"  # "mla" | "gqa" | code: kv_heads = heads is MHA, kv_heads = 1 is MQA
    config.model.heads = 8  # query heads
    config.model.kv_heads = 8  # gqa only
    config.model.d_head = 32  # per head; in mla the part of q and k without position, and v
    config.model.d_latent = 64  # mla: width of the compressed keys and values
    config.model.d_latent_q = 0  # mla: width of the compressed queries; 0 projects queries directly
    config.model.d_rope = 16  # mla: width of the decoupled, rotated part of q and k
    config.model.rope = True  # rotary position embeddings; False: none (NoPE)
    config.model.attention_scale = 0.0  # factor on scores; 0: the width of queries and keys to the power -0.5
    config.model.score_cap = 0.0  # soft cap on scores: each becomes cap * tanh(score / cap); 0: none
    config.model.qk_clip = 0.0  # largest score of a head; a step that exceeds it scales its projections down; 0: none
    config.model.sinks = False  # a trained logit of each head that softmax counts beside the scores, without a value
    config.model.rope_theta = 10000.0  # base of the wavelengths of rotary position embeddings
    config.model.rope_fraction = 1.0  # gqa: part of a head's dims that is rotated, the last of them
    # "none" | "linear" | "yarn" | "llama3" | "longrope": extends the context beyond the length in training
    config.model.rope_scaling = "none"
    config.model.rope_factor = 1.0  # factor by which the scaling extends the context; 1 or more
    config.model.rope_original_seq = 2048  # tokens; yarn, llama3, longrope: the context before the extension
    # yarn, llama3 (usually 4): pairs with more turns in the original context are kept
    config.model.rope_fast_turns = 32.0
    # yarn, llama3: wavelengths of pairs with fewer turns there are multiplied by rope_factor
    config.model.rope_slow_turns = 1.0
    # yarn: the first and the last pair between which it interpolates are rounded outwards to whole numbers
    config.model.rope_truncate = True
    # factor on attention's logits; 0: (0.1 ln rope_factor + 1)^2 for yarn, 1 for others
    config.model.rope_temperature = 0.0
    config.model.rope_magnitude = 1.0  # factor on the rotated parts of queries and of keys
    # longrope: factors on the wavelengths of rotated pairs, one each, as "1.0 1.05 1.2", in rows of at most
    # rope_original_seq tokens
    config.model.rope_short_factors = ""
    config.model.rope_long_factors = ""  # longrope: the same in longer rows
    config.model.qkv_bias = False  # biases on the projections to heads: q, k and v; in mla only q
    config.model.out_bias = False  # a bias on attention's output projection
    config.model.qk_norm = False  # gqa: RMSNorm of queries and keys, before rotation
    # "head" | "projection": qk_norm: over d_head, with one scale for all heads; or over all heads of a projection, with
    # a scale for each
    config.model.qk_norm_over = "head"
    config.model.qk_norm_scale = "direct"  # "direct" | "one_plus" | "none": qk_norm: the norms' factor, as norm_scale
    config.model.qk_norm_after_rope = False  # qk_norm: after rotation
    config.model.sliding_window = 0  # the last tokens that a query attends to, including itself; 0: all
    config.model.norm_eps = 1e-06  # added to the mean square in norms
    config.model.tied = True  # the head uses the embedding's table
    config.model.embedding_scale = 1.0  # factor on the embedding's output
    config.model.residual_scale = 1.0  # factor on residual branches, of attention and of the MLP
    config.model.logit_scale = 1.0  # factor on logits
    config.model.logit_cap = 0.0  # soft cap on logits, after logit_scale: cap * tanh(logit / cap); 0: none
    # "scaled" | "zeros": initial values of attention's output projection and of the down-projections of MLPs and
    # experts: scaled, normal with 1 / sqrt(2 layers) of other kernels' deviation; zeros, so that each layer begins as
    # the identity
    config.model.init_out = "scaled"
    config.model.dropout = 0.0  # probability, on embedding and residual branches
    # "float32" | "bfloat16": dtype of compute; optimizer.weights_dtype is that of parameters
    config.model.dtype = "float32"
    # "auto" | "xla" | "cudnn" | "splash" | "triton": kernel of softmax attention; none stores heads x seq x seq scores.
    # xla runs everywhere, block by block; splash is for TPU (data.seq a multiple of 128; interpreted on CPU, slowly),
    # cudnn for GPU (bfloat16), triton for GPU (interpreted on CPU); auto is splash on TPU, and cudnn or else triton on
    # GPU, where these support the model and its rows, else xla
    config.model.kernel = "auto"
    # "compute" | "int8" | "float8" | "float4": dtype of products of projections and MLPs and of gradients of their
    # inputs; compute is model.dtype, int8 is fast on TPU v5e, v5p and v6e, float8 on v7x, H100 and H200; float4, with
    # nvfp4 scales, is for B200, and has gradients in model.dtype
    config.model.matmul = "compute"
    # int8, float8: the parts of a layer with 8-bit products: attention, its projections; mlp, the MLP of dense layers
    # and of shared experts; experts, those of mixtures
    config.model.matmul_parts = "attention mlp experts"
    # "compute" | "8bit": int8, float8: form of the input that is saved for the weight's gradient: compute, in
    # model.dtype; 8bit, the rounded input
    config.model.matmul_residuals = "compute"
    # "delayed" | "current" | "row" | "block" | "mxfp8" | "nvfp4" | "fixed": int8, float8: delayed: a tensor's largest
    # magnitude in the step before; current: that of now; row: of each token of inputs and gradients; block: of 128
    # entries of a token and of 128 x 128 of a weight; mxfp8: of 32 entries of each sum, as B200's products have; nvfp4:
    # of 16, of float4; fixed: matmul_ranges. Experts have row in place of current
    config.model.matmul_scales = "delayed"
    # fixed: largest magnitudes of input, weight and gradient, as "224 1 0.01"; what exceeds them is clipped
    config.model.matmul_ranges = ""
    # "compute" | "8bit": int8, float8: dtype of products for gradients of weights, but for experts': compute, in
    # model.dtype; 8bit, of the rounded input and gradient; with row, block and mxfp8 these are rounded anew, over
    # tokens
    config.model.matmul_weight_gradients = "compute"
    config.model.lora_rank = 0  # rank of adapters beside products, which alone are trained (Hu et al. 2022); 0: none
    config.model.lora_alpha = 16.0  # lora: what an adapter adds is multiplied by lora_alpha / lora_rank
    # lora: modules of a layer, or patterns of their names, whose products have adapters, as "attention/[qv] mlp"
    config.model.lora_on = "attention mlp"
    config.model.lora_dropout = 0.0  # lora: probability, on the input of each adapter; not of experts' adapters
    # "float32" | "bfloat16" | "int8" | "float8": lora: dtype between steps of weights that are not trained; int8 and
    # float8 have a float32 scale for each column of a projection's or an expert's kernel, and other weights are in
    # bfloat16 then
    config.model.lora_base = "float32"

    # How arrays are sharded.
    config.layout = ConfigDict()
    config.layout.residual = "batch/dp seq d_model/tp"  # or "batch/dp seq/tp d_model"
    # "column_row" | "scatter" | "streams": how kernels are sharded over tp, and activations sent: streams is column_row
    # whose tokens are multiplied as they arrive (only with a residual sharded over seq)
    config.layout.tensor_parallel = "column_row"
    config.layout.embedding = "vocab_parallel"  # "vocab_parallel" | "all_to_all": how tables are sharded over tp
    # "all_gather" | "ring" | "ulysses": how queries attend to the keys of other cp ranks: keys and values are gathered;
    # or move from rank to rank (only with kernel='xla'); or an all-to-all shards heads instead of seq
    config.layout.context = "all_gather"
    # "zigzag" | "contiguous": which of a row's tokens a cp rank has: an early and a late part, so that all ranks
    # compute as much of causal attention; or one part, for models all of whose layers have windows
    config.layout.order = "zigzag"
    # "auto" | "gather" | "ragged": moe: how tokens are sent to experts of other ep ranks: gather sends all tokens to
    # all ranks; ragged sends each token only to ranks with its experts; auto is the one that sends less, and gather
    # where ragged does not compile
    config.layout.exchange = "auto"
    # moe: number of hosts on which the ranks of ep are. With exchange='ragged' a token is then sent once to each host
    # that has any of its experts, and from there to their ranks; 1: to each of these ranks
    config.layout.exchange_hosts = 1
    # moe: most tokens of a device that are sent to experts at once; the backward pass repeats the exchange. 0: all
    # tokens
    config.layout.expert_chunk_tokens = 0

    # When stages run and what they save.
    config.pipeline = ConfigDict()
    # "gpipe" | "one_f_one_b" | "interleaved" | "zero_bubble" | "zero_bubble_v" | "dualpipe_v" | a CSV file | code:
    # order in which stages run
    config.pipeline.schedule = "gpipe"
    config.pipeline.virtual = 1  # interleaved only: stages on each pipeline rank
    config.pipeline.microbatches = 1  # number per step; with mesh.pp=1, gradient accumulation
    # "none" | "elementwise" | "attention" | "layer" | "stage" | a set of parts, as "norm swiglu ffn": what the backward
    # pass recomputes
    config.pipeline.remat = "layer"
    # "device" | "host" | a set of parts, as "input ffn": memory of saved activations; a set names the parts that are in
    # host memory
    config.pipeline.residuals_on = "device"
    # "float32" | "bfloat16": dtype of summed gradients of layers' matrices; bfloat16 is rounded stochastically at each
    # addition
    config.pipeline.grads_dtype = "float32"
    config.pipeline.grads_on = "device"  # "device" | "host": memory of summed gradients of layers' matrices

    # How data axes shard parameters, and so when weights and gradients are sent over them.
    config.data_parallel = ConfigDict()
    # "ddp" | "zero1" | "zero2" | "lean" | "zero3" | code: policy of all parameters
    config.data_parallel.policy = "zero3"
    config.data_parallel.exceptions = ""  # other policies by name, as "embedding=zero1 blocks/mlp=zero2"

    # When weights are gathered, and in which dtypes weights and gradients are sent.
    config.fsdp = ConfigDict()
    config.fsdp.prefetch = 0  # number of layers gathered ahead, and scattered afterwards, while one computes
    config.fsdp.reduce = "float32"  # "float32" | "compute": dtype in which gradients are sent; compute is model.dtype
    # "compute" | "int8" | "float8": dtype in which matrices of layers, except routers, are sent
    config.fsdp.gather_dtype = "compute"
    # "parameter" | "module" | "layer": matrices of a layer that are sent in one message
    config.fsdp.bucket = "parameter"

    # The loss: cross-entropy, a z-loss, and losses that balance the load of experts.
    config.loss = ConfigDict()
    config.loss.name = "cross_entropy"  # "cross_entropy" | code: loss of a token
    config.loss.z_coefficient = 0.0  # weight of logsumexp(logits)^2
    config.loss.balance_coefficient = 0.0  # moe: weight of the balance loss; 1e-2 or 1e-3 is usual
    config.loss.router_z_coefficient = 0.0  # moe: weight of logsumexp(router's logits)^2, a mean over tokens
    config.loss.chunk_tokens = 1024  # most tokens on a device whose logits exist at once
    config.loss.table_first = False  # the head's table gradient before its input's, and sent before layers run backward

    # The optimizer and the learning rate schedule.
    config.optimizer = ConfigDict()
    # "adamw" | "muon" | code: with muon, AdamW updates embedding, head, norms and biases
    config.optimizer.name = "adamw"
    config.optimizer.learning_rate = 0.0003  # peak
    # "cosine" | "linear" | "wsd" | "wsd_sqrt" | "constant": after warm-up; wsd stays at the peak and falls at its end,
    # linearly; wsd_sqrt falls as 1 - the root of the share of the fall that is done
    config.optimizer.schedule = "cosine"
    config.optimizer.warmup_steps = 100  # steps in which the rate rises linearly to its peak
    # wsd, wsd_sqrt: share of the steps after the warm-up, the last ones, in which the rate falls; 0: it stays
    config.optimizer.decay_fraction = 0.2
    config.optimizer.final_ratio = 0.1  # last learning rate / peak; a run of one step has the peak
    config.optimizer.b1 = 0.9  # decay of AdamW's mean of gradients, also with muon
    config.optimizer.b2 = 0.95  # decay of AdamW's mean of squares
    config.optimizer.eps = 1e-08  # added to the root of AdamW's mean of squares
    config.optimizer.weight_decay = 0.1  # decoupled; not applied to norms and biases
    config.optimizer.clip_norm = 1.0  # largest norm of the whole gradient; 0 is off
    config.optimizer.muon_momentum = 0.95  # muon: Nesterov momentum, the decay of the mean of gradients
    # moe: added in a step to the router's bias of an expert with too few tokens; 1e-3 is usual
    config.optimizer.balance_rate = 0.0
    # "float32" | "bfloat16" | "float8": dtype of first moments between steps; float8: e4m3, with a float32 scale per
    # block
    config.optimizer.m_dtype = "float32"
    # "float32" | "bfloat16" | "float8": dtype of AdamW's second moments between steps; float8 stores their roots
    config.optimizer.v_dtype = "float32"
    # "float32" | "bfloat16": dtype of parameters between steps; with bfloat16 there is no float32 copy
    config.optimizer.weights_dtype = "float32"
    # "device" | "host": memory of moments between steps, except of norms and biases; host: the update copies one
    # layer's at a time
    config.optimizer.states_on = "device"
    # "device" | "host": memory of parameters between steps; host: a step computes with a copy in model.dtype
    config.optimizer.masters_on = "device"
    # names or patterns of parameters that are not trained, as "embedding blocks/attention/*"
    config.optimizer.frozen = ""

    # Skips updates whose loss or gradient is not finite, and spikes.
    config.guard = ConfigDict()
    config.guard.max_skipped_steps = 3  # consecutive steps skipped for non-finite numbers; one more stops the run
    config.guard.spike_z = 0.0  # also skip steps this many deviations above the running mean; 0: off, 6 is usual
    config.guard.spike_signal = "loss"  # "loss" | "grad_norm": signal in which spikes are detected
    config.guard.spike_window_steps = 128  # steps over which statistics average; no spike is detected before this many

    # The text, the tokenizer and the windows of tokens.
    config.data = ConfigDict()
    # "stdlib" | "moby" | "synthetic" | "text" | "jsonl" | "parquet" | "arrayrecord" | "dataset" | "prepared" | code:
    # source of documents
    config.data.source = "stdlib"
    # file, folder or glob, or a list, as "['web/*.jsonl', 'more']"; prepared: a folder; dataset: NAME
    config.data.path = ""
    config.data.field = "text"  # of records: the field or column that holds a document
    config.data.where = ""  # which records are documents, as "score >= 0.5 and year > 2019"; empty: all
    # sources by name instead of one, as "web=(path='web', weight=7) code=(path='code/*.jsonl', weight=3)"
    config.data.mixture = ""
    # what changes from a step on: weights, seq, global_batch, as "anneal=(from_step=801, web=1, code=3)"
    config.data.phases = ""
    # "auto" | "bytes" | "bpe" | a tokenizer.json, a file of tiktoken or SentencePiece, or tiktoken:NAME: auto: that of
    # the run in train.init_from or of prepared data, else bytes; bpe is trained on the corpus
    config.data.tokenizer = "auto"
    config.data.bpe_vocab = 4096  # number of entries of a trained bpe tokenizer
    # "text" | "tokens": what becomes of text that spells a special token, as a rendered chat does: it stays text, or is
    # that token
    config.data.special_tokens = "text"
    # "text" | "chat" | "completion": what a record is: a text; chat: messages, of which answers are learned;
    # completion: a prompt and the completion that is learned
    config.data.format = "text"
    # "auto" | "chatml" | "gemma" | "llama3" | "zephyr" | a Jinja file: chat: auto: that of the tokenizer's folder
    config.data.chat_template = "auto"
    config.data.loss_on = "answers"  # "answers" | "all": chat, completion: which tokens are learned
    # "cut" | "drop" | "split": chat, completion: of a record with more tokens than a window: its first ones, none, or
    # parts that each begin with a user's turn
    config.data.too_long = "cut"
    config.data.cache = ""  # folder for prepared shards; empty: inside the run folder
    # most bytes of copies on this machine of data in a bucket or behind a URL, in ~/.cache/parallax/copies
    config.data.cache_bytes = 100000000000
    config.data.seq = 256  # tokens in a window
    config.data.global_batch = 32  # windows in a step, over all devices
    config.data.eval_fraction = 0.02  # share of documents held out
    config.data.seed = 0  # seed of the order of windows
    config.data.synthetic_tokens = 1000000  # synthetic: bytes of text, which are tokens of the bytes tokenizer

    # How long to train, and how often to log and evaluate.
    config.train = ConfigDict()
    config.train.steps = 1000  # number of steps of the whole run, including those before a resume
    config.train.seed = 0  # seed of initial values and dropout
    config.train.init_from = ""  # run folder from which a fresh run takes the weights, and nothing else
    # step of another run, as runs/mine/checkpoints/100, from which a fresh run goes on, with its weights, optimizer and
    # step number
    config.train.continue_from = ""
    config.train.other_data = False  # continue_from: go on with other data than that run's, of the same tokenizer
    config.train.log_every_steps = 10  # steps between console lines; metrics.jsonl has every step
    config.train.eval_every_steps = 200  # 0: only at the end
    config.train.eval_batches = 4  # global batches in an evaluation; -1: the whole held-out text; 0: no evaluation
    config.train.tasks = ""  # tasks of lm-evaluation-harness, with commas between them (extra: lm-eval); empty: none
    # tasks: folder of descriptions in place of the harness's own; they may name code, which is run
    config.train.tasks_folder = ""
    config.train.tasks_every_steps = 0  # tasks: steps between them; 0: only at the end
    config.train.tasks_limit = 0  # tasks: documents of each; 0: all
    config.train.stall_factor = 10.0  # prints all stacks if a step takes this many times the median; 0 is off
    # a process is named as slow if it needs this share of a step's time more than the median process, in data, on the
    # host or in saving
    config.train.slow_process_share = 0.2
    config.train.slow_process_steps = 50  # steps over whose mean a process is compared; 0: none is named
    # steps between checks for faulty hardware, which run a step twice and compare; 0: never
    config.train.check_every = 0
    config.train.tensorboard = False  # also write TensorBoard events (extra: tensorboard)
    config.train.wandb = ""  # Weights & Biases project that also gets the metrics (extra: wandb); empty: none
    # "auto" | "off" | a folder, which all processes see: folder of compiled programs; auto: on accelerators, the user's
    # cache folder (~/.cache/parallax/jax)
    config.train.compile_cache = "auto"
    config.train.profile_steps = ""  # FIRST:LAST, as 20:25: steps to trace, both included; empty: none

    # When to save and what to keep: the last few, the best few by eval/loss, and one of every so many steps for good.
    config.checkpoint = ConfigDict()
    config.checkpoint.every_steps = 500  # 0: only at the end
    config.checkpoint.keep_last = 2  # number of newest checkpoints to keep
    config.checkpoint.keep_best = 1  # by eval/loss; none without evaluations
    config.checkpoint.keep_every_steps = 0  # the first checkpoint of every so many steps is kept for good; 0: none
    config.checkpoint.local = ""  # folder of each host for copies of the newest step; empty: none
    config.checkpoint.local_every_steps = 0  # 0: only where a save would miss deadline_secs
    config.checkpoint.deadline_secs = 0  # from SIGTERM to the end of a preempted host, as 30; 0: no limit

    # How long the processes of a job wait for each other, and a process alone for its devices; in seconds.
    config.distributed = ConfigDict()
    config.distributed.start_secs = 300  # for all processes to start
    config.distributed.heartbeat_secs = 60  # a process without a sign of life for this time is lost
    config.distributed.wait_secs = 900  # in a step, a batch of an evaluation, a save
    config.distributed.compile_secs = 7200  # in the first step and the first evaluation, which compile
    config.distributed.prepare_secs = 86400  # for process 0 to prepare the data
    config.distributed.clock_secs = 60  # largest difference of the processes' clocks

    # The text that a finished run writes.
    config.sample = ConfigDict()
    config.sample.prompt = ""  # empty: no sample
    config.sample.special_tokens = "text"  # "text" | "tokens": as data.special_tokens, of the prompt
    config.sample.tokens = 200  # number of tokens after the prompt
    config.sample.temperature = 0.8  # 0 is greedy
    config.sample.top_k = 0  # 0 is off
    config.sample.top_p = 0.95  # 1 is off
    config.sample.seed = 0  # seed of sampling

    return config
