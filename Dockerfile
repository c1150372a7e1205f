# docker build -t dapo-rl .                               without a GPU
# docker build -t dapo-rl:cuda --build-arg DEVICE=cuda .  for NVIDIA GPUs: docker run --gpus all
ARG PYTHON=3.12
ARG DEVICE=cpu

FROM python:${PYTHON}-slim AS base
ENV PATH=/opt/venv/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore

# The dependencies, at the versions of requirements.lock. PyTorch has a layer of its own, which a change of the others
# leaves as it is. Some packages have no wheel and need the compiler, which stays behind in this stage.
FROM base AS dependencies
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/venv
ARG DEVICE
ARG TORCH=2.13.0
# An index with another build of PyTorch, such as https://download.pytorch.org/whl/cu126; PyPI's is for current GPUs.
ARG TORCH_INDEX
RUN --mount=type=cache,target=/root/.cache/pip \
    if [ "$DEVICE" = cpu ]; then : "${TORCH_INDEX:=https://download.pytorch.org/whl/cpu}"; fi; \
    PIP_EXTRA_INDEX_URL="$TORCH_INDEX" pip install "torch==$TORCH"
WORKDIR /src
COPY pyproject.toml requirements.lock ./
ARG EXTRAS=gym,models,lora,datasets,tensorboard
RUN --mount=type=cache,target=/root/.cache/pip \
    python -c 'import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; extras = sys.argv[1].split(","); print(*project["dependencies"], *(line for extra in extras if extra for line in project["optional-dependencies"][extra]), sep="\n")' "$EXTRAS" > wanted.txt && \
    pip install -r wanted.txt -c requirements.lock

FROM base AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN --mount=type=cache,target=/root/.cache/pip pip wheel --no-deps --wheel-dir /dist .

FROM base AS for-cpu

# Triton compiles the launchers of its kernels with a C compiler.
FROM base AS for-cuda
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

FROM for-${DEVICE}
# The home directory is open to every user, so that `docker run --user` works: libraries keep their caches there.
RUN useradd --create-home --uid 1000 dapo && chmod 1777 /home/dapo && install -d -o dapo -m 1777 /work
COPY --from=dependencies /opt/venv /opt/venv
COPY --from=wheel /dist /dist
RUN pip install --no-cache-dir --no-deps /dist/*.whl
ENV HOME=/home/dapo USER=dapo
USER dapo
WORKDIR /work
CMD ["dapo", "--help"]
