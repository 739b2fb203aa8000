# Images of onnxgrad, whose entry point is the command. `make dist` first: the wheel has kernels for all processors.
#     docker build -t onnxgrad --target cpu .          for the CPU
#     docker build -t onnxgrad:cuda --target cuda .    for NVIDIA GPUs
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS base
# Kernels that neither the wheel nor the warmup has are kept here, whoever the container runs as.
ENV NUMBA_CACHE_DIR=/var/cache/onnxgrad PATH=/opt/onnxgrad/bin:$PATH PIP_NO_CACHE_DIR=1
RUN useradd --create-home --uid 1000 onnxgrad \
    && mkdir -m 1777 $NUMBA_CACHE_DIR \
    && python3 -m venv /opt/onnxgrad

FROM base AS installed-cpu
COPY dist/onnxgrad-*.whl /tmp/
RUN pip install "$(echo /tmp/onnxgrad-*.whl)[cpu]" && onnxgrad warmup && chmod -R a+rwX $NUMBA_CACHE_DIR

FROM base AS cpu
COPY --from=installed-cpu /opt/onnxgrad /opt/onnxgrad
COPY --from=installed-cpu /var/cache/onnxgrad /var/cache/onnxgrad
USER onnxgrad
WORKDIR /work
ENTRYPOINT ["onnxgrad"]

FROM base AS installed-cuda
COPY dist/onnxgrad-*.whl /tmp/
RUN pip install "$(echo /tmp/onnxgrad-*.whl)[cuda]" onnxruntime-gpu && onnxgrad warmup && chmod -R a+rwX $NUMBA_CACHE_DIR

FROM base AS cuda
# Triton compiles with a C compiler what launches its kernels.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=installed-cuda /opt/onnxgrad /opt/onnxgrad
COPY --from=installed-cuda /var/cache/onnxgrad /var/cache/onnxgrad
USER onnxgrad
WORKDIR /work
ENTRYPOINT ["onnxgrad"]
