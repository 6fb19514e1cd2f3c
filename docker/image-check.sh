#!/usr/bin/env bash
# Builds the light images, measures the size that each adds to its base, and starts each as its user,
# with docker, or as root with buildah. If buildah cannot pull the base, a minimal Debian with its
# Python (debootstrap) replaces it.
set -euo pipefail
cd "$(dirname "$0")/.."

SERVICES=(gateway controller environment experience reward tracking)
declare -A MOST_MB=([gateway]=250 [controller]=250 [environment]=800 [experience]=800 [reward]=800 [tracking]=800)
PULL_TIMEOUT_S=${PULL_TIMEOUT_S:-120}
TOOL=${IMAGE_TOOL:?docker or buildah}
BASE=$(sed -n 's/^ARG BASE=//p' docker/service.Dockerfile)
PREFIX=${IMAGE_PREFIX:-paceline-}
TAG=${IMAGE_TAG:?a tag}
FLAGS=${IMAGE_FLAGS:-}

if [ "$TOOL" = buildah ]; then
  export BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot} STORAGE_DRIVER=${STORAGE_DRIVER:-vfs}
fi

have_base() {
  if [ "$TOOL" = docker ]; then
    docker image inspect "$BASE" >/dev/null 2>&1 || timeout "$PULL_TIMEOUT_S" docker pull -q "$BASE"
  else
    buildah inspect --type image "$BASE" >/dev/null 2>&1 || timeout "$PULL_TIMEOUT_S" buildah pull -q "$BASE"
  fi
}

# `python` and `pip` at the paths of the real base, and pip may install packages as it may there.
stand_in() {
  local root container
  root=$(mktemp -d)
  debootstrap --variant=minbase --include=ca-certificates,python3,python3-pip,python3-venv bookworm "$root" >"$root.log"
  ln -s /usr/bin/python3 "$root/usr/local/bin/python"
  ln -s /usr/bin/pip3 "$root/usr/local/bin/pip"
  rm -rf "$root"/usr/lib/python3*/EXTERNALLY-MANAGED "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/*
  container=$(buildah from scratch)
  buildah add -q "$container" "$root" / >/dev/null
  buildah config --env PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
  buildah commit -q --rm "$container" "$BASE" >/dev/null
  rm -rf "$root" "$root.log"
}

# inside IMAGE COMMAND...: its output and exit code, as the image's user.
inside() {
  local image=$1 container code=0
  shift
  if [ "$TOOL" = docker ]; then
    docker run --rm --network none --read-only --entrypoint "" "$image" "$@" || code=$?
  else
    container=$(buildah from --pull-never "$image")
    buildah run "$container" -- "$@" || code=$?
    buildah rm "$container" >/dev/null
  fi
  return "$code"
}

check() {
  local service=$1 image=$2 megabytes user usage code=0
  megabytes=$(inside "$image" du -s --block-size=1MB /opt/paceline | cut -f1)
  user=$(inside "$image" id -u)
  usage=$(inside "$image" python -m "paceline_$service" 2>&1) || code=$?
  printf '%-12s %4s MB of %s, user %s, without arguments: %s\n' \
    "$service" "$megabytes" "${MOST_MB[$service]}" "$user" "$code"
  [ "$megabytes" -lt "${MOST_MB[$service]}" ] || { echo "$image is too large"; return 1; }
  [ "$user" -ne 0 ] || { echo "$image runs as root"; return 1; }
  [ "$code" -eq 2 ] && [[ $usage == usage:* ]] || { echo "$image: expected usage and 2: $usage"; return 1; }
  inside "$image" python -c "import json; assert json.load(open('/opt/paceline/sbom.cdx.json'))['components']"
  inside "$image" paceline --version >/dev/null
  [ "$service" != tracking ] || inside "$image" python -c "import mlflow, tensorboardX, trackio, wandb" >/dev/null
}

if ! have_base; then
  [ "$TOOL" = buildah ] || { echo "docker cannot pull $BASE"; exit 1; }
  echo "$BASE cannot be pulled; making a stand-in"
  stand_in
fi
if [ "$TOOL" = buildah ]; then
  FLAGS="--pull-never --network=host $FLAGS"
fi
for service in "${SERVICES[@]}"; do
  make --no-print-directory "image-$service" IMAGE_TOOL="$TOOL" IMAGE_TAG="$TAG" IMAGE_PREFIX="$PREFIX" IMAGE_FLAGS="$FLAGS"
done
for service in "${SERVICES[@]}"; do
  check "$service" "$PREFIX$service:$TAG"
done
