# The operator's image: the locked dependencies and the wheel of this repository in one virtual environment.
#
#   BUILD_IMAGE    any image with Python >= 3.11 and its venv module; name it by digest for a release
#   RUNTIME_IMAGE  the same interpreter at the same path; it needs neither a shell nor pip
ARG BUILD_IMAGE=python:3.13-slim-trixie
ARG RUNTIME_IMAGE=${BUILD_IMAGE}

FROM ${BUILD_IMAGE} AS build
WORKDIR /src
# Two environments: the builder's own tools (pip, hatchling) never reach the one that is shipped.
RUN python3 -m venv /builder && python3 -m venv --without-pip /venv
COPY requirements/build.txt requirements/runtime.txt requirements/
RUN /builder/bin/pip install --require-hashes --no-cache-dir -r requirements/build.txt \
 && /builder/bin/pip --python /venv/bin/python install --require-hashes --no-cache-dir -r requirements/runtime.txt
COPY pyproject.toml README.md LICENSE ./
COPY operator_app operator_app
RUN /builder/bin/pip wheel --no-index --no-build-isolation --no-deps --wheel-dir /dist . \
 && /builder/bin/pip --python /venv/bin/python install --no-index --no-deps --no-cache-dir /dist/*.whl

FROM ${RUNTIME_IMAGE}
ARG REVISION=unknown
LABEL org.opencontainers.image.title="operator-app" \
      org.opencontainers.image.description="Kubernetes operator for EnvoyProxy resources" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /venv /venv
# Bytecode was compiled by the installation; nothing is written at run time, so the root file system may be read-only.
ENV PATH=/venv/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /
USER 65532:65532
EXPOSE 8080
ENTRYPOINT ["python", "-m", "operator_app"]
