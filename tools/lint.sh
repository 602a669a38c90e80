#!/usr/bin/env bash
# tools/lint.sh format|tidy: is every source file as clang-format would write it; does clang-tidy
# (.clang-tidy) find nothing. `tools/lint.sh fix` formats in place.
set -euo pipefail
cd "$(dirname "$0")/.."
mapfile -t files < <(git ls-files 'src/*.cc' 'src/*.h' 'tests/*.cc' 'tests/*.h' 'bench/*.cc' 'bench/*.h')
case ${1:-format} in
  format) clang-format --dry-run -Werror "${files[@]}" && echo "format: ${#files[@]} files" ;;
  fix) clang-format -i "${files[@]}" ;;
  tidy)
    # A configuration of its own: clang cannot read GCC's precompiled headers.
    cmake --preset release -B build/tidy -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON -DK3_TESTS=OFF >/dev/null
    # src/cuda needs the CUDA toolkit's headers, which this configuration does not have.
    mapfile -t sources < <(git ls-files 'src/*.cc' | grep -v -e kernels/isa_ -e '^src/cuda/')
    printf '%s\n' "${sources[@]}" |
      xargs -P "$(nproc)" -n 4 clang-tidy -p build/tidy --quiet --warnings-as-errors='*' 2>&1 |
      { grep -v -E 'warnings? generated|Suppressed|Use -header-filter' || true; }
    [ "${PIPESTATUS[1]}" -eq 0 ] && echo "tidy: ${#sources[@]} files"
    ;;
  *) echo "usage: tools/lint.sh format|fix|tidy" >&2; exit 2 ;;
esac
