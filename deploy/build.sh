#!/usr/bin/env bash
# Build the image of this checkout, and check that it answers: deploy/build.sh [NAME:TAG] (default: localllm:local)
# EXTRAS='[cluster]' includes Ray for replicas.
set -euo pipefail
cd "$(dirname "$0")/.."

image=${1:-localllm:local}
if ! command -v docker >/dev/null; then
    echo "docker is not installed: build on a machine that has it, or install localllm with pip" >&2
    exit 2
fi

DOCKER_BUILDKIT=1 docker build --file deploy/Dockerfile --build-arg "EXTRAS=${EXTRAS:-}" --tag "$image" .
# As in the manifests: without root, without capabilities, and with a root file system that cannot be written.
docker run --rm --read-only --tmpfs /tmp --tmpfs /data:uid=10001 --cap-drop ALL \
    --security-opt no-new-privileges "$image" run demo "Once upon a time" --max-tokens 16
echo "built $image"
