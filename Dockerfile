# The operator's image: the locked dependencies and the wheel of this repository in one virtual environment, with the
# interpreter that runs it, and nothing else.
#
#   BUILD_IMAGE    an image with Python >= 3.11, its venv module, ldd and ldconfig, named by digest: the same bytes
#                  whenever it is built. Its interpreter is the one that is shipped.
ARG BUILD_IMAGE=python:3.13-slim-trixie@sha256:9d2e5553305c7c7b0097999bb17187c69b921ccd6bc9d40e4bb5ebe652c00285

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
COPY image image
RUN python3 image/runtime_files.py /venv /runtime

FROM scratch
ARG BUILD_IMAGE
ARG REVISION=unknown
LABEL org.opencontainers.image.title="operator-app" \
      org.opencontainers.image.description="Kubernetes operator for EnvoyProxy resources" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BUILD_IMAGE}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /runtime /
# Bytecode was compiled when the image was built; nothing is written at run time, so the root may be read-only.
ENV PATH=/venv/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /
USER 65532:65532
EXPOSE 8080
ENTRYPOINT ["python", "-m", "operator_app"]
