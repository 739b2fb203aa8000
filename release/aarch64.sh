#!/usr/bin/env bash
# The README's examples on an emulated aarch64, in FOLDER: bash release/aarch64.sh FOLDER
# For Debian 12 with Python 3.11, after: dpkg --add-architecture arm64 && apt-get update && apt-get install
# qemu-user-static gcc-aarch64-linux-gnu libc6-dev-arm64-cross
set -euo pipefail
sources=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"/{packages,root,wheels,onnxgrad}
cd "$1"
(cd packages && apt-get download python3.11-minimal:arm64 libpython3.11-{minimal,stdlib}:arm64 libc6:arm64 zlib1g:arm64 \
    libexpat1:arm64 libssl3:arm64 libffi8:arm64 libgcc-s1:arm64 libstdc++6:arm64 liblzma5:arm64 libbz2-1.0:arm64 libuuid1:arm64)
for package in packages/*.deb; do dpkg-deb --extract "$package" root; done
cp -r "$sources"/{src,release,README.md} onnxgrad
aarch64-linux-gnu-gcc -shared -fPIC -O2 -Wall -Wextra -Werror -o onnxgrad/src/onnxgrad/runtime/_bridge.so \
    onnxgrad/src/onnxgrad/runtime/bridge.c
platforms=(--platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_26_aarch64
    --platform manylinux2014_aarch64 --platform any)
python3.11 -m pip install --quiet --only-binary :all: --python-version 3.11 "${platforms[@]}" --target wheels --upgrade \
    $(python3.11 -c "import tomllib; print(*tomllib.load(open('$sources/pyproject.toml', 'rb'))['project']['dependencies'])") onnxruntime
# onnxruntime looks for the kind of processor, and qemu shows it the machine's own.
mkdir -p root/proc
for core in 0 1; do
    printf 'processor\t: %d\nFeatures\t: fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp asimdrdm lrcpc asimddp\n' $core
    printf 'CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\nCPU revision\t: 1\n\n'
done > root/proc/cpuinfo
cat > examples.py <<'END'
import contextlib, io, platform, re, runpy

if __name__ == "__main__":  # kernels are compiled in other processes, too
    runpy.run_path("onnxgrad/release/readme_files.py")
    text = open("onnxgrad/README.md").read()
    for code, expected in re.findall(r"```python\n(.*?)```\s+```\n(.*?)```", text, re.S):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, {})
        assert printed.getvalue() == expected, printed.getvalue()
        print(f"{platform.machine()}: prints what the README says", flush=True)
END
qemu-aarch64-static -L root -E PYTHONPATH=wheels:onnxgrad/src -E PYTHONHOME="$PWD/root/usr" root/usr/bin/python3.11 examples.py
