# The CPU tier: docker build -f ci/images/cpu.Dockerfile -t verifier:cpu .
# The base has Python 3.12 and libnuma, which vLLM's CPU build links; ci/with-env does the rest.

# Replaced by a folder of wheels: --build-context wheels=FOLDER.
FROM scratch AS wheels
COPY ci/locks/uv.txt /

FROM python:3.12.12-bookworm
# 1 with a folder of wheels: pip, which installs uv alone, asks no index.
ARG PIP_NO_INDEX
WORKDIR /opt/verifier
COPY pyproject.toml README.md LICENSE ./
COPY ci ci
COPY verifier verifier
RUN --mount=type=bind,from=wheels,target=/wheels --mount=type=cache,target=/cache \
    PIP_FIND_LINKS=/wheels UV_FIND_LINKS=/wheels PIP_NO_CACHE_DIR=1 UV_CACHE_DIR=/cache \
    ci/with-env verifier doctor \
    && ci/with-env python -m compileall -q verifier
ENV HOME=/tmp USER=verifier
USER 1000:1000
WORKDIR /tmp
ENTRYPOINT ["/opt/verifier/ci/with-env"]
CMD ["verifier", "doctor"]
