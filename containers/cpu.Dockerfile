# async_rl on CPUs: docker build -f containers/cpu.Dockerfile -t async-rl:cpu .
# Run it with room for weights in shared memory, and with user namespaces for the strongest jail:
#   docker run --rm --shm-size=2g --security-opt seccomp=unconfined -v "$PWD/runs:/work/runs" async-rl:cpu launch conf=ppo_code
# Under Docker's default seccomp profile the jail is one of level 2 (Landlock and seccomp); async-rl doctor shows which one works.
FROM python:3.11-slim-bookworm
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends make g++ && rm -rf /var/lib/apt/lists/*
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
# The index with the CPU build of torch, as in docs/quickstart.md: --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL
RUN make env
ENV PATH=/work/.venv/bin:$PATH
ENTRYPOINT ["async-rl"]
CMD ["--help"]
