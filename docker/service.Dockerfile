# gateway, controller, environment, reward, experience or tracking: Paceline and its dependencies, without torch.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG SERVICE
# Additional distributions, for example plug-ins: "reasoning-gym>=0.1.20 my-rewards==1.2".
ARG PLUGINS=""
WORKDIR /source
COPY . .
# The build backend is as locked too.
RUN python -m venv /tmp/tools \
    && /tmp/tools/bin/pip install --no-cache-dir --no-deps --require-hashes -r docker/locks/build.txt \
    && /tmp/tools/bin/pip wheel --no-cache-dir --no-deps --no-index --no-build-isolation --wheel-dir /wheels .
# A virtual environment separate from the base's packages, so that it can be copied as a whole, without
# pip. Everything but the plug-ins is as locked, and listed in a bill of materials; without plug-ins pip
# looks nothing up, and fails if a lock lacks anything. The Kubernetes client is half of the controller's
# image: its synchronous part is kept without byte code, since only the certificate issuer uses it, once
# a day.
# hadolint ignore=DL3013,SC2086
RUN python -m venv --without-pip /opt/paceline \
    && pip --python /opt/paceline/bin/python install --no-cache-dir --no-deps --require-hashes \
        -r "docker/locks/${SERVICE:?name one service}.txt" \
    && pip --python /opt/paceline/bin/python install --no-cache-dir --no-deps /wheels/paceline-*.whl \
    && pip --python /opt/paceline/bin/python install --no-cache-dir "paceline[${SERVICE}]" ${PLUGINS:---no-index} \
    && find /opt/paceline -path '*/kubernetes/client/*' -name __pycache__ -prune -exec rm -r {} + \
    && /tmp/tools/bin/cyclonedx-py environment --output-reproducible \
        --output-file /opt/paceline/sbom.cdx.json /opt/paceline/bin/python

FROM ${BASE}
ARG SERVICE
ARG VERSION=0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="paceline-${SERVICE}" \
      org.opencontainers.image.description="The ${SERVICE} service of Paceline" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/paceline /opt/paceline
ENV PATH=/opt/paceline/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    PYTHONSAFEPATH=1 \
    HOME=/tmp
# New volumes mounted here inherit the owner of the folder.
RUN install -d -o 10001 -g 10001 /var/lib/paceline \
    /var/lib/paceline-keys /var/lib/paceline-keys/experience \
    /var/lib/paceline-keys/gateway /var/lib/paceline-keys/controller
WORKDIR /opt/paceline
USER 10001:10001
# gRPC, metrics and health; the gateway's REST.
EXPOSE 8400 8401 8300
ENTRYPOINT ["python", "-m"]
CMD ["paceline.front.cli", "--help"]
# Fails if torch is importable, even if a plug-in pulled it in.
RUN python -c "import sys; from importlib.util import find_spec; sys.exit('torch is in this image' if find_spec('torch') else 0)" \
    && python -c "import paceline_${SERVICE}.service"
