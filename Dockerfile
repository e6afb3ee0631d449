# Images for CPUs, TPUs and GPUs. The commands, as parallax-train, are on the path; the folder is the repository's.
#   docker build --target=gpu --tag=parallax:gpu .
#   docker run --rm --gpus=all --shm-size=8g --volume="$PWD/runs:/parallax/runs" parallax:gpu parallax-train --config=gpu_80gb_x8 --config.data.source=stdlib --config.data.tokenizer=bpe
# GPUs need NVIDIA's driver and container toolkit on the host; CUDA comes with JAX.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS base
WORKDIR /parallax
ENV PYTHONUNBUFFERED=1
# What is installed depends on these files alone: other changes of the source do not install it again.
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY parallax/__init__.py parallax/version.py parallax/
COPY configs configs
CMD ["python", "-m", "parallax"]

FROM base AS cpu
RUN pip install --no-cache-dir --editable '.[data]' --constraint constraints.txt
COPY . .

FROM base AS tpu
RUN pip install --no-cache-dir --editable '.[data,tpu]' --constraint constraints.txt
COPY . .

FROM base AS gpu
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN pip install --no-cache-dir --editable '.[data,gpu]' --constraint constraints.txt
COPY . .
