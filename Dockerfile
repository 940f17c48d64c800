# CPU:   docker build -t nano_rlvr .
#        docker run --rm -v "$PWD/runs:/nano_rlvr/runs" nano_rlvr
# CUDA:  docker build -t nano_rlvr --build-arg REQUIREMENTS=requirements.txt \
#            --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 .
#        docker run --rm --gpus all --shm-size 8g -v "$PWD/runs:/nano_rlvr/runs" nano_rlvr \
#            --model Qwen2.5-Math-1.5B
# Grade exercises without a network:
#        docker build -t grader --build-arg TARGET=dev .
#        docker run --rm --network none -v "$PWD/subs:/nano_rlvr/subs" --entrypoint .venv/bin/python \
#            grader -m learn.exercise --grade subs/*/exercises/[0-9]*
# The tests do not build it. They run with Python 3.11; Ubuntu 24.04 has 3.12.
ARG BASE=ubuntu:24.04
FROM ${BASE}
# a compiler: DeepSpeed and Triton compile at the first start
RUN apt-get update && apt-get install -y --no-install-recommends \
    build-essential ca-certificates git python3 python3-dev python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /nano_rlvr
COPY Makefile requirements*.txt ./
ARG REQUIREMENTS=requirements-cpu.txt
ARG TARGET=setup
RUN make ${TARGET} REQUIREMENTS=${REQUIREMENTS}
COPY . .
ENTRYPOINT [".venv/bin/python", "nano_rlvr.py"]
