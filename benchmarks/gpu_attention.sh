# Puts FlashInfer within reach of the commands that follow, without a network. Bash, to be sourced:
#
#   source benchmarks/gpu_attention.sh WHEELS [KERNELS]
#
# WHEELS: a folder with the wheels of flashinfer-python and apache-tvm-ffi. KERNELS: a folder with libraries that
# flashinfer_build.py saved; they are loaded as they are, nothing is compiled for them.

_site=${TMPDIR:-/tmp}/breakgraph-flashinfer
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$_site" "$1"/*.whl || return 1
export PYTHONPATH="$PWD/src:$_site${PYTHONPATH:+:$PYTHONPATH}"
export FLASHINFER_WORKSPACE_BASE="$_site/workspace"
mkdir -p "$FLASHINFER_WORKSPACE_BASE"
if [ -n "${2:-}" ]; then
    for _library in "$2"/*.so; do
        _name=$(basename "$_library" .so)
        mkdir -p "$_site/flashinfer/data/aot/$_name"
        cp "$_library" "$_site/flashinfer/data/aot/$_name/" || return 1
    done
fi
python3 -c 'import flashinfer; print("flashinfer", flashinfer.__version__)'
