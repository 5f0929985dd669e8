#!/usr/bin/env bash
# Cross-builds the codec and its tests for AArch64 and runs them under qemu: NEON paths against the same oracles as the others.
# Usage: tools/check_aarch64.sh [build folder] [gtest filter]
# Needs Debian's g++-aarch64-linux-gnu, qemu-user-static, ninja-build, libgtest-dev and libhwy-dev.
set -euo pipefail
tree=$(cd "$(dirname "$0")/.." && pwd)
build=${1:-$tree/build/aarch64}
filter=${2:-*}
compiler=aarch64-linux-gnu-g++
qemu=$(command -v qemu-aarch64-static || command -v qemu-aarch64) ||
  { echo "no qemu-aarch64; install qemu-user-static" >&2; exit 4; }
command -v "$compiler" > /dev/null || { echo "no $compiler; install g++-aarch64-linux-gnu" >&2; exit 4; }
mkdir -p "$build"

# Headers of libraries that are headers only; the distribution's /usr/include as a whole is of the wrong architecture.
mkdir -p "$build/include"
for library in nlohmann gtest gmock hwy; do ln -sfn "/usr/include/$library" "$build/include/$library"; done
flags=(-std=c++20 -O2 -ffp-contract=off -fno-math-errno -I"$tree" -I"$tree/src" -I"$tree/tests" -isystem "$build/include"
  -DESPALIER_SOURCE_DIR="\"$tree\"" -DESPALIER_GOLDEN_DIR="\"$tree/tests/golden\""
  -DESPALIER_SHARED_GOLDEN="\"$tree/../shared/golden\"")

# Everything that the codec stands on, except what is made for x86 or needs OpenSSL.
sources=()
for file in "$tree"/src/{base,tensor,format,codec}/*.cpp; do
  case $file in *_avx2.cpp | *_avx512.cpp | */base/hash.cpp) ;; *) sources+=("$file") ;; esac
done
for name in codebook exl3_tensor hadamard int8_matmul matmul trellis viterbi_steps; do
  sources+=("$tree/tests/unit/codec/${name}_test.cpp")
done
gtest=/usr/src/googletest/googletest
sources+=("$gtest/src/gtest-all.cc" "$gtest/src/gtest_main.cc")

rules=$build/build.ninja
launcher=$(command -v ccache || true)
{
  echo "rule cxx"
  echo "  command = $launcher $compiler ${flags[*]@Q} \$extra -MD -MF \$out.d -c \$in -o \$out"
  echo "  depfile = \$out.d"
  echo "  deps = gcc"
  echo "rule link"
  echo "  command = $compiler -static \$in -o \$out -lpthread"
  objects=""
  for file in "${sources[@]}"; do
    object=$(echo "$file" | tr / _).o
    objects+=" $object"
    echo "build $object: cxx $file"
    [[ $file == *_neon.cpp ]] && echo "  extra = -march=armv8.2-a+dotprod"
    [[ $file == "$gtest"/* ]] && echo "  extra = -I$gtest"
  done
  echo "build codec_tests: link$objects"
} > "$rules"
ninja -C "$build" -j2 codec_tests
"$qemu" -cpu max "$build/codec_tests" --gtest_filter="$filter"
