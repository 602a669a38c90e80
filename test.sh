#!/usr/bin/env bash
# ./test.sh: installs what is missing, builds, and runs every CPU test. No GPU is needed.
#   ./test.sh            everything (about 25 minutes on two cores, packages included)
#   ./test.sh release    the Release tests alone; likewise api, asan, tsan, fuzz
# Prints what it skipped and why.
set -euo pipefail
cd "$(dirname "$0")"
jobs=$(nproc)
stages=("$@")
[ ${#stages[@]} -gt 0 ] || stages=(release api asan tsan fuzz)
skipped=()

tools/install-packages.sh test

build() { # preset [targets...]
  cmake --preset "$1" -DK3_TESTS=ON
  cmake --build --preset "$1" ${2:+--target} "${@:2}"
}

run_tests() { # preset [ctest arguments...]
  ctest --test-dir "build/$1" --output-on-failure -j "$jobs" --no-tests=error "${@:2}"
}

for stage in "${stages[@]}"; do
  echo "== $stage"
  case $stage in
    release)
      build release
      run_tests release
      /usr/bin/python3 -m pytest -q -rs -p no:cacheprovider tests/cli
      ;;
    api)
      # Real clients against `k3 serve`. They come from PyPI; where that cannot be reached the stage
      # is skipped and said so.
      [ -x build/release/k3 ] || build release
      if [ ! -x build/venv/bin/python ]; then python3 -m venv build/venv; fi
      if build/venv/bin/pip install -q -r tests/api/requirements.txt; then
        build/venv/bin/python -m pytest -q -rs -p no:cacheprovider tests/api
      else
        skipped+=("api: tests/api/requirements.txt could not be installed")
      fi
      ;;
    asan)
      build asan
      run_tests asan
      ;;
    tsan)
      # What has threads: the pool, the engine and its loop, the server, ranks, a step on several cores.
      build tsan test_core test_engine test_server test_cpu test_gates
      TSAN_OPTIONS=halt_on_error=1 run_tests tsan -R \
        '^(core|engine|server)[.]|^cpu[.]EpMoe|^gates[.].*(StepContract|EpFaults|Ep[.].*nano_f32_[24]|ThreadsChangeNothing/f32)'
      ;;
    fuzz)
      # Fixed seed, short: a regression run. The targets are part of the asan build.
      build asan
      for fuzzer in build/asan/tests/fuzz/*_fuzz; do
        name=$(basename "$fuzzer")
        echo "-- $name"
        corpus=()
        [ ! -d "tests/fuzz/corpus/$name" ] || corpus=("tests/fuzz/corpus/$name")
        mkdir -p "build/asan/corpus/$name"
        "$fuzzer" -seed=20261201 -max_total_time=15 -rss_limit_mb=4096 -timeout=20 -verbosity=0 \
          "build/asan/corpus/$name" "${corpus[@]}"
      done
      ;;
    *)
      echo "unknown stage '$stage': expected release, api, asan, tsan or fuzz" >&2
      exit 2
      ;;
  esac
done
for line in "${skipped[@]}"; do echo "SKIPPED $line"; done
echo "all stages passed: ${stages[*]}"
