# docker build -t moeclipse . && docker run --rm --shm-size 1g moeclipse train
# With GPUs: docker run --rm --gpus all --shm-size 8g -v $PWD/runs:/work/runs moeclipse train
FROM python:3.12-slim
WORKDIR /source
COPY pyproject.toml hatch_build.py README.md CHANGELOG.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir ".[data,hf]"
RUN useradd --create-home --uid 1000 moeclipse && mkdir -p /work && chown moeclipse /work
USER moeclipse
WORKDIR /work
ENTRYPOINT ["moeclipse"]
CMD ["--help"]
