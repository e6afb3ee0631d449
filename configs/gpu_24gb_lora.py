"""Fine-tuning of Llama-2-7B with adapters (LoRA) on one GPU of 24 GB; its weights rest in 8 bits.

For:      a model of 7 billion parameters on a card at home: about 30 million tokens, 15,000 rows of 2048.
Numbers:  the model is Llama-2-7B; rank 16 on all products (Hu et al. 2022), a constant learning rate of 2e-4 after 100
          steps, and no decay, as usual for adapters.
Command:  python -m parallax.convert from-hf MODEL --workdir=runs/base, with the folder of the model, and then
          python train.py --config=configs/gpu_24gb_lora.py --config.train.init_from=runs/base --config.data.path=FILES
Hardware: one NVIDIA GPU of 24 GB that has bfloat16, as RTX 3090 and 4090, L4, A10.
Memory:   13.4 GiB of 24, as planned (python -m parallax.plan --analytic --config=configs/gpu_24gb_lora.py
          --topology=RTX4090:1); with model.lora_base="bfloat16" 19.5. docs/finetune.md has it without adapters.
Time:     planned, not yet run: 9.9 s a step on an RTX 4090 (MFU 56 %).
Loss:     not yet run.
"""

from ml_collections import ConfigDict

from configs.llama2_7b_64 import get_config as get_llama


def get_config() -> ConfigDict:
    config = get_llama()

    config.mesh.dp = 1

    config.model.kernel = "cudnn"
    config.model.lora_rank = 16
    config.model.lora_base = "int8"

    config.pipeline.microbatches = 16
    config.pipeline.remat = "elementwise"

    config.optimizer.learning_rate = 2e-4
    config.optimizer.schedule = "constant"
    config.optimizer.warmup_steps = 100
    config.optimizer.weight_decay = 0.0
    config.optimizer.eps = 1e-8

    config.data.tokenizer = "auto"  # that of the weights
    config.data.seq = 2048
    config.data.global_batch = 16

    config.train.steps = 1000
    config.train.eval_every_steps = 100
    config.train.eval_batches = 16

    config.checkpoint.every_steps = 100

    return config
