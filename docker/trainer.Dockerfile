# The trainer, on PyTorch's own image with CUDA. With SERVICE=local: every service, for one machine.
ARG BASE=docker.io/pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime
ARG BUILD_BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BUILD_BASE} AS build
WORKDIR /source
COPY . .
# The build backend is as locked too.
RUN python -m venv /tmp/tools \
    && /tmp/tools/bin/pip install --no-cache-dir --no-deps --require-hashes -r docker/locks/build.txt \
    && /tmp/tools/bin/pip wheel --no-cache-dir --no-deps --no-index --no-build-isolation --wheel-dir /wheels .

FROM ${BASE}
ARG SERVICE=trainer
# Additional distributions, for example objectives: "my-objectives==1.2".
ARG PLUGINS=""
ARG VERSION=0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="paceline-${SERVICE}" \
      org.opencontainers.image.description="Paceline with PyTorch: ${SERVICE}" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# An environment layered over the base's, whose torch it uses; a second torch fails the build.
# Without plug-ins pip looks nothing up, and fails if the lock lacks anything.
# hadolint ignore=DL3013,DL3042,SC2086
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    --mount=type=bind,source=docker/locks,target=/locks \
    python3 -m venv --without-pip --system-site-packages /opt/paceline \
    && python3 -m pip --python /opt/paceline/bin/python install --no-cache-dir --no-deps \
        --require-hashes -r "/locks/${SERVICE}.txt" \
    && python3 -m pip --python /opt/paceline/bin/python install --no-cache-dir --no-deps /wheels/paceline-*.whl \
    && python3 -m pip --python /opt/paceline/bin/python install --no-cache-dir paceline ${PLUGINS:---no-index} \
    && python3 -m venv /tmp/sbom \
    && /tmp/sbom/bin/pip install --no-cache-dir --no-deps --require-hashes -r /locks/build.txt \
    && /tmp/sbom/bin/cyclonedx-py environment --output-reproducible \
        --output-file /opt/paceline/sbom.cdx.json /opt/paceline/bin/python \
    && rm -r /tmp/sbom \
    && test -z "$(find /opt/paceline -path '*-packages/torch')" \
    && install -d -o 10001 -g 10001 /var/lib/paceline \
        /var/lib/paceline-keys /var/lib/paceline-keys/experience \
        /var/lib/paceline-keys/gateway /var/lib/paceline-keys/controller
ENV PATH=/opt/paceline/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    OMP_WAIT_POLICY=passive \
    PYTHONSAFEPATH=1 \
    HOME=/tmp
WORKDIR /opt/paceline
USER 10001:10001
# gRPC, metrics and health, weight streams, torchrun.
EXPOSE 8400 8401 8402 8403
ENTRYPOINT ["python", "-m"]
CMD ["paceline.front.cli", "--help"]
RUN python -c "import paceline_trainer.service"
