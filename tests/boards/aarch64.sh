#!/bin/bash
# Make a folder in which an aarch64 Python with Kestrel's engine runs under qemu-user: packages of this Debian's own
# sources, unpacked (nothing is installed here), and the aarch64 wheels of the very versions that the given Python has.
# usage: aarch64.sh FOLDER PYTHON
set -euo pipefail
folder=$(realpath -m "$1")
python=$2
here=$(dirname "$(realpath "$0")")
new=$folder.new
rm -rf "$new"
mkdir -p "$new"/{apt/state/lists/partial,apt/cache/archives/partial,root,site}

: >"$new/apt/status" # no package is installed, so the whole closure is downloaded
apt() {
  apt-get -q -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o APT::Sandbox::User="$(id -un)" \
    -o Dir::State="$new/apt/state" -o Dir::State::status="$new/apt/status" -o Dir::Cache="$new/apt/cache" \
    -o Debug::NoLocking=1 "$@"
}
apt update
apt install --yes --download-only --no-install-recommends python3.11 libgomp1 libstdc++6
for package in "$new"/apt/cache/archives/*.deb; do
  dpkg-deb --extract "$package" "$new/root"
done
rm -rf "$new/apt"

# onnxruntime asks these files what the processor is; without them it crashes when it is imported.
mkdir -p "$new"/root/{proc,sys/devices/system/cpu}
cp "$here/cortex-a76.cpuinfo" "$new/root/proc/cpuinfo"
echo 0-1 | tee "$new/root/sys/devices/system/cpu/possible" >"$new/root/sys/devices/system/cpu/present"

pins=$("$python" - <<'END'
from importlib.metadata import version
names = "numpy onnx onnxruntime numba llvmlite safetensors xxhash gguf tokenizers jinja2"
print(*(f"{name}=={version(name)}" for name in names.split()))
END
)
platforms=()
for glibc in 2_17 2_26 2_27 2_28 2_31 2_34 2_35; do # Debian 12 has 2.36
  platforms+=(--platform "manylinux_${glibc}_aarch64")
done
# shellcheck disable=SC2086
"$python" -m pip install --quiet --disable-pip-version-check --target "$new/site" "${platforms[@]}" \
  --platform manylinux2014_aarch64 --implementation cp --python-version 3.11 --only-binary=:all: $pins

rm -rf "$folder"
mv "$new" "$folder"
