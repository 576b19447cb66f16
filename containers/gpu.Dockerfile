# async_rl on NVIDIA GPUs: docker build -f containers/gpu.Dockerfile -t async-rl:gpu .
# NCCL and the weight transfer use shared memory, of which a container has 64 MB by default:
#   docker run --rm --gpus all --shm-size=16g --ulimit memlock=-1 --security-opt seccomp=unconfined -v "$PWD/runs:/work/runs" async-rl:gpu doctor
# The host's driver must be 580 or later (CUDA 13). The jail is as in cpu.Dockerfile.
FROM nvidia/cuda:13.0.1-devel-ubuntu22.04
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends make g++ python3.11 python3.11-dev python3.11-venv && rm -rf /var/lib/apt/lists/*
# Not root: programs of the policy run in the jail, which is one wall; the user is another.
RUN useradd --create-home --uid 1000 trainer && install -d -o trainer /work /work/runs
USER trainer
WORKDIR /work
COPY --chown=trainer Makefile pyproject.toml MANIFEST.in README.md LICENSE ./
COPY --chown=trainer requirements requirements
COPY --chown=trainer async_rl async_rl
COPY --chown=trainer launchers launchers
COPY --chown=trainer sandbox sandbox
COPY --chown=trainer conf conf
RUN make env GPU=1
ENV PATH=/work/.venv/bin:$PATH
ENTRYPOINT ["async-rl"]
CMD ["--help"]
