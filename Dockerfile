# docker build --tag ckptconv .
# docker run --rm --volume "$PWD:/data" --user "$(id -u):$(id -g)" ckptconv pt2safetensors model.pt
FROM python:3.13-slim AS build
# Which extras: torch is for load_state_dict alone, which no command uses.
ARG EXTRAS=azure,blake3,crc32c,dask,fast,gcs,http,hub,s3,xxhash,zstd
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY ckptconv ckptconv
RUN python -m venv /opt/ckptconv && /opt/ckptconv/bin/pip install --no-cache-dir ".[$EXTRAS]"

FROM python:3.13-slim
COPY --from=build /opt/ckptconv /opt/ckptconv
RUN useradd --uid 10001 --create-home ckptconv
ENV PATH=/opt/ckptconv/bin:$PATH
USER 10001:10001
WORKDIR /data
ENTRYPOINT ["ckptconv"]
CMD ["--help"]
