# A rollout worker with SGLang, on SGLang's image.
ARG BASE=docker.io/lmsysorg/sglang:v0.5.23
ARG BUILD_BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BUILD_BASE} AS build
WORKDIR /source
COPY . .
# The build backend is as locked too.
RUN python -m venv /tmp/tools \
    && /tmp/tools/bin/pip install --no-cache-dir --no-deps --require-hashes -r docker/locks/build.txt \
    && /tmp/tools/bin/pip wheel --no-cache-dir --no-deps --no-index --no-build-isolation --wheel-dir /wheels .

FROM ${BASE}
ARG SERVICE=rollout
# Additional distributions, for example engines: "my-engine==1.2".
ARG PLUGINS=""
ARG VERSION=0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="paceline-${SERVICE}" \
      org.opencontainers.image.description="The rollout service of Paceline with SGLang" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# SGLang pins many dependencies, so Paceline's are installed in an environment layered over SGLang's,
# which stays as it was tested. A second torch fails the build. Without plug-ins pip looks nothing up,
# and fails if the lock lacks anything. Pools name SGLang's interpreter in
# their settings: `engines.sglang.python: /opt/sglang/bin/python` (docs/engines.md).
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
    && install -d /opt/sglang/bin \
    && printf '#!/bin/sh\nexec %s "$@"\n' "$(command -v python3)" > /opt/sglang/bin/python \
    && chmod 755 /opt/sglang/bin/python \
    && install -d -o 10001 -g 10001 /var/lib/paceline
ENV PATH=/opt/paceline/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    OMP_WAIT_POLICY=passive \
    PYTHONSAFEPATH=1 \
    HOME=/tmp
WORKDIR /opt/paceline
USER 10001:10001
# gRPC, metrics and health, weight streams.
EXPOSE 8400 8401 8402
ENTRYPOINT ["python", "-m"]
CMD ["paceline.front.cli", "--help"]
RUN python -c "import paceline_rollout.service" \
    && /opt/sglang/bin/python -c "from importlib.metadata import version; print(version('sglang'))"
