# Shared by ./quickstart, ./test and .ci/run; meant to be sourced. Installs what is missing and configures builds.
# Everything comes from the distribution, except a few small pinned PyPI wheels that serve as test oracles.

BUILD_PACKAGES=(g++ cmake ninja-build pkg-config ccache libssl-dev nlohmann-json3-dev libcli11-dev libspdlog-dev libfmt-dev
  libboost1.81-dev libpcre2-dev libutf8proc-dev libhwy-dev libgtest-dev libgmock-dev)
RUN_PACKAGES=(python3)
TEST_PACKAGES=(python3-venv python3-numpy zstd)

say() { printf '\n== %s\n' "$*" >&2; }

as_root() {
  if [ "$(id -u)" -eq 0 ]; then "$@"; elif command -v sudo >/dev/null; then sudo "$@"; else
    echo "error: need root or sudo for: $*" >&2; return 1; fi
}

# need_packages PACKAGE… : installs the missing ones, and only then touches the network.
need_packages() {
  local missing=() wanted=() p
  for p in "$@"; do
    # Newer distributions have a newer Boost under another name; either will do.
    if [ "$p" = libboost1.81-dev ] && dpkg-query -W -f='${Status}\n' 'libboost1.[89]*-dev' 2>/dev/null | grep -q 'ok installed'; then continue; fi
    dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing+=("$p")
  done
  [ ${#missing[@]} -eq 0 ] && return 0
  as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq
  for p in "${missing[@]}"; do
    if [ "$p" = libboost1.81-dev ] && ! apt-cache show "$p" >/dev/null 2>&1; then p=libboost1.83-dev; fi
    wanted+=("$p")
  done
  say "installing ${wanted[*]}"
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${wanted[@]}" >/dev/null
}

# oracle_python DIR : makes a virtual environment with the wheels of tests/oracle/requirements*.txt in DIR and prints its interpreter.
oracle_python() {
  local dir=$1 stamp
  stamp="$dir/.wheels-$(cat tests/oracle/requirements*.txt | sha256sum | cut -c1-16)"
  if [ ! -e "$stamp" ]; then
    rm -rf "$dir"
    /usr/bin/python3 -m venv --system-site-packages "$dir" >&2
    "$dir/bin/python" -m pip install -q --disable-pip-version-check -r tests/oracle/requirements.txt >&2
    "$dir/bin/python" -m pip install -q --disable-pip-version-check --no-deps -r tests/oracle/requirements-no-deps.txt >&2
    touch "$stamp"
  fi
  echo "$dir/bin/python"
}
