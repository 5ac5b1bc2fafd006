# To be sourced: some candidates load cuBLASLt, and where the loader has none, that of a torch that is here will do.
if [[ $(ldconfig -p) != *libcublasLt.so.1[23]* ]]; then
  library=$(python3 -c 'import glob, sys; print(next((f for d in sys.path for f in glob.glob(d + "/nvidia/*/lib/libcublasLt.so.1[23]")), ""))' 2>/dev/null || true)
  [[ -z $library ]] || export LD_LIBRARY_PATH=${library%/*}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  unset library
fi
