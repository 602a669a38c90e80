#!/usr/bin/env bash
# ./quickstart.sh "PROMPT": installs what is missing, builds build/release/k3 and continues the prompt
# with the model in models/k3-nano. The continuation alone goes to standard output.
set -euo pipefail
cd "$(dirname "$0")"

prompt=${1:-The capital of France is}
tools/install-packages.sh build
if [ ! -f build/release/build.ninja ]; then
  cmake --preset release -DK3_TESTS=OFF >&2
fi
cmake --build --preset release --target k3 >&2
exec build/release/k3 generate --model models/k3-nano --prompt "$prompt" \
  --max-tokens 48 --temperature 0
